package cli

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"
	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"onejob/lock"
	"onejob/lock/consul"
	"onejob/lock/rabbitmq"
	"onejob/store"
	"onejob/tasks"
	execkind "onejob/tasks/kinds/exec"
	httpkind "onejob/tasks/kinds/http"
	sqlkind "onejob/tasks/kinds/sql"
	"onejob/worker"
)

// Config is everything that can be set. Each key is also a variable: ONEJOB_
// and the path, in capitals, with underscores, such as ONEJOB_WORKER_QUEUES.
type Config struct {
	Replica      string        `yaml:"replica"`
	StartTimeout time.Duration `yaml:"start_timeout"`

	Postgres struct {
		DSN       string `yaml:"dsn"`
		ListenDSN string `yaml:"listen_dsn"`
		Listen    bool   `yaml:"listen"`
		MaxConns  int    `yaml:"max_conns"`
		Migrate   bool   `yaml:"migrate"`

		Timeout time.Duration `yaml:"timeout"`
	} `yaml:"postgres"`

	Consul struct {
		Address    string        `yaml:"address"`
		Token      string        `yaml:"token"`
		TokenFile  string        `yaml:"token_file"`
		CAFile     string        `yaml:"ca_file"`
		CAPath     string        `yaml:"ca_path"`
		CertFile   string        `yaml:"cert_file"`
		KeyFile    string        `yaml:"key_file"`
		ServerName string        `yaml:"tls_server_name"`
		Prefix     string        `yaml:"prefix"`
		Service    string        `yaml:"service"`
		Liveness   string        `yaml:"liveness"`
		CheckTTL   time.Duration `yaml:"check_ttl"`
		Heartbeat  time.Duration `yaml:"heartbeat"`
		SessionTTL time.Duration `yaml:"session_ttl"`
		Renew      time.Duration `yaml:"renew"`
		Margin     time.Duration `yaml:"margin"`
		LockDelay  time.Duration `yaml:"lock_delay"`
		Verify     time.Duration `yaml:"verify"`
	} `yaml:"consul"`

	Worker struct {
		Concurrency   int           `yaml:"concurrency"`
		PayloadMemory int           `yaml:"payload_memory"`
		Poll          string        `yaml:"poll"`
		Queues        []string      `yaml:"queues"`
		Timeout       time.Duration `yaml:"timeout"`
		MaxCrashes    int           `yaml:"max_crashes"`
		RetryBase     time.Duration `yaml:"retry_base"`
		RetryMax      time.Duration `yaml:"retry_max"`
		ShutdownGrace time.Duration `yaml:"shutdown_grace"`
	} `yaml:"worker"`

	Limits struct {
		Backend     string            `yaml:"backend"`
		RabbitMQURL string            `yaml:"rabbitmq_url"`
		Slots       map[string]int    `yaml:"slots"`
		Kinds       map[string]string `yaml:"kinds"`
	} `yaml:"limits"`

	Retention struct {
		Succeeded time.Duration `yaml:"succeeded"`
		Failed    time.Duration `yaml:"failed"`
	} `yaml:"retention"`

	HTTP struct {
		Listen        string   `yaml:"listen"`
		ReadToken     string   `yaml:"read_token"`
		ReadTokenFile string   `yaml:"read_token_file"`
		ActTokensFile string   `yaml:"act_tokens_file"`
		Hosts         []string `yaml:"hosts"`
		HidePayloads  []string `yaml:"hide_payloads"`
	} `yaml:"http"`

	Log struct {
		Level  string `yaml:"level"`
		Format string `yaml:"format"`
	} `yaml:"log"`

	Kinds struct {
		Exec execkind.Config `yaml:"exec"`
		HTTP httpkind.Config `yaml:"http"`
		SQL  sqlkind.Config  `yaml:"sql"`
	} `yaml:"kinds"`
}

