package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"onejob/boottime"
	"onejob/internal/guard"
	"onejob/internal/plaintext"
	"onejob/internal/retry"
	"onejob/lock"
	"onejob/lock/consul"
	"onejob/lock/rabbitmq"
	execkind "onejob/tasks/kinds/exec"
)

func lockCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "lock [flags] KEY -- COMMAND [ARG...]",
		Short: "Run any command under a lock; needs only Consul",
		Long: `Run any command while holding a lock, for existing crontabs. It needs only Consul: no
Postgres, and no configuration file unless --config or ONEJOB_CONFIG names one. KEY is
a lock key, as tasks have it in lock_key: the command and such a task never run at the
same time, if both have the same Consul and the same consul.prefix. Consul alone keeps
them apart: do not delete the key or destroy the session of one that runs.

With -n N, KEY is the name of a limit with N slots, as tasks have it in limit_name: at
most N run at the same time, commands and tasks together. If the limit does not exist
it is created, and remains. Slots are kept where limits.backend of the configuration
says, as for "onejob limits"; with RabbitMQ, Consul is not needed.

  - The command is killed before anything else can get the lock, even if onejob itself
    is killed or frozen.
  - Signals are passed on to the command, except those that were ignored when onejob
    started (nohup, a background job of a script).
  - In a crontab, use --no-wait or --wait: without them, runs pile up behind one that
    hangs.
  - A slot in Consul whose holder has died is waited for even then, some 10 seconds at
    most with the default times.

The exit code is that of the command (128 plus the number of the signal that ended
it), or:

  75   the lock was not available in time, or is held (--no-wait)
  124  the lock was lost, and the command was killed
  125  any other failure: Consul (or RabbitMQ) stays unavailable for 15 s, or for the
       time of --wait, or the command cannot be started; while the lock is held by
       another, an outage is waited through
  143  a signal arrived while waiting for the lock
  2    usage error`,
		Example: `  onejob lock backup -- /usr/local/bin/backup --full
  onejob lock --no-wait report -- ./report.sh
  onejob lock -n 3 downloads -- ./fetch.sh`,
		Args:                  cobra.MinimumNArgs(2),
		DisableFlagsInUseLine: true,
	}
	c.Flags().SetInterspersed(false)
	wait := c.Flags().Duration("wait", 0, "wait at most this `duration` for the lock, 0 like --no-wait (default: wait forever)")
	noWait := c.Flags().Bool("no-wait", false, "do not wait if the lock is held")
	grace := c.Flags().Duration("grace", 5*time.Second, "`duration` between SIGTERM and SIGKILL when the command must end")
	slots := c.Flags().IntP("slots", "n", 0, "KEY is the name of a limit with `N` slots")
	config := configFlag(c)
	c.Flags().String("prefix", "", "`prefix` of the keys in Consul (default: consul.prefix)")
	c.Flags().String("liveness", "", "how Consul sees that this process is alive: check or ttl (default: consul.liveness)")
	c.ValidArgsFunction = func(_ *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(args) == 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return nil, cobra.ShellCompDirectiveDefault // the command and its files
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		if err := exclude(c, "wait", "no-wait"); err != nil {
			return err
		}
		key, command := args[0], args[1:]
		if command[0] == "--" { // pflag keeps it where flags may not be interspersed
			command = command[1:]
		}
		switch {
		case len(command) == 0:
			return usage(errors.New("the command is missing; use onejob lock KEY -- COMMAND"))
		case strings.HasPrefix(command[0], "-"):
			return usage(fmt.Errorf("%s is not a command; flags come before KEY", command[0]))
		case key == "" || len(key) > 512:
			return usage(fmt.Errorf("KEY must be 1 to 512 bytes long, not %d", len(key)))
		case *wait < 0 || *grace < 0:
			return usage(errors.New("--wait and --grace must not be negative"))
		}
		if c.Flags().Changed("slots") {
			if err := lock.CheckSemaphore(key, *slots); err != nil {
				return usage(err)
			}
			if *slots == 0 {
				return usage(errors.New("-n: with 0 slots the command would never run"))
			}
		}
		path, err := exec.LookPath(command[0])
		if err != nil {
			return &exitError{exitLockError, err}
		}
		var p lockTarget
		if *slots > 0 {
			p, err = slotOf(c, *config, key, *slots)
		} else {
			p, err = lockOn(c, *config, key)
		}
		if err != nil {
			return err
		}
		maxWait := *wait
		if *noWait || c.Flags().Changed("wait") && *wait == 0 {
			maxWait = -1
		}
		return runLocked(c, p, maxWait, guard.Spec{Path: path, Args: command[1:], Env: os.Environ(), Grace: *grace,
			Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}})
	}
	return c
}

