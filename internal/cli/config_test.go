package cli

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	execkind "onejob/tasks/kinds/exec"
	sqlkind "onejob/tasks/kinds/sql"
)

// fileWith returns the path of a file with this content.
func fileWith(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "onejob.yaml")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// mustLoad loads a file with this content under these variables.
func mustLoad(t *testing.T, content string, environ ...string) Config {
	t.Helper()
	c, err := loadConfig(fileWith(t, content), environ)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestExampleConfig(t *testing.T) {
	const path = "../../config.example.yaml"
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	settingsPart, examples, ok := strings.Cut(string(raw), "# Examples of kinds:\n#\n")
	if !ok {
		t.Fatal("it has no examples of kinds")
	}

	t.Run("EqualsTheDefaults", func(t *testing.T) {
		c, err := loadConfig(path, nil)
		if err != nil {
			t.Fatal(err)
		}
		if c.Replica == "" {
			t.Error("the replica was given no name")
		}
		c.Replica = ""
		want := defaults()
		want.Worker.Queues, want.Kinds.HTTP.Allow = []string{}, []string{} // written as []
		want.HTTP.Hosts, want.HTTP.HidePayloads = []string{}, []string{}
		want.Kinds.Exec.Commands, want.Kinds.SQL.Statements = map[string]execkind.Command{}, map[string]sqlkind.Statement{}
		if !reflect.DeepEqual(c, want) {
			t.Errorf("it holds\n%+v, not\n%+v", c, want)
		}
	})

	t.Run("NamesEverySetting", func(t *testing.T) {
		tree, _, err := parseFile(raw)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range settings(reflect.TypeFor[Config](), nil) {
			if !names(tree, s.path) {
				t.Errorf("%s is missing", s.key())
			}
		}
	})

	t.Run("ExplainsEverySetting", func(t *testing.T) {
		for line := range strings.Lines(settingsPart) {
			key, value, ok := strings.Cut(line, ":")
			if ok && !strings.HasPrefix(line, "#") && strings.TrimSpace(value) != "" && !strings.Contains(value, " # ") {
				t.Errorf("%s has no comment", strings.TrimSpace(key))
			}
		}
	})

	t.Run("ExamplesCanBeUsed", func(t *testing.T) {
		examples = strings.ReplaceAll("\n"+examples, "\n# ", "\n")
		// Only root may name another user, and not every machine has this group.
		c := mustLoad(t, strings.NewReplacer("/usr/local/bin/backup", "/bin/true",
			"user: nobody", "user: "+strconv.Itoa(os.Getuid()), "group: nogroup", "group: "+strconv.Itoa(os.Getgid())).Replace(examples))
		if len(c.Kinds.Exec.Commands) == 0 || len(c.Kinds.HTTP.Allow) == 0 || len(c.Kinds.SQL.Statements) == 0 {
			t.Errorf("an example is missing: %+v", c.Kinds)
		}
		tree, _, err := parseFile([]byte(examples))
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range settings(reflect.TypeFor[execkind.Command](), []string{"kinds", "exec", "commands", "backup"}) {
			if !names(tree, s.path) {
				t.Errorf("%s is missing", s.key())
			}
		}
	})
}

// names reports whether a tree has something at path.
func names(tree map[string]any, path []string) bool {
	value, ok := tree[path[0]]
	if len(path) == 1 || !ok {
		return ok
	}
	below, ok := value.(map[string]any)
	return ok && names(below, path[1:])
}

func TestConfigSources(t *testing.T) {
	t.Run("VariablesComeBeforeTheFile", func(t *testing.T) {
		c := mustLoad(t, "worker: {concurrency: 3, poll: '@every 2s', queues: [x]}\nreplica: from the file",
			"ONEJOB_WORKER_CONCURRENCY=4", "ONEJOB_WORKER_QUEUES=a, b", "ONEJOB_REPLICA=7", "ONEJOB_CONSUL_LOCK_DELAY=4s",
			"ONEJOB_POSTGRES_LISTEN=false", "ONEJOB_KINDS_SQL_STATEMENTS={one.two: {sql: SELECT 1}}")
		if c.Worker.Concurrency != 4 || c.Worker.Poll != "@every 2s" || c.Replica != "7" || c.Consul.LockDelay != 4*time.Second || c.Postgres.Listen ||
			!slices.Equal(c.Worker.Queues, []string{"a", "b"}) || c.Kinds.SQL.Statements["one.two"].SQL != "SELECT 1" {
			t.Errorf("got %+v", c)
		}
	})

	t.Run("VariablesWithoutAValueChangeNothing", func(t *testing.T) {
		c := mustLoad(t, "postgres: {migrate: false}\nlimits: {slots: {a: 1}}\nworker: {queues: [x]}", "ONEJOB_POSTGRES_MIGRATE= ", "ONEJOB_LIMITS_SLOTS=\n", "ONEJOB_WORKER_QUEUES= ")
		if c.Postgres.Migrate || len(c.Limits.Slots) != 1 || len(c.Worker.Queues) != 1 {
			t.Errorf("got %+v", c)
		}
	})

	t.Run("WhatIsLeftEmptyKeepsItsDefault", func(t *testing.T) {
		c := mustLoad(t, "worker:\nconsul: {prefix: , margin: ~}\nhttp:\n  # listen: somewhere\n",
			"ONEJOB_WORKER_CONCURRENCY=", "ONEJOB_WORKER_QUEUES=", "ONEJOB_WORKER_POLL=@every 3s")
		want := defaults()
		want.Replica, want.Worker.Poll = c.Replica, "@every 3s"
		if !reflect.DeepEqual(c, want) {
			t.Errorf("got\n%+v, not\n%+v", c, want)
		}
	})

	t.Run("EmptyFile", func(t *testing.T) { mustLoad(t, "# nothing\n") })

	t.Run("EmptyTextOfAVariableCounts", func(t *testing.T) {
		if c := mustLoad(t, "", "ONEJOB_HTTP_LISTEN="); c.HTTP.Listen != "" {
			t.Errorf("listens at %s", c.HTTP.Listen)
		}
	})

	t.Run("VariablesOfOthersAreNotOurs", func(t *testing.T) {
		mustLoad(t, "", "ONEJOB_TASK_ID=5", "ONEJOB_SERVICE_HOST=10.0.0.1", "ONEJOB_SERVICE_PORT=80", "ONEJOB_SERVICE_PORT_HTTP=80",
			"ONEJOB_PORT=tcp://10.0.0.1:80", "ONEJOB_PORT_80_TCP=tcp://10.0.0.1:80", "ONEJOB_PORT_80_TCP_ADDR=10.0.0.1", "ONEJOB_WEB_SERVICE_HOST=10.0.0.1", "PATH=/bin")
	})

	t.Run("VariablesOfTheScriptsAreNotOurs", func(t *testing.T) {
		scripts, err := filepath.Glob("../../scripts/*.sh")
		if err != nil || len(scripts) == 0 {
			t.Fatalf("scripts: %v, %v", scripts, err)
		}
		for _, script := range scripts {
			text, err := os.ReadFile(script)
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range regexp.MustCompile(`ONEJOB_[A-Z]+_BIN`).FindAllString(string(text), -1) {
				mustLoad(t, "", name+"=/bin/true")
			}
		}
	})

	t.Run("EverySettingHasAVariableOfItsOwn", func(t *testing.T) {
		seen := map[string]string{}
		for _, s := range settings(reflect.TypeFor[Config](), nil) {
			if other := seen[s.variable()]; other != "" || slices.Contains(foreignVariables, s.variable()) {
				t.Errorf("%s, of %s, means something else too: %s", s.variable(), s.key(), other)
			}
			seen[s.variable()] = s.key()
		}
	})
}

func TestConfigProblems(t *testing.T) {
	for _, test := range []struct {
		name    string
		file    string
		environ []string
		want    []string // each a whole problem, or its beginning if it ends in ...
	}{
		{"UnknownKeys", "nonsense: 1\nworker: {concurency: 2}\nkinds: {exec: {commands: {true: {path: /bin/true, shell: yes}}}}", nil, []string{
			"kinds.exec.commands.true.shell: unknown setting; ...",
			"nonsense: unknown setting; ...",
			`worker.concurency: unknown setting; did you mean "concurrency"?; see onejob config`,
		}},
		{"NoTokens", "http: {read_token_file: /no/such/file, act_tokens_file: /no/such/file}", nil, []string{
			"http.read_token_file: open /no/such/file: no such file or directory",
			"http.act_tokens_file: open /no/such/file: no such file or directory",
		}},
		{"NoSlots", "limits: {slots: {a: , b: 1}, kinds: {http: }}", nil, []string{"limits.slots.a: has no value", "limits.kinds.http: has no value"}},
		{"EmptyValuesOfACommand", "kinds: {exec: {commands: {a: {path: /bin/true, args: [~, ''], env: {TOKEN: , EMPTY: ''}}}}}", nil, []string{
			"kinds.exec.commands.a.args[0]: has no value", "kinds.exec.commands.a.env.TOKEN: has no value"}},
		{"WrongTypes", "worker: {concurrency: 8.5, queues: mail, poll: 5}\npostgres: text\nkinds: {http: {allow: [1]}}\nhttp: [1]\nlog: {level: 2026-01-01}", nil, []string{
			"http: must be a block of settings (found a list)",
			"kinds.http.allow[0]: must be a string in quotes (found a number)",
			"log.level: must be a string in quotes (found a date)",
			"postgres: must be a block of settings (found a string)",
			"worker.concurrency: must be a whole number (found a number)",
			"worker.poll: must be a string in quotes (found a number)",
			"worker.queues: must be a list, such as [a, b] (found a string)",
			"kinds.http.allow[0] ...",
		}},
		{"DurationsWithoutUnit", "start_timeout: 30\nworker: {timeout: '5'}", []string{"ONEJOB_CONSUL_MARGIN=1"}, []string{
			"consul.margin (ONEJOB_CONSUL_MARGIN): must be a duration with a unit, such as 500ms, 30s or 1m30s (found a string)",
			"start_timeout: must be a duration with a unit, such as 500ms, 30s or 1m30s (found a number)",
			"worker.timeout: must be a duration with a unit, such as 500ms, 30s or 1m30s (found a string)",
		}},
		{"DurationsThatAreNotSafeTogether", "consul: {check_ttl: 4s, heartbeat: 2s, session_ttl: 10s, renew: 5s}", nil, []string{
			"consul.check_ttl: a lease lasts TTL 4s - margin 1s = 3s after a heartbeat, which leaves no room for a lost one every 2s: it must be at least twice the heartbeat, 4s",
			"consul.session_ttl: a lease lasts TTL 10s - margin 1s = 9s after a heartbeat, which leaves no room for a lost one every 5s: it must be at least twice the heartbeat, 10s",
		}},
		{"MarginTooShortForCommands", "consul: {margin: 599ms}\nkinds: {exec: {commands: {a: {path: /bin/true}}}}", nil, []string{
			"consul.margin: 599ms is too short for commands: a command can live for 500ms after its lease has ended, and the kernel needs up to 100ms to kill it; the minimum is 500ms + 100ms = 600ms",
		}},
		{"LockDelayTooShortForCommands", "consul: {margin: 1ms, lock_delay: 599ms}\nkinds: {exec: {commands: {a: {path: /bin/true}}}}", nil, []string{
			"consul.lock_delay: 599ms is too short for commands: a command can live for 500ms after its session was destroyed, and the kernel needs up to 100ms to kill it; the minimum is 500ms + 100ms = 600ms",
			"consul.margin: 1ms is too short for commands: ...",
		}},
		{"ProcessesOfCommands", "kinds: {exec: {commands: {a: {path: /bin/true, user: no-such-user, memory_max: 1KiB, pids_max: -1, cpu_max: 0.001}, b: {path: /bin/true, memory_max: 64M, user: [x], cpu_max: half}}}}", nil, []string{
			"kinds.exec.commands.b.cpu_max: must be a number (found a string)",
			"kinds.exec.commands.b.memory_max: must be a size in bytes, such as 1048576, 64KiB, 512MiB or 2GiB (found a string)",
			"kinds.exec.commands.b.user: must be a string or a whole number (found a list)",
			`kinds.exec.commands: command "a": user: there is no user "no-such-user"`,
			`kinds.exec.commands: command "a": memory_max 1KiB is below 1MiB, in which no command can run`,
			`kinds.exec.commands: command "a": pids_max -1 is negative`,
			`kinds.exec.commands: command "a": cpu_max 0.001 is not between 0.01 and 10000 cores`,
		}},
		{"OutOfRange", "start_timeout: 1ms\nreplica: " + strings.Repeat("x", 201) + "\npostgres: {max_conns: 1}\nconsul: {verify: -1s, service: ''}\n" +
			"worker: {concurrency: 0, payload_memory: 4194303, poll: often, max_crashes: 0, timeout: -1s, shutdown_grace: 0s, retry_base: 1m, retry_max: 1s, queues: ['']}\n" +
			"retention: {succeeded: 0s, failed: -1h}\nhttp: {listen: nowhere, read_token: short, hosts: ['a:80'], hide_payloads: ['']}\nlog: {level: loud, format: xml}", nil, []string{
			"replica: the name is 201 bytes long, more than 200",
			"start_timeout: 1ms is below 1s",
			"postgres.max_conns: 1 is not between 2 and 1000",
			"consul.verify: -1s is not above zero",
			"consul.service: must not be empty",
			"worker.payload_memory: 4194303 bytes are less than 4194304, the longest payload",
			"worker.concurrency: 0 is not between 1 and 10000",
			`worker.poll: "often": ...`,
			"worker.max_crashes: 0 is not above zero",
			"worker.queues: a name is empty; leave the list empty to serve all queues",
			"worker.timeout: -1s is below zero",
			"worker.shutdown_grace: 0s is not above zero",
			"worker.retry_max: 1s is below worker.retry_base, 1m0s",
			"retention.succeeded: 0s is not above zero",
			"retention.failed: -1h0m0s is not above zero",
			"http.listen: address nowhere: missing port in address; write it as 127.0.0.1:7677, or leave it empty for no health checks",
			"http.read_token: the token has 5 characters, fewer than 16",
			`http.hosts: "a:80" is not a host name; write it without scheme and port, such as onejob.example.com`,
			"http.hide_payloads: the name of a kind is empty",
			`log.level: must be debug, info, warn or error, not "loud"`,
			`log.format: must be auto, json or console, not "xml"`,
		}},
		{"UnknownVariables", "", []string{"ONEJOB_WORKER_CONCURENCY=1", "ONEJOB_WORKER=1", "ONEJOB_WORKER_CONCURRENCY=[1"}, []string{
			`variable ONEJOB_WORKER_CONCURENCY: unknown setting; did you mean "ONEJOB_WORKER_CONCURRENCY"?; see onejob config`,
			"variable ONEJOB_WORKER: unknown setting; ...",
			"variable ONEJOB_WORKER_CONCURRENCY: invalid YAML: ...",
		}},
		{"Kinds", "kinds: {exec: {commands: {a: {path: /no/such}, b: }}, http: {allow: [ftp://x]}, sql: {statements: {c: {params: [x]}}}}", nil, []string{
			`kinds.exec.commands: command "a": path: stat /no/such: no such file or directory`,
			`kinds.exec.commands: command "b": path is missing`,
			`kinds.http.allow[0] "ftp://x": ...`,
			`kinds.sql.statements: statement "c" has no sql`,
		}},
		{"RabbitMQHeartbeat", "limits: {backend: rabbitmq, rabbitmq_url: \"amqp://host/?heartbeat=3\", slots: {\"\": 1}}", nil, []string{
			"limits.rabbitmq_url: take heartbeat=3 out of it: ...", "limits.slots: ..."}},
		{"TwoTokens", "http: {read_token: 0123456789abcdef, read_token_file: /dev/null}", nil, []string{"http.read_token_file: cannot be used together with http.read_token"}},
		{"TwoConsulTokens", "consul: {token: a, token_file: /dev/null}", nil, []string{"consul.token_file: cannot be used together with consul.token"}},
		{"MissingTokenFile", "consul: {token_file: /no/such}", nil, []string{"consul token file: ..."}},
		{"TwoDocuments", "replica: a\n---\nreplica: b\n", nil, []string{"the file has more than one document, with a line of --- between them: only the first one would count"}},
		{"NoSettings", "just words", nil, []string{"the file is not a block of settings such as worker: {concurrency: 8}"}},
		{"NameIsNoText", "limits: {slots: {a: &a 1}}\nkinds: {exec: {commands: {*a : {path: /bin/true}}}}", nil, []string{"a name is an alias, a list or a block of YAML; write it as text"}},
		{"NoYAML", "worker: [", nil, []string{"yaml: ..."}},
		{"TwiceTheSame", "replica: a\nreplica: b", nil, []string{"yaml: ..."}},
	} {
		t.Run(test.name, func(t *testing.T) {
			path := fileWith(t, test.file)
			_, err := loadConfig(path, test.environ)
			if exit, ok := errors.AsType[*exitError](err); !ok || exit.code != exitUsage {
				t.Fatalf("got %v, which is no usage error", err)
			}
			rest, ok := strings.CutPrefix(err.Error(), "configuration "+path+": ")
			if !ok {
				t.Errorf("the file is not named: %v", err)
			}
			problems := []string{rest}
			if head, list, ok := strings.Cut(rest, " problems:\n  - "); ok && len(head) < 3 {
				problems = strings.Split(list, "\n  - ")
			}
			for i, p := range problems {
				problems[i] = lineOfFile.ReplaceAllString(p, "")
			}
			for _, want := range test.want {
				i := slices.IndexFunc(problems, func(p string) bool {
					beginning, open := strings.CutSuffix(want, "...")
					return p == want || open && strings.HasPrefix(p, beginning)
				})
				if i < 0 {
					t.Errorf("not told: %s", want)
				} else {
					problems = slices.Delete(problems, i, i+1)
				}
			}
			if len(problems) > 0 {
				t.Errorf("told as well: %q", problems)
			}
		})
	}
}

var lineOfFile = regexp.MustCompile(`^line \d+: `)

func TestLinesOfProblems(t *testing.T) {
	t.Parallel()
	const file = `# A comment.
worker:
  concurrency: many
  queues:
    - mail
    - 5
kinds:
  exec:
    commands:
      1: {path: /bin/true, shell: x}
      a.b: &true {path: /bin/true}
      c: {<<: *true, shell: y}
limits: {slots: {x: -1}}
nonsense: 1
`
	_, err := loadConfig(fileWith(t, file), []string{"ONEJOB_LOG_LEVEL=loud"})
	for _, want := range []string{
		`line 3: worker.concurrency: must be`, `line 6: worker.queues[1]: must be`, `line 10: kinds.exec.commands.1.shell: unknown`,
		`line 12: kinds.exec.commands.c.shell: unknown`, `line 13: limits.slots: limit x: -1`, `line 14: nonsense: unknown`, `log.level (ONEJOB_LOG_LEVEL): must be`,
	} {
		if err == nil || !strings.Contains(err.Error(), "\n  - "+want) {
			t.Errorf("it does not say %q: %v", want, err)
		}
	}
}

// A number that YAML would read as another one than it looks like is refused, and not repeated.
func TestNumbersAreWhatTheyLookLike(t *testing.T) {
	t.Parallel()
	const want = "line 1: a number begins with 0 or has a _, so YAML may read another one; write only its digits, or put it in quotes if it is text"
	commands := func(setting string) string {
		return "kinds: {exec: {commands: {a: {path: /bin/true, " + setting + "}}}}"
	}
	for _, file := range []string{"worker: {concurrency: 010}", "worker: {concurrency: 08}", "worker: {concurrency: 1_0}", "limits: {slots: {a: -01}}", commands("user: 0100"), commands("cpu_max: 1_0.5")} {
		if _, err := loadConfig(fileWith(t, file), nil); err == nil || !strings.HasSuffix(err.Error(), ".yaml: "+want) {
			t.Errorf("%s: %v", file, err)
		}
	}
	if _, err := loadConfig("", []string{"ONEJOB_WORKER_CONCURRENCY=010"}); err == nil || !strings.HasSuffix(err.Error(), "variable ONEJOB_WORKER_CONCURRENCY: "+want) {
		t.Errorf("in a variable: %v", err)
	}
	c := mustLoad(t, "replica: '010'\nworker: {queues: [a_b, '1_0']}\nlimits: {slots: {a: 0, b: 0x10, c: 100}}\n"+commands("cpu_max: 0.5"))
	if c.Replica != "010" || c.Worker.Queues[1] != "1_0" || c.Limits.Slots["b"] != 16 {
		t.Errorf("got %+v", c)
	}
}

// What is wrong in a list or a map of a variable is that variable's, not that of the line of the file
// whose place it takes.
func TestProblemsOfListsAndMapsInVariables(t *testing.T) {
	t.Parallel()
	const file = "worker:\n  queues: [a]\nkinds:\n  exec:\n    commands: {a: {path: /bin/true}}\n  http:\n    allow: []\n"
	for variable, want := range map[string]string{
		"ONEJOB_WORKER_QUEUES=[8]":                                "worker.queues[0]: must be",
		"ONEJOB_LIMITS_SLOTS={a.b: x}":                            "limits.slots.a.b: must be",
		"ONEJOB_KINDS_EXEC_COMMANDS={a: {path: /bin/true, x: 1}}": "kinds.exec.commands.a.x: unknown",
		"ONEJOB_KINDS_HTTP_ALLOW=ftp://x":                         "kinds.http.allow[0] \"ftp://x\": ",
	} {
		name, _, _ := strings.Cut(variable, "=")
		if _, err := loadConfig(fileWith(t, file), []string{variable}); err == nil || !strings.Contains(err.Error(), "variable "+name+": "+want) {
			t.Errorf("%s: %v", variable, err)
		}
	}
	for variable, want := range map[string]string{
		"ONEJOB_LIMITS_SLOTS={x: -1}":                      "limits.slots (ONEJOB_LIMITS_SLOTS): limit x: ",
		"ONEJOB_KINDS_EXEC_COMMANDS={a: {path: /no/such}}": "kinds.exec.commands (ONEJOB_KINDS_EXEC_COMMANDS): command \"a\": ",
		"ONEJOB_KINDS_SQL_STATEMENTS={c: {params: [x]}}":   "kinds.sql.statements (ONEJOB_KINDS_SQL_STATEMENTS): statement \"c\" ",
	} {
		if _, err := loadConfig(fileWith(t, file), []string{variable}); err == nil || !strings.Contains(err.Error(), ": "+want) {
			t.Errorf("%s: %v", variable, err)
		}
	}
}

// A name is what the file says, also if it looks like a number or another value of YAML.
func TestNamesAreTheTextOfTheFile(t *testing.T) {
	t.Parallel()
	const slots = "{010: 1, 8: 2, 1_000: 3, 0x1F: 4, TRUE: 5, ~: 6, 1e3: 7, 2026-01-02: 8, \"<<\": 9}"
	want := map[string]int{"010": 1, "8": 2, "1_000": 3, "0x1F": 4, "TRUE": 5, "~": 6, "1e3": 7, "2026-01-02": 8, "<<": 9}
	for from, c := range map[string]Config{
		"file":     mustLoad(t, "limits: {slots: "+slots+"}"),
		"variable": mustLoad(t, "", "ONEJOB_LIMITS_SLOTS="+slots),
	} {
		if !maps.Equal(c.Limits.Slots, want) {
			t.Errorf("in a %s: %v, want %v", from, c.Limits.Slots, want)
		}
	}
	c := mustLoad(t, "kinds: {exec: {commands: {007: {path: /bin/true, env: {TRUE: x}}}}}")
	if c.Kinds.Exec.Commands["007"].Env["TRUE"] != "x" {
		t.Errorf("the commands are %+v", c.Kinds.Exec.Commands)
	}
}

// A variable below something that is no block changes nothing: the file's mistake is reported.
func TestVariableBelowNoBlock(t *testing.T) {
	t.Parallel()
	_, err := loadConfig(fileWith(t, "worker: 5"), []string{"ONEJOB_WORKER_CONCURRENCY=3"})
	if err == nil || !strings.Contains(err.Error(), "line 1: worker: must be a block of settings") {
		t.Errorf("got %v", err)
	}
}

func TestProcessesOfCommands(t *testing.T) {
	c := mustLoad(t, "consul: {margin: 600ms}\nkinds: {exec: {commands: {a: {path: /bin/true, user: "+strconv.Itoa(os.Getuid())+", group: '"+strconv.Itoa(os.Getgid())+
		"', no_new_privs: true, memory_max: 64MiB, pids_max: 20, cpu_max: 2}, b: {path: /bin/true, memory_max: 2097152, cpu_max: 0.5}}}}")
	a, b := c.Kinds.Exec.Commands["a"], c.Kinds.Exec.Commands["b"]
	if a.User != execkind.Name(strconv.Itoa(os.Getuid())) || a.Group != execkind.Name(strconv.Itoa(os.Getgid())) || !a.NoNewPrivs ||
		a.MemoryMax != 64<<20 || a.PIDsMax != 20 || a.CPUMax != 2 || b.MemoryMax != 2<<20 || b.CPUMax != 0.5 {
		t.Errorf("got %+v and %+v", a, b)
	}
	mustLoad(t, "consul: {margin: 300ms, lock_delay: 1ms}") // without commands
}

// A password stands in the DSN, and in Consul's token; neither may be repeated
// to somebody who reads an error.
func TestConfigErrorsKeepSecrets(t *testing.T) {
	const secret = "sEcReT"
	for name, file := range map[string]string{
		"PortIsNoNumber":      `postgres: {dsn: "postgres://me:sEcReT@host:port/db"}`,
		"BadEscape":           `postgres: {dsn: "postgres://me:%zzsEcReT@host/db"}`,
		"SpaceInHost":         `postgres: {dsn: "postgres://me:sEcReT@ho st/db"}`,
		"SlashInPassword":     `postgres: {dsn: "postgres://me:a/sEcReT@host/db"}`,
		"QuoteInPassword":     `postgres: {dsn: 'postgres://me:a"sEcReT@host:port/db'}`,
		"UnknownSSLMode":      `postgres: {dsn: "postgres://me:sEcReT@host/db?sslmode=sEcReT"}`,
		"BadPoolSetting":      `postgres: {dsn: "postgres://me:sEcReT@host/db?pool_max_conns=many"}`,
		"NoURL":               `postgres: {dsn: "me:sEcReT@host/db"}`,
		"OpenQuote":           `postgres: {dsn: "host=h password='sEcReT"}`,
		"SpaceInKeyValue":     `postgres: {dsn: "host=h password=a sEcReT"}`,
		"BadPort":             `postgres: {dsn: "host=h password=sEcReT port=many"}`,
		"ListenDSN":           `postgres: {listen_dsn: "postgres://me:sEcReT@host:port/db"}`,
		"RabbitMQPort":        `limits: {backend: rabbitmq, rabbitmq_url: "amqp://u:sEcReT@host:port/"}`,
		"RabbitMQSlash":       `limits: {backend: rabbitmq, rabbitmq_url: "amqp://u:1/sEcReT@host/"}`,
		"RabbitMQScheme":      `limits: {backend: rabbitmq, rabbitmq_url: "http://u:sEcReT@host/"}`,
		"ConsulUser":          `consul: {address: "http://u:sEcReT@consul:8500"}`,
		"ConsulUserBare":      `consul: {address: "u:sEcReT@consul:8500"}`,
		"ConsulQuery":         `consul: {address: "http://consul:8500/?token=sEcReT"}`,
		"AllowedUser":         `kinds: {http: {allow: ["https://u:sEcReT@hooks.example.com/"]}}`,
		"AllowedPort":         `kinds: {http: {allow: ["https://u:sEcReT/@hooks.example.com/"]}}`,
		"OfAnotherType":       `postgres: {dsn: [sEcReT]}`,
		"OneLevelUp":          `postgres: postgres://me:sEcReT@host/db`,
		"WholeFile":           `sEcReT`,
		"TokenIsNoText":       `consul: {token: [sEcReT]}`,
		"ShortReadToken":      `http: {read_token: sEcReT}`,
		"TokenInPlaceOfBlock": `consul: sEcReT`,
		"Alias":               "consul: {token: *sEcReT }",
		"Anchor":              "consul: {token: &sEcReT }",
		"Tag":                 "consul: {token: !sEcReT }",
		"TagAndText":          "consul: {token: !1 sEcReT }",
		"TypeTag":             "worker: {concurrency: !!int sEcReT }",
	} {
		t.Run(name, func(t *testing.T) {
			_, err := loadConfig(fileWith(t, file), nil)
			if err == nil {
				t.Fatal("it was accepted")
			}
			if strings.Contains(err.Error(), secret) {
				t.Errorf("told: %v", err)
			}
		})
	}
	t.Run("Variable", func(t *testing.T) {
		_, err := loadConfig("", []string{"ONEJOB_POSTGRES_DSN=postgres://me:sEcReT@host:port/db"})
		if err == nil || strings.Contains(err.Error(), secret) {
			t.Errorf("told: %v", err)
		}
	})
	for name, text := range map[string]string{"AliasInVariable": "{a: {path: *sEcReT }}", "TagInVariable": "{a: {path: !sEcReT /bin/true}}"} {
		t.Run(name, func(t *testing.T) {
			_, err := loadConfig("", []string{"ONEJOB_KINDS_EXEC_COMMANDS=" + text})
			if err == nil || !strings.Contains(err.Error(), "put it in quotes") || strings.Contains(err.Error(), secret) {
				t.Errorf("told: %v", err)
			}
		})
	}
}

func TestSettingsAreLeaves(t *testing.T) {
	var keys []string
	for _, s := range settings(reflect.TypeFor[Config](), nil) {
		keys = append(keys, s.key())
	}
	for _, want := range []string{"replica", "consul.check_ttl", "kinds.exec.commands", "kinds.http.allow", "kinds.sql.statements"} {
		if !slices.Contains(keys, want) {
			t.Errorf("%s is missing among %v", want, keys)
		}
	}
}

// A variable takes the place of a setting, also of one with names of its own: what the file has
// there is not there any more.
func TestAVariableReplacesTheWholeSetting(t *testing.T) {
	t.Parallel()
	const file = "kinds: {exec: {commands: {a: {path: /bin/true, allow_args: true}, b: {path: /bin/true}}}}\nlimits: {slots: {x: 1, y: 2}}"
	c := mustLoad(t, file, "ONEJOB_KINDS_EXEC_COMMANDS={a: {path: /bin/false}}", "ONEJOB_LIMITS_SLOTS={}")
	if want := map[string]execkind.Command{"a": {Path: "/bin/false"}}; !reflect.DeepEqual(c.Kinds.Exec.Commands, want) {
		t.Errorf("the commands are %+v, want %+v", c.Kinds.Exec.Commands, want)
	}
	if len(c.Limits.Slots) > 0 {
		t.Errorf("the limits are %v", c.Limits.Slots)
	}
}

// A command that runs no tasks takes a configuration whose commands, users and keys are those of
// another machine.
func TestSettingsOfAnotherMachine(t *testing.T) {
	t.Parallel()
	path := fileWith(t, "kinds: {exec: {commands: {a: {path: /nowhere/to/be/found, user: nobody-here}}}}\nconsul: {cert_file: /nowhere/cert.pem, key_file: /nowhere/key.pem}")
	if _, err := loadConfig(path, nil); err == nil || !strings.Contains(err.Error(), "/nowhere/to/be/found") || !strings.Contains(err.Error(), "/nowhere/cert.pem") {
		t.Errorf("a replica's configuration: %v", err)
	}
	if _, err := loadSettings(path, nil); err != nil {
		t.Error(err)
	}
	if _, err := loadSettings(fileWith(t, "worker: {concurrency: 0}"), nil); err == nil || !strings.Contains(err.Error(), "worker.concurrency") {
		t.Errorf("no concurrency: %v", err)
	}
}