// configCommand prints example, a file of all settings.
func configCommand(example string) *cobra.Command {
	return &cobra.Command{
		Use:     "config",
		Short:   "Print a configuration file with every setting, its default and a comment",
		Example: `  onejob config >onejob.yaml`,
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			_, err := io.WriteString(c.OutOrStdout(), example)
			return err
		},
	}
}

// minReadToken is the least length of a token of the web page, so that none can be guessed.
const minReadToken = 16

// defaultListen is the default of http.listen. When it is taken,
// by another replica on this machine most likely, a free port is used.
const defaultListen = "127.0.0.1:7677"

// defaults is what config.example.yaml shows.
func defaults() Config {
	var c Config
	c.StartTimeout = time.Minute
	c.Postgres.Listen = true
	c.Postgres.MaxConns = store.DefaultMaxConns
	c.Postgres.Migrate = true
	c.Postgres.Timeout = store.DefaultTimeout
	lock := consul.Config{}.WithDefaults()
	c.Consul.Prefix, c.Consul.Service, c.Consul.Liveness = lock.Prefix, lock.Service, string(lock.Liveness)
	c.Consul.CheckTTL, c.Consul.Heartbeat = lock.CheckTTL, lock.Heartbeat
	c.Consul.SessionTTL, c.Consul.Renew = lock.SessionTTL, lock.Renew
	c.Consul.Margin, c.Consul.LockDelay, c.Consul.Verify = lock.Margin, lock.LockDelay, lock.Verify
	replica := worker.Config{}.WithDefaults()
	c.Worker.Concurrency, c.Worker.PayloadMemory, c.Worker.Poll = replica.Concurrency, replica.PayloadMemory, replica.Poll
	c.Worker.MaxCrashes, c.Worker.ShutdownGrace = replica.MaxCrashes, replica.ShutdownGrace
	c.Worker.RetryBase, c.Worker.RetryMax = replica.RetryBase, replica.RetryMax
	c.Retention.Succeeded, c.Retention.Failed = replica.KeepSucceeded, replica.KeepFailed
	c.Limits.Backend = "consul"
	c.Limits.Slots, c.Limits.Kinds = map[string]int{}, map[string]string{}
	c.HTTP.Listen = defaultListen
	c.Log.Level, c.Log.Format = "info", "auto"
	c.Kinds.HTTP.ResponseLimit, c.Kinds.HTTP.Timeout = httpkind.DefaultResponseLimit, httpkind.DefaultTimeout
	return c
}

// replicaName is a replica's name unless it is set: another one in each process.
var replicaName = sync.OnceValue(func() string {
	return cmp.Or(hostname(), "replica") + "-" + strings.ToLower(rand.Text()[:5])
})

// loadConfig reads the file, if path is not empty, and the environment over it, for a
// replica: what it needs to run tasks must be there. It returns all problems at once.
func loadConfig(path string, environ []string) (Config, error) {
	return readConfig(path, environ, (*Config).validate)
}

// loadSettings is loadConfig for a command that runs no tasks, such as onejob tasks list. Its
// user may be another one than the replica's, and its machine too: commands, users and keys
// that the settings name need not be there.
func loadSettings(path string, environ []string) (Config, error) {
	return readConfig(path, environ, (*Config).validateSettings)
}

// readConfig is loadConfig that lets validate look at the settings.
func readConfig(path string, environ []string, validate func(*Config) error) (Config, error) {
	tree, lines := map[string]any{}, map[string]int{}
	if path != "" {
		content, err := os.ReadFile(path)
		if err == nil {
			tree, lines, err = parseFile(content)
		}
		if err != nil {
			return Config{}, usage(fmt.Errorf("configuration %s: %w", path, err))
		}
	}
	origin, err := addVariables(tree, environ)
	problems := []error{err}

	c := defaults()
	problems = append(problems, decode("", tree, reflect.ValueOf(&c).Elem())...)
	if c.Replica == "" {
		c.Replica = replicaName()
	}
	problems = append(problems, validate(&c))
	if err := errors.Join(problems...); err != nil {
		return Config{}, usage(problemList("configuration", path, origin, lines, err))
	}
	return c, nil
}