// lockOn returns the lock on a key.
func lockOn(c *cobra.Command, configPath, key string) (lockTarget, error) {
	cfg, err := lockSettings(c, configPath)
	if err != nil {
		return nil, err
	}
	lockConfig := cfg.consulConfig()
	lockConfig.Replica.Name = "onejob lock " + key
	// The lock-delay is all that keeps others from the key when the session is
	// destroyed and we cannot hear of it: it must be as long as the lease.
	lasts, setting := lockConfig.CheckTTL, "check_ttl"
	if lockConfig.Liveness == consul.TTL {
		lasts, setting = lockConfig.SessionTTL, "session_ttl"
	}
	if lasts > time.Minute {
		err := fmt.Errorf("consul.%s: %v is above 1m, which is the longest lock-delay that Consul has; a lock without a task needs one as long", setting, lasts)
		return nil, usage(problemList("lock", configPath, nil, nil, err))
	}
	lockConfig.LockDelay = max(lockConfig.LockDelay, lasts)
	if err := execkind.CheckTimes(lockConfig.Margin, lockConfig.LockDelay); err != nil {
		return nil, usage(problemList("lock", configPath, nil, nil, err))
	}
	locks, err := consul.New(lockConfig)
	if err != nil {
		return nil, usage(problemList("lock", "", nil, nil, err))
	}
	return wholeLock{locks, key}, nil
}

// lockSettings returns the configuration, with the flags --prefix and --liveness over it.
// For a lock without a configuration file it is that of Consul alone: what the environment
// says of Postgres or of tasks may be wrong for all that it matters.
func lockSettings(c *cobra.Command, configPath string) (cfg Config, err error) {
	environ := os.Environ()
	if configPath != "" || c.Flags().Changed("slots") {
		cfg, err = loadSettings(configPath, environ)
	} else {
		environ = slices.DeleteFunc(environ, func(entry string) bool { return !strings.HasPrefix(entry, "ONEJOB_CONSUL_") })
		cfg, err = readConfig("", environ, (*Config).validateConsul)
	}
	for flag, setting := range map[string]*string{"prefix": &cfg.Consul.Prefix, "liveness": &cfg.Consul.Liveness} {
		if c.Flags().Changed(flag) {
			*setting = c.Flag(flag).Value.String()
		}
	}
	return cfg, err
}

// slotOf returns a slot of a limit, kept where the configuration says.
func slotOf(c *cobra.Command, configPath, name string, slots int) (lockTarget, error) {
	cfg, err := lockSettings(c, configPath)
	if err != nil {
		return nil, err
	}
	if cfg.Limits.Backend == "rabbitmq" {
		limits, err := rabbitmq.New(cfg.rabbitmqConfig())
		if err != nil {
			return nil, usage(err)
		}
		return &oneSlot{limits: limits, name: name, slots: slots, run: limits.Run, ready: limits.Ready, down: rabbitmq.Unavailable}, nil
	}
	if err := execkind.CheckTimes(cfg.Consul.Margin, cfg.Consul.LockDelay); err != nil {
		return nil, usage(problemList("lock", configPath, nil, nil, err))
	}
	lockConfig := cfg.consulConfig()
	lockConfig.Replica.Name = "onejob lock " + name
	locks, err := consul.New(lockConfig)
	if err != nil {
		return nil, usage(problemList("lock", "", nil, nil, err))
	}
	return &oneSlot{limits: locks.Semaphores(), name: name, slots: slots, delay: locks.SlotDelay() + time.Second,
		run: func(ctx context.Context) error { return locks.Run(ctx, nil) }, ready: locks.Ready, down: consul.Unavailable}, nil
}

// errStopped ends a wait for a lock.
var errStopped = &exitError{128 + int(syscall.SIGTERM), errors.New("interrupted while waiting for the lock")}