// validate returns all that is wrong with c, each problem with the setting's
// name in front.
func (c *Config) validate() error {
	errs := []error{c.validateSettings()}
	if c.validateConsulSettings() == nil { // or its errors would be there twice
		errs = append(errs, c.validateConsul())
	}
	if len(c.Kinds.Exec.Commands) > 0 {
		errs = append(errs, execkind.CheckTimes(c.Consul.Margin, c.Consul.LockDelay))
	}
	join := func(prefix string, err error) {
		for _, e := range flatten(err) {
			errs = append(errs, fmt.Errorf("%s%w", prefix, e))
		}
	}
	if c.HTTP.Listen != "" {
		_, err := c.actTokens()
		errs = append(errs, err)
		if c.HTTP.ReadToken == "" { // or both are set, which is reported
			_, err := c.readToken()
			errs = append(errs, err)
		}
	}
	_, err := execkind.New(c.Kinds.Exec)
	join("kinds.exec.commands: ", err)
	_, err = httpkind.New(c.Kinds.HTTP)
	join("kinds.http.", err)
	_, err = sqlkind.New(c.Kinds.SQL, nil)
	join("kinds.sql.statements: ", err)
	return errors.Join(errs...)
}

// validateSettings is validate without what only this machine can tell, and its user.
func (c *Config) validateSettings() error {
	var errs []error
	add := func(format string, a ...any) { errs = append(errs, fmt.Errorf(format, a...)) }
	if len(c.Replica) > 200 {
		add("replica: the name is %d bytes long, more than 200", len(c.Replica))
	}
	if c.StartTimeout < time.Second {
		add("start_timeout: %v is below 1s", c.StartTimeout)
	}
	if s, err := store.Open(c.storeConfig()); err != nil {
		add("%w", err)
	} else {
		s.Close()
	}
	if c.Postgres.MaxConns < 2 || c.Postgres.MaxConns > 1000 {
		add("postgres.max_conns: %d is not between 2 and 1000", c.Postgres.MaxConns)
	}
	if c.Postgres.Timeout < time.Second || c.Postgres.Timeout > time.Minute {
		add("postgres.timeout: %v is not between 1s and 1m", c.Postgres.Timeout)
	}
	errs = append(errs, c.validateConsulSettings())
	if c.Worker.PayloadMemory < worker.MaxPayload {
		add("worker.payload_memory: %d bytes are less than %d, the longest payload", c.Worker.PayloadMemory, worker.MaxPayload)
	}
	if c.Worker.Concurrency < 1 || c.Worker.Concurrency > 10000 {
		add("worker.concurrency: %d is not between 1 and 10000", c.Worker.Concurrency)
	}
	if _, err := worker.ParsePoll(c.Worker.Poll); err != nil {
		add("worker.poll: %q: %w; write it as @every 1s or as a cron line", c.Worker.Poll, err)
	}
	if c.Worker.MaxCrashes < 1 {
		add("worker.max_crashes: %d is not above zero", c.Worker.MaxCrashes)
	}
	if slices.Contains(c.Worker.Queues, "") {
		add("worker.queues: a name is empty; leave the list empty to serve all queues")
	}
	if c.Worker.Timeout < 0 {
		add("worker.timeout: %v is below zero", c.Worker.Timeout)
	}
	errs = append(errs, aboveZero("worker.shutdown_grace", c.Worker.ShutdownGrace), aboveZero("worker.retry_base", c.Worker.RetryBase))
	if c.Worker.RetryMax < c.Worker.RetryBase {
		add("worker.retry_max: %v is below worker.retry_base, %v", c.Worker.RetryMax, c.Worker.RetryBase)
	}
	switch c.Limits.Backend {
	case "consul":
	case "rabbitmq":
		for _, err := range flatten(rabbitmq.Config{URL: c.Limits.RabbitMQURL}.Validate()) { // the names are judged below
			add("limits.rabbitmq_url: %s", strings.TrimPrefix(err.Error(), "rabbitmq.url: "))
		}
	default:
		add("limits.backend: must be consul or rabbitmq, not %q", c.Limits.Backend)
	}
	for _, name := range slices.Sorted(maps.Keys(c.Limits.Slots)) {
		if err := lock.CheckSemaphore(name, c.Limits.Slots[name]); err != nil {
			add("limits.slots: %w", err)
		}
	}
	for _, kind := range slices.Sorted(maps.Keys(c.Limits.Kinds)) {
		if err := lock.CheckSemaphore(c.Limits.Kinds[kind], 0); err != nil {
			add("limits.kinds: kind %s: %w", kind, err)
		}
	}
	errs = append(errs, aboveZero("retention.succeeded", c.Retention.Succeeded), aboveZero("retention.failed", c.Retention.Failed))
	if c.HTTP.Listen != "" {
		_, port, err := net.SplitHostPort(c.HTTP.Listen)
		if err == nil {
			_, err = net.LookupPort("tcp", port)
		}
		if err != nil {
			add("http.listen: %w; write it as 127.0.0.1:7677, or leave it empty for no health checks", err)
		}
	}
	switch {
	case c.HTTP.ReadToken != "" && c.HTTP.ReadTokenFile != "":
		add("http.read_token_file: cannot be used together with http.read_token")
	case c.HTTP.ReadToken != "" && len(c.HTTP.ReadToken) < minReadToken:
		add("http.read_token: the token has %d characters, fewer than %d", len(c.HTTP.ReadToken), minReadToken)
	}
	for _, host := range c.HTTP.Hosts {
		if host == "" || strings.ContainsAny(host, "/:* ") {
			add("http.hosts: %q is not a host name; write it without scheme and port, such as onejob.example.com", host)
		}
	}
	if slices.Contains(c.HTTP.HidePayloads, "") {
		add("http.hide_payloads: the name of a kind is empty")
	}
	if !slices.Contains([]string{"debug", "info", "warn", "error"}, c.Log.Level) {
		add("log.level: must be debug, info, warn or error, not %q", c.Log.Level)
	}
	if !slices.Contains([]string{"auto", "json", "console"}, c.Log.Format) {
		add("log.format: must be auto, json or console, not %q", c.Log.Format)
	}
	return errors.Join(errs...)
}

func aboveZero(key string, d time.Duration) error {
	if d > 0 {
		return nil
	}
	return fmt.Errorf("%s: %v is not above zero", key, d)
}

// validateConsul returns what is wrong with the settings of Consul, and with
// Consul's own variables.
func (c *Config) validateConsul() error {
	if err := c.validateConsulSettings(); err != nil {
		return err // the rest would be read from defaults in their place
	}
	_, err := consul.New(c.consulConfig())
	return err
}

// validateConsulSettings returns what is wrong with the settings of Consul, each by itself.
func (c *Config) validateConsulSettings() error {
	errs := []error{
		aboveZero("consul.check_ttl", c.Consul.CheckTTL),
		aboveZero("consul.heartbeat", c.Consul.Heartbeat),
		aboveZero("consul.session_ttl", c.Consul.SessionTTL),
		aboveZero("consul.renew", c.Consul.Renew),
		aboveZero("consul.margin", c.Consul.Margin),
		aboveZero("consul.lock_delay", c.Consul.LockDelay),
		aboveZero("consul.verify", c.Consul.Verify),
	}
	for key, text := range map[string]string{"prefix": c.Consul.Prefix, "service": c.Consul.Service, "liveness": c.Consul.Liveness} {
		if text == "" {
			errs = append(errs, fmt.Errorf("consul.%s: must not be empty", key))
		}
	}
	if c.Consul.Token != "" && c.Consul.TokenFile != "" {
		errs = append(errs, errors.New("consul.token_file: cannot be used together with consul.token"))
	}
	if c.Consul.CAFile != "" && c.Consul.CAPath != "" {
		errs = append(errs, errors.New("consul.ca_path: cannot be used together with consul.ca_file"))
	}
	return errors.Join(errs...)
}