// A lockTarget is what a command runs under.
type lockTarget interface {
	// Run keeps alive what it is held by, until ctx ends.
	Run(ctx context.Context) error

	// Ready returns when it can be asked for.
	Ready(ctx context.Context) error

	// ask asks once for it. value says who holds it.
	ask(ctx context.Context, value []byte) (lock.Lease, error)

	// unavailable reports whether an error of ask says that Consul, or RabbitMQ, could not be asked, and
	// may be later.
	unavailable(err error) bool

	// delays returns for how long ErrDelayed may be the answer at most, if every process
	// counts that from when it begins to ask: one that asks once would never have it.
	delays() time.Duration

	// await returns when it may be worth asking again.
	await(ctx context.Context) error

	// notHad returns an error that says who holds it, in place of the err of ask.
	notHad(ctx context.Context, err error) error
}

// wholeLock is the lock on a key.
type wholeLock struct {
	*consul.Locker
	key string
}

func (p wholeLock) Run(ctx context.Context) error { return p.Locker.Run(ctx, nil) }

func (p wholeLock) ask(ctx context.Context, value []byte) (lock.Lease, error) {
	return p.Acquire(ctx, lock.Request{Session: p.Session(), Key: p.key, Value: value})
}

func (wholeLock) unavailable(err error) bool { return consul.Unavailable(err) }

// A lock-delay is Consul's to count.
func (wholeLock) delays() time.Duration { return 0 }

func (p wholeLock) await(ctx context.Context) error { return p.Await(ctx, p.key) }

// oneSlot is one of the slots of a limit.
type oneSlot struct {
	limits     lock.Semaphores
	name       string
	slots      int
	delay      time.Duration // see delays
	run, ready func(context.Context) error
	down       func(error) bool // see unavailable
	there      bool             // the limit was seen
	agreed     bool             // it had so many slots
}

func (p *oneSlot) Run(ctx context.Context) error   { return p.run(ctx) }
func (p *oneSlot) Ready(ctx context.Context) error { return p.ready(ctx) }

// ask makes the limit if it is not there. Only at first it must have as many
// slots as the caller thinks: it may be changed while we wait.
func (p *oneSlot) ask(ctx context.Context, value []byte) (lock.Lease, error) {
	for tries := 0; !p.there; tries++ {
		s, err := p.limits.Inspect(ctx, p.name)
		switch {
		case errors.Is(err, lock.ErrNoSemaphore) && tries > 0: // it was deleted just now, or two servers disagree
			return nil, lock.ErrFull
		case errors.Is(err, lock.ErrNoSemaphore):
			err := p.limits.Create(ctx, p.name, p.slots)
			if errors.Is(err, lock.ErrExists) { // somebody else's, with as many slots as they like
				continue
			}
			if err != nil {
				return nil, err
			}
		case err != nil:
			return nil, limitError(ctx, p.limits, p.name, err)
		case !p.agreed && s.Slots != p.slots && s.Slots != 0: // or else it is paused
			return nil, fmt.Errorf("limit %s has %s, not %d; use -n %d, or change the limit with: onejob limits set %[5]s %[3]d", p.name, plaintext.Plural(s.Slots, "slot"), p.slots, s.Slots, plaintext.Argument(p.name))
		}
		p.there, p.agreed = true, true
	}
	leases, err := p.limits.Take(ctx, p.name, 1, value)
	switch {
	case errors.Is(err, lock.ErrNoSemaphore): // it was deleted while we waited, and is made again when asked for next
		p.there = false
		return nil, lock.ErrFull
	case err != nil:
		return nil, err
	}
	return leases[0], nil
}

func (p *oneSlot) unavailable(err error) bool { return p.down(err) }

func (p *oneSlot) delays() time.Duration { return p.delay }

func (p *oneSlot) await(ctx context.Context) error { return p.limits.Await(ctx, p.name) }

func (p *oneSlot) notHad(ctx context.Context, err error) error {
	s, lookErr := p.limits.Inspect(ctx, p.name)
	if lookErr != nil {
		return err
	}
	return fmt.Errorf("all %d slots of limit %s are held; see onejob limits show %s", s.Slots, p.name, plaintext.Argument(p.name))
}