func (c *Config) storeConfig() store.Config {
	return store.Config{DSN: c.Postgres.DSN, ListenDSN: c.Postgres.ListenDSN, MaxConns: c.Postgres.MaxConns, Timeout: c.Postgres.Timeout}
}

// consulClient returns how to reach Consul: what Consul's own variables say, with the
// settings over it.
func (c *Config) consulClient() *api.Config {
	client := api.DefaultConfig()
	if c.Consul.Token != "" {
		client.TokenFile = "" // of the environment; a file would win over the token
	}
	if c.Consul.CAPath != "" {
		client.TLSConfig.CAFile = "" // of the environment; a file would win over the directory
	}
	client.Address = cmp.Or(c.Consul.Address, client.Address)
	client.Token = cmp.Or(c.Consul.Token, client.Token)
	client.TokenFile = cmp.Or(c.Consul.TokenFile, client.TokenFile)
	client.TLSConfig.CAFile = cmp.Or(c.Consul.CAFile, client.TLSConfig.CAFile)
	client.TLSConfig.CAPath = cmp.Or(c.Consul.CAPath, client.TLSConfig.CAPath)
	client.TLSConfig.CertFile = cmp.Or(c.Consul.CertFile, client.TLSConfig.CertFile)
	client.TLSConfig.KeyFile = cmp.Or(c.Consul.KeyFile, client.TLSConfig.KeyFile)
	client.TLSConfig.Address = cmp.Or(c.Consul.ServerName, client.TLSConfig.Address)
	return client
}

func (c *Config) consulConfig() consul.Config {
	return consul.Config{
		Client:     c.consulClient(),
		Prefix:     c.Consul.Prefix,
		Service:    c.Consul.Service,
		Liveness:   consul.Liveness(c.Consul.Liveness),
		CheckTTL:   c.Consul.CheckTTL,
		Heartbeat:  c.Consul.Heartbeat,
		SessionTTL: c.Consul.SessionTTL,
		Renew:      c.Consul.Renew,
		Margin:     c.Consul.Margin,
		LockDelay:  c.Consul.LockDelay,
		Verify:     c.Consul.Verify,
		Replica:    consul.Replica{Name: c.Replica, Version: version()},
		Log:        zap.NewNop(), // what commands have to say they print
	}
}

func (c *Config) workerConfig() worker.Config {
	return worker.Config{
		Replica:       c.Replica,
		Version:       version(),
		Concurrency:   c.Worker.Concurrency,
		PayloadMemory: c.Worker.PayloadMemory,
		Queues:        c.Worker.Queues,
		Poll:          c.Worker.Poll,
		PollOnly:      !c.Postgres.Listen,
		Timeout:       c.Worker.Timeout,
		MaxCrashes:    c.Worker.MaxCrashes,
		RetryBase:     c.Worker.RetryBase,
		RetryMax:      c.Worker.RetryMax,
		LockDelay:     c.Consul.LockDelay,
		ShutdownGrace: c.Worker.ShutdownGrace,
		LimitsBackend: c.Limits.Backend,
		LimitSlots:    c.Limits.Slots,
		KindLimits:    c.Limits.Kinds,
		KeepSucceeded: c.Retention.Succeeded,
		KeepFailed:    c.Retention.Failed,
	}
}

// limitNames returns the names of all limits in the configuration, sorted.
func (c *Config) limitNames() []string {
	names := slices.Concat(slices.Collect(maps.Keys(c.Limits.Slots)), slices.Collect(maps.Values(c.Limits.Kinds)))
	slices.Sort(names)
	return slices.Compact(names)
}

func (c *Config) rabbitmqConfig() rabbitmq.Config {
	return rabbitmq.Config{URL: c.Limits.RabbitMQURL, Prefix: "onejob", Names: c.limitNames(), Name: "onejob " + c.Replica, Log: zap.NewNop()}
}

// limits returns the limits. If they are kept in RabbitMQ it returns them as broker too, which
// must run for slots to be taken.
func (c *Config) limits(locks *consul.Locker, log *zap.Logger) (limits lock.Semaphores, broker *rabbitmq.Semaphores, err error) {
	if c.Limits.Backend != "rabbitmq" {
		return locks.Semaphores(), nil, nil
	}
	cfg := c.rabbitmqConfig()
	cfg.Log = log
	broker, err = rabbitmq.New(cfg)
	return broker, broker, err
}

// readToken returns where to get the token of the web page from, nil if there is none. A
// file is read again for each request: an operator may replace it.
func (c *Config) readToken() (func() (string, error), error) {
	if c.HTTP.ReadTokenFile == "" {
		if token := c.HTTP.ReadToken; token != "" {
			return func() (string, error) { return token, nil }, nil
		}
		return nil, nil
	}
	read := func() (string, error) {
		b, err := os.ReadFile(c.HTTP.ReadTokenFile)
		if err != nil {
			return "", fmt.Errorf("http.read_token_file: %w", err)
		}
		token := strings.TrimSpace(string(b))
		if len(token) < minReadToken {
			return "", fmt.Errorf("http.read_token_file: the token in %s has %d characters, fewer than %d", c.HTTP.ReadTokenFile, len(token), minReadToken)
		}
		return token, nil
	}
	_, err := read()
	return read, err
}

// kinds returns what the configuration lets a replica run, and the program's handlers.
func (c *Config) kinds(s *store.Store, handlers tasks.Kinds) (tasks.Kinds, error) {
	exec, errExec := execkind.New(c.Kinds.Exec)
	http, errHTTP := httpkind.New(c.Kinds.HTTP)
	sql, errSQL := sqlkind.New(c.Kinds.SQL, s)
	if err := errors.Join(errExec, errHTTP, errSQL); err != nil {
		return nil, err
	}
	kinds := tasks.Kinds{"exec": exec, "http": http, "sql": sql, "noop": tasks.Noop{}}
	for _, name := range handlers.Names() {
		if kinds[name] != nil {
			return nil, fmt.Errorf("kind %q is built in; give the handler another name", name)
		}
		kinds[name] = handlers[name]
	}
	return kinds, nil
}

// flatten returns the errors that were joined into err, however deep. An error
// that wraps several and has words of its own is left whole.
func flatten(err error) []error {
	if err == nil {
		return nil
	}
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok || errors.Join(joined.Unwrap()...).Error() != err.Error() {
		return []error{err}
	}
	var all []error
	for _, e := range joined.Unwrap() {
		all = append(all, flatten(e)...)
	}
	return all
}

// originAbove returns the variable that a list or map came from, of which key is a part.
func originAbove(key string, origin map[string]string) string {
	for key != "" && origin[key] == "" {
		key = key[:max(0, strings.LastIndexAny(key, ".["))]
	}
	return origin[key]
}

// problemList returns an error that lists what was joined into err, a line each, under what it is
// about and the file's name. A setting that came from a variable is given its name, and one of
// the file its line.
func problemList(what, file string, origin map[string]string, lines map[string]int, err error) error {
	var all []string
	for _, e := range flatten(err) {
		text := strings.ReplaceAll(e.Error(), "\n", "\n    ")
		key, rest, _ := strings.Cut(text, ":")
		if name := origin[key]; name != "" {
			text = fmt.Sprintf("%s (%s):%s", key, name, rest)
		} else if name := originAbove(key, origin); name != "" {
			text = fmt.Sprintf("variable %s: %s", name, text)
		} else if line := lines[key]; line > 0 {
			text = fmt.Sprintf("line %d: %s", line, text)
		}
		all = append(all, text)
	}
	if file != "" {
		what += " " + file
	}
	if len(all) == 1 {
		return fmt.Errorf("%s: %s", what, all[0])
	}
	return fmt.Errorf("%s: %d problems:\n  - %s", what, len(all), strings.Join(all, "\n  - "))
}