// interruptIgnored reports whether SIGINT was ignored when this process began. Main catches it.
var interruptIgnored = signal.Ignored(syscall.SIGINT)

// runLocked runs a command while it holds lockTarget. It waits for that for at most maxWait:
// forever if that is zero, not at all if it is negative.
func runLocked(c *cobra.Command, lockTarget lockTarget, maxWait time.Duration, spec guard.Spec) error {
	defer background(context.Background(), lockTarget.Run)()

	// Until the command runs, signals are for us; then for the command.
	// What nohup, or a script that starts us in the background, lets us ignore is left ignored. A
	// script does so with both of these; of SIGQUIT alone Go knows nothing.
	if interruptIgnored {
		signal.Ignore(syscall.SIGINT, syscall.SIGQUIT)
	}
	ends, passed := []os.Signal{syscall.SIGTERM}, []os.Signal{syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGWINCH}
	for _, s := range []os.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT} {
		if !signal.Ignored(s) {
			ends, passed = append(ends, s), append(passed, s)
		}
	}
	waiting, stopWaiting := signal.NotifyContext(c.Context(), ends...)
	defer stopWaiting()
	lease, err := obtain(waiting, lockTarget, maxWait)
	if err != nil {
		return err
	}
	defer func() { _ = lease.Release(context.Background()) }()
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, passed...)
	defer signal.Stop(signals)
	if waiting.Err() != nil {
		return errStopped
	}

	spec.Deadline = lease.Deadline()
	p, err := guard.Start(spec)
	if err != nil {
		return &exitError{exitLockError, err}
	}
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	lost := lease.Context().Done()
	var why error
	for running := true; running; {
		select {
		case s := <-signals:
			p.Signal(s.(syscall.Signal))
		case <-ticker.C:
			if why == nil {
				p.Extend(lease.Deadline())
			}
		case <-lost:
			// Others may have the lock after the lock-delay, or at once if
			// somebody deleted the key: the grace is not for this.
			why, lost = context.Cause(lease.Context()), nil
			p.Extend(boottime.Now())
		case <-p.Done():
			running = false
		}
	}
	exit, err := p.Wait()
	switch {
	case why != nil || exit.Reason == guard.LeaseEnded:
		if why == nil {
			why = lock.ErrLost
		}
		return &exitError{exitLockLost, fmt.Errorf("%w; the command was killed", why)}
	case err != nil:
		return &exitError{exitLockError, err}
	case exit.Code != 0:
		return &exitError{exit.Code, nil}
	}
	return nil
}

// answerTimeout is how long a command that does not wait lets the servers take to answer.
const answerTimeout = 10 * time.Second

// notHadTimeout is how long a command that has not got its lock looks for who holds it.
const notHadTimeout = 5 * time.Second

// outageTimeout is how long the servers may be unavailable, at the start and when the lock is asked for.
const outageTimeout = 15 * time.Second

// An outage is a time in which the servers could not be asked, so that nobody knows whether the lock is held.
type outage struct {
	began    time.Time
	failures int   // 0 while there is none
	err      error // the last one that says why
}

// wait notes one more failure, and returns false if the outage has lasted for too long. Otherwise it
// returns when it is time to ask again, or at the end of ctx.
func (o *outage) wait(ctx context.Context, err error) bool {
	if o.failures++; o.failures == 1 {
		o.began = time.Now()
	}
	if o.err == nil || !errors.Is(err, lock.ErrLost) { // a lost session is what an outage leads to
		o.err = err
	}
	left := outageTimeout - time.Since(o.began)
	if left > 0 {
		retry.Pause(ctx, min(retry.Backoff(o.failures), left))
	}
	return left > 0
}

// obtain waits for p.
func obtain(ctx context.Context, p lockTarget, maxWait time.Duration) (lock.Lease, error) {
	until := ctx
	if maxWait != 0 {
		var cancel context.CancelFunc
		until, cancel = context.WithTimeout(ctx, cmp.Or(max(maxWait, 0), answerTimeout))
		defer cancel()
	}
	ready, cancel := context.WithTimeout(until, outageTimeout)
	defer cancel()
	if err := p.Ready(ready); ctx.Err() != nil {
		return nil, errStopped
	} else if err != nil {
		return nil, &exitError{exitLockError, err}
	}
	asking := until
	var delayed context.Context // for as long as a holder that has died may count; nil if there is none
	var failing outage
	for {
		value, err := json.Marshal(struct {
			Replica string    `json:"replica"`
			PID     int       `json:"pid"`
			Started time.Time `json:"started"`
		}{"onejob lock on " + hostname(), os.Getpid(), time.Now().UTC()})
		if err != nil {
			return nil, err
		}
		lease, err := p.ask(asking, value)
		switch {
		case err == nil:
			return lease, nil
		case errors.Is(err, lock.ErrHeld), errors.Is(err, lock.ErrFull), errors.Is(err, lock.ErrDelayed):
			failing = outage{}
		case errors.Is(err, lock.ErrLost) && maxWait >= 0 && failing.failures == 0: // another session will come
		case (errors.Is(err, rabbitmq.ErrUnconfirmed) || errors.Is(err, rabbitmq.ErrUnanswered)) && maxWait >= 0: // which passes
			failing = outage{} // there is a broker
		case asking.Err() != nil && errors.Is(err, asking.Err()): // there was no time for an answer
		case errors.Is(err, lock.ErrLost), p.unavailable(err):
			switch more := failing.wait(asking, err); {
			case ctx.Err() != nil:
				return nil, errStopped
			case !more, asking.Err() != nil:
				return nil, &exitError{exitLockError, failing.err}
			}
			continue
		case until.Err() == nil:
			return nil, &exitError{exitLockError, err}
		}
		waits := maxWait >= 0
		if asking = until; errors.Is(err, lock.ErrDelayed) && p.delays() > 0 {
			if delayed == nil {
				var cancel context.CancelFunc
				delayed, cancel = context.WithTimeout(ctx, p.delays())
				defer cancel()
			}
			waits, asking = true, later(until, delayed)
		}
		if waits {
			waiting := time.Now()
			if p.await(asking) != nil && time.Since(waiting) < time.Second {
				retry.Pause(asking, time.Second) // it fails at once where a token has ended, say
			}
		}
		switch {
		case ctx.Err() != nil:
			return nil, errStopped
		case failing.failures > 0 && asking.Err() != nil:
			return nil, &exitError{exitLockError, failing.err}
		case !waits || asking.Err() != nil:
			look, cancel := context.WithTimeout(ctx, notHadTimeout)
			defer cancel()
			return nil, &exitError{exitNotLocked, p.notHad(look, err)}
		}
	}
}

// later returns the context that ends later.
func later(a, b context.Context) context.Context {
	end, ends := a.Deadline()
	if other, _ := b.Deadline(); ends && end.Before(other) {
		return b
	}
	return a
}

func (p wholeLock) notHad(ctx context.Context, err error) error {
	session, value, lookErr := p.Holder(ctx, p.key)
	if lookErr != nil || session == "" {
		return err
	}
	return fmt.Errorf("lock %s is held by %s (session %s)", p.key, holderOf(value), session)
}

// holderOf says who holds a lock or a slot, by the value that the holder wrote.
func holderOf(value []byte) string {
	who, since := whoHolds(value)
	if since.IsZero() {
		return who
	}
	return fmt.Sprintf("%s, since %s", who, when(&since))
}

// whoHolds is holderOf in two parts; the time is zero if the value has none.
func whoHolds(value []byte) (who string, since time.Time) {
	var holder struct {
		Replica string    `json:"replica"`
		TaskID  int64     `json:"task_id"`
		PID     int       `json:"pid"`
		Started time.Time `json:"started"`
	}
	if json.Unmarshal(value, &holder) != nil || holder.Replica == "" && holder.TaskID == 0 {
		return fmt.Sprintf("another program: %.200q", value), since
	}
	who = holder.Replica
	switch {
	case holder.TaskID != 0 && holder.Replica == "":
		who = fmt.Sprintf("task %d", holder.TaskID)
	case holder.TaskID != 0:
		who = fmt.Sprintf("task %d on replica %s", holder.TaskID, who)
	case holder.PID != 0:
		who = fmt.Sprintf("%s, process %d", who, holder.PID)
	default:
		who = "replica " + who
	}
	return who, holder.Started
}
