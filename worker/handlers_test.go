package worker_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"onejob/internal/testenv"
	"onejob/lock"
	"onejob/lock/consul"
	"onejob/store"
	"onejob/tasks"
	"onejob/worker"
)

// Here the test binary is a program of its own with handlers in Go, which end their
// process in every way that Go has. Its replicas have supervisors, as those of the real
// binary do.

// programVariable makes the test binary such a program. It is the name of the replica.
const programVariable = "ONEJOB_TEST_PROGRAM"

func init() {
	name := os.Getenv(programVariable)
	if name == "" {
		return
	}
	encoder := zap.NewProductionEncoderConfig()
	encoder.MessageKey = "event"
	log := zap.New(zapcore.NewCore(zapcore.NewJSONEncoder(encoder), zapcore.Lock(os.Stdout), zap.DebugLevel))
	os.Exit(worker.Supervise(log, func(ctx context.Context, p *worker.Process) error { return program(ctx, p, name, log) }))
}

// program is the working process of such a program.
func program(ctx context.Context, p *worker.Process, name string, log *zap.Logger) error {
	if p.Reporting() {
		log.Info("reporting")
	}
	db, err := store.Open(store.Config{DSN: os.Getenv("ONEJOB_POSTGRES_DSN")})
	if err != nil {
		return err
	}
	defer db.Close()
	locks, err := consul.New(consul.Config{Client: api.DefaultConfig(), Prefix: os.Getenv("ONEJOB_CONSUL_PREFIX"), Log: log, Replica: consul.Replica{Name: name}})
	if err != nil {
		return err
	}
	concurrency, err := strconv.Atoi(os.Getenv("ONEJOB_WORKER_CONCURRENCY"))
	if err != nil {
		return err
	}
	return p.Run(ctx, worker.Config{Store: db, Locks: locks, Kinds: deadly(), Replica: name, Concurrency: concurrency, Log: log})
}

// deadly are the kinds "busy", which takes its time, and "die", which ends the process in
// the way that the payload names: in the first attempt, or in each.
func deadly() tasks.Kinds {
	kinds := tasks.Kinds{}
	tasks.Handle(kinds, "busy", func(ctx context.Context, _ *tasks.Attempt, p struct{ Millis int }) (any, error) {
		select {
		case <-time.After(time.Duration(p.Millis) * time.Millisecond):
			return nil, nil
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	})
	tasks.Handle(kinds, "die", func(_ context.Context, a *tasks.Attempt, p struct {
		How    string
		Always bool
	}) (any, error) {
		if a.Attempt > 1 && !p.Always {
			return nil, nil
		}
		switch p.How {
		case "kill -9":
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		case "memory": // until the kernel ends it
			var all [][]byte
			for range 100 {
				all = append(all, bytes.Repeat([]byte{1}, 16<<20))
			}
			runtime.KeepAlive(all)
		case "panic":
			go func() { panic("as the test wants it") }() // in the handler's own goroutine it is an error of the task
		case "os.Exit(0)":
			os.Exit(0)
		case "os.Exit(2)": // as a program that refuses its configuration
			go os.Exit(2)
		case "fatal error":
			shared := map[int]int{}
			for range 8 {
				go func() {
					for i := 0; ; i++ {
						shared[i%10]++
					}
				}()
			}
		}
		select {}
	})
	return kinds
}

// program starts a replica of the program, and waits until it works.
func (c *cluster) program(t *testing.T, name string, concurrency int) *process {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return c.programBy(t, name, concurrency, exec.Command(self))
}

// programBy is program, started by a command.
func (c *cluster) programBy(t *testing.T, name string, concurrency int, cmd *exec.Cmd) *process {
	t.Helper()
	return c.run(t, name, cmd, programVariable+"="+name, "ONEJOB_WORKER_CONCURRENCY="+strconv.Itoa(concurrency))
}

// field returns a field of the first event of that name.
func (p *process) field(event, name string) any {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range p.events {
		if e["event"] == event {
			return e[name]
		}
	}
	return nil
}

// The process ends in the midst of a handler: nobody can recover from these. The other
// replica does not wait for silence, and the same one works again.
func TestHandlerEndsItsProcess(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		how      string
		exitCode float64
		signal   string
		stderr   string
	}{
		{"kill -9", -1, "SIGKILL", ""},
		{"panic", 2, "", "panic: as the test wants it"},
		{"os.Exit(0)", 0, "", ""},
		{"os.Exit(2)", 2, "", ""},
		{"fatal error", 2, "", "fatal error: concurrent map"},
	} {
		t.Run(test.how, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			a, z := c.program(t, "a", 32), c.program(t, "z", 32)
			id := c.insert(t, "kind, payload", "die", fmt.Sprintf(`{"How": %q}`, test.how))
			c.await(t, id, "succeeded")
			if got := c.outcomes(t, id); got != "crashed succeeded" {
				t.Errorf("outcomes: %s", got)
			}
			if got := get[int](t, c, "SELECT attempt FROM onejob.tasks WHERE id = $1", id); got != 2 {
				t.Errorf("it is at attempt %d, want 2", got)
			}
			t.Logf("the next attempt began %.2f s after the first", get[float64](t, c, "SELECT extract(epoch FROM max(started_at) - min(started_at))::float8 FROM onejob.attempts WHERE task_id = $1", id))

			died, other := a, z
			if get[string](t, c, "SELECT replica FROM onejob.attempts WHERE task_id = $1 AND outcome = 'crashed'", id) == "z" {
				died, other = z, a
			}
			testenv.Eventually(t, maxWait, "the next working process has a session", func() bool { return died.count("session_started") == 2 })
			if died.count("worker_crashed") != 1 || died.count("worker_restarted") != 1 {
				t.Errorf("%s logged %d crashes and %d restarts", died.name, died.count("worker_crashed"), died.count("worker_restarted"))
			}
			if died.count("reporting") == 0 || other.count("reporting") != 0 {
				t.Errorf("%d processes of %s, which crashed, report a death, and %d of the other", died.count("reporting"), died.name, other.count("reporting"))
			}
			if code, signal := died.field("worker_crashed", "exit_code"), died.field("worker_crashed", "signal"); code != test.exitCode || cmp.Or(signal, any("")) != any(test.signal) {
				t.Errorf("it crashed with code %v and signal %q, want %v and %q", code, signal, test.exitCode, test.signal)
			}
			if other.count("worker_crashed") != 0 || other.count("replica_dead") != 0 {
				t.Errorf("the other one logged %d crashes, and %d times that it waited for silence", other.count("worker_crashed"), other.count("replica_dead"))
			}

			// It works, too.
			other.signal(t, syscall.SIGTERM)
			<-other.exited
			c.await(t, c.insert(t, "kind, payload", "busy", `{"Millis": 1}`), "succeeded")
			died.signal(t, syscall.SIGTERM)
			<-died.exited
			for _, p := range []*process{died, other} {
				if code := p.cmd.ProcessState.ExitCode(); code != 0 {
					t.Errorf("%s exited with %d", p.name, code)
				}
			}
			if got := died.stderr.String(); !strings.Contains(got, test.stderr) {
				t.Errorf("stderr lacks %q: %.500s", test.stderr, got)
			}
			c.noOverlaps(t)
		})
	}
}

// One task kills each process that begins it. It is quarantined, and those that run beside
// it are not.
func TestTaskThatKillsEachProcess(t *testing.T) {
	t.Parallel()
	const healthy = 30
	for name, concurrency := range map[string]int{
		"alone in its replica":                  1,
		"beside a third of the others":          11,
		"in one replica with all of the others": 32, // as long as there are no suspects
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			replicas := []*process{c.program(t, "a", concurrency), c.program(t, "b", concurrency), c.program(t, "c", concurrency)}
			c.exec(t, `
INSERT INTO onejob.tasks (kind, payload, max_attempts)
SELECT CASE i WHEN 7 THEN 'die' ELSE 'busy' END,
       CASE i WHEN 7 THEN '{"How": "kill -9", "Always": true}'::jsonb ELSE '{"Millis": 500}' END,
       20
  FROM generate_series(0, $1) i`, healthy)
			c.awaitAll(t, 5*time.Minute)

			bad := get[int64](t, c, "SELECT id FROM onejob.tasks WHERE kind = 'die'")
			if got := get[string](t, c, "SELECT concat_ws(' ', status, crashes) FROM onejob.tasks WHERE id = $1", bad); got != "failed 3" && got != "failed 4" {
				t.Errorf("the task that kills is %s, want failed after 3 crashes, or 4 if others were as likely to be the cause of the third", got)
			}
			if got, want := get[string](t, c, "SELECT error FROM onejob.tasks WHERE id = $1", bad), "quarantined: 3 replicas died while they worked on it"; !strings.HasPrefix(strings.Replace(got, "4", "3", 1), want) {
				t.Errorf("its error is %q, want %q", got, want)
			}
			// More than three, if another replica is so slow that it seems to have died too.
			outcomes := strings.Fields(c.outcomes(t, bad))
			if len(outcomes) < 3 || slices.ContainsFunc(outcomes, func(o string) bool { return o != "crashed" }) {
				t.Errorf("its outcomes: %s", outcomes)
			}
			c.wantNone(t, "healthy tasks did not succeed", "SELECT count(*) FROM onejob.tasks WHERE kind = 'busy' AND status <> 'succeeded'")
			c.wantNone(t, "attempts at healthy tasks failed", `
SELECT count(*)
  FROM onejob.attempts a
  JOIN onejob.tasks t ON t.id = a.task_id
 WHERE t.kind = 'busy'
   AND a.outcome NOT IN ('succeeded', 'crashed')`)
			crashes := 0
			for _, p := range replicas {
				crashes += p.count("worker_crashed")
			}
			if crashes != len(outcomes) {
				t.Errorf("%d processes crashed in %d attempts", crashes, len(outcomes))
			}
			c.noOverlaps(t)
		})
	}
}

// The kernel ends the working process, and not its supervisor, when a handler takes all the
// memory that there is: here, that of a cgroup which both are in.
func TestOutOfMemory(t *testing.T) {
	t.Parallel()
	dir, kills := memoryCgroup(t, 512<<20)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := newCluster(t)
	p := c.programBy(t, "a", 4, exec.Command("/bin/sh", "-c", `echo $$ > "$1/cgroup.procs" && exec "$0"`, self, dir))
	supervisor := p.cmd.Process.Pid
	id := c.insert(t, "kind, payload", "die", `{"How": "memory"}`)
	c.await(t, id, "succeeded")
	if got := c.outcomes(t, id); got != "crashed succeeded" {
		t.Errorf("outcomes: %s", got)
	}
	if signal := p.field("worker_crashed", "signal"); signal != "SIGKILL" || p.cmd.Process.Pid != supervisor || kills() == 0 {
		t.Errorf("it was ended by %v; the kernel has killed %d for want of memory", signal, kills())
	}
	p.signal(t, syscall.SIGTERM)
	<-p.exited
	if code := p.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("the supervisor exited with %d", code)
	}
}

// memoryCgroup makes a cgroup with so much memory, of whichever version the machine has,
// and returns its folder and a function that tells how often the kernel has killed there.
func memoryCgroup(t *testing.T, bytes int) (dir string, kills func() int) {
	t.Helper()
	const v1, v2 = "/sys/fs/cgroup/memory", "/sys/fs/cgroup"
	name := fmt.Sprintf("onejob-test-%d", os.Getpid())
	limit, events := "memory.limit_in_bytes", "memory.oom_control"
	if dir = filepath.Join(v1, name); os.Mkdir(dir, 0o755) != nil {
		limit, events = "memory.max", "memory.events"
		_ = os.WriteFile(v2+"/cgroup.subtree_control", []byte("+memory"), 0)
		if dir = filepath.Join(v2, name); os.Mkdir(dir, 0o755) != nil {
			t.Skip("this needs the right to make cgroups")
		}
	}
	t.Cleanup(func() {
		testenv.Eventually(t, maxWait, "the cgroup is removed", func() bool { return os.Remove(dir) == nil })
	})
	if err := os.WriteFile(filepath.Join(dir, limit), []byte(strconv.Itoa(bytes)), 0); err != nil {
		t.Skipf("this needs the memory controller of cgroups: %v", err)
	}
	return dir, func() (n int) {
		text, err := os.ReadFile(filepath.Join(dir, events))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if rest, is := strings.CutPrefix(line, "oom_kill "); is {
				n, _ = strconv.Atoi(strings.TrimSpace(rest))
			}
		}
		return n
	}
}

// nilError is an error whose nil pointer is no nil error.
type nilError struct{ text string }

func (e *nilError) Error() string { return e.text }

// unwraps is an error whose nil pointer fails when it is asked for another one.
type unwraps struct{ inner error }

func (*unwraps) Error() string   { return "it unwraps" }
func (e *unwraps) Unwrap() error { return e.inner }

// refuses is a kind that refuses all payloads.
type refuses struct{ err error }

func (k refuses) Prepare(json.RawMessage) (tasks.Handler, error) { return nil, k.err }

// I8: however a handler of an application ends, the attempt has an outcome, and its lock key
// is free for the next task.
func TestHandlersThatEndInOddWays(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	k := kinds(nil)
	odd := map[string]struct {
		handler func(context.Context, *tasks.Attempt, none) (none, error)
		says    string
	}{
		"nil-error": {func(context.Context, *tasks.Attempt, none) (none, error) { var e *nilError; return none{}, e }, "nil pointer"},
		"unwraps":   {func(context.Context, *tasks.Attempt, none) (none, error) { var e *unwraps; return none{}, e }, "nil pointer"},
		"goexit":    {func(context.Context, *tasks.Attempt, none) (none, error) { runtime.Goexit(); return none{}, nil }, "ended its goroutine"},
		"refused": {func(context.Context, *tasks.Attempt, none) (none, error) {
			return none{}, fmt.Errorf("ledger: %w", tasks.ErrRefused)
		}, "ledger: the fence has been superseded"},
		"wordy": {func(context.Context, *tasks.Attempt, none) (none, error) {
			return none{}, errors.New(strings.Repeat("word ", 1<<20))
		}, "(5177344 bytes more)"},
	}
	for name, h := range odd {
		tasks.Handle(k, name, h.handler)
	}
	for name, err := range map[string]error{"nil-error of Prepare": (*nilError)(nil), "unwraps of Prepare": (*unwraps)(nil)} {
		k[name] = refuses{err}
		odd[name] = odd["nil-error"]
	}
	r := c.limited(t, "r", k, func(w *worker.Config) { w.LimitSlots = map[string]int{"few": 1} })
	for name, h := range odd {
		id := c.insert(t, "kind, max_attempts, lock_key", name, 2, name)
		c.await(t, id, "failed")
		if got := c.outcomes(t, id); got != "failed failed" {
			t.Errorf("%s: the outcomes are %q", name, got)
		}
		if text := get[string](t, c, "SELECT error FROM onejob.tasks WHERE id = $1", id); !strings.Contains(text, h.says) || len(text) > 70_000 {
			t.Errorf("%s: the error has %d bytes: %.200s", name, len(text), text)
		}
		c.await(t, c.insert(t, "kind, lock_key", "noop", name), "succeeded")

		// Under a limit nothing of it stays either: room, payload or slot.
		c.await(t, c.insert(t, "kind, max_attempts, limit_name", name, 1, "few"), "failed")
	}
	testenv.Eventually(t, maxWait, "nothing is noted as running", func() bool {
		s := r.Status()
		return s.Running == 0 && s.Payload == 0
	})
	if err := r.stop(); err != nil {
		t.Error(err)
	}
	c.noOverlaps(t)
}

// The context of a handler ends with its lease, and says why.
func TestHandlersHearThatTheirLeaseHasEnded(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	end := make(chan struct{})
	defer close(end)
	began, heard := make(chan struct{}, 1), make(chan error, 1)
	k := tasks.Kinds{}
	tasks.Handle(k, "wait", func(ctx context.Context, _ *tasks.Attempt, _ none) (none, error) {
		began <- struct{}{}
		select {
		case <-ctx.Done():
			heard <- context.Cause(ctx)
		case <-end:
		}
		return none{}, context.Cause(ctx)
	})
	r := c.replica(t, "r", k, nil)
	c.insert(t, "kind, lock_key", "wait", "k")
	<-began
	if _, err := c.kv.Client.Session().Destroy(r.locks.Session(), nil); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-heard:
		if !errors.Is(err, lock.ErrLost) {
			t.Errorf("the cause is %v", err)
		}
	case <-time.After(maxWait):
		t.Error("the handler has not heard of it")
	}
}

// A program whose Locks cannot be told of a death is refused by its working process, not by the one
// that reports a death, which would be started again and again.
func TestSuperviseNeedsAReporter(t *testing.T) {
	err := new(worker.Process).Run(t.Context(), worker.Config{Locks: struct{ lock.Locker }{}})
	if err == nil || !strings.Contains(err.Error(), "lock.Reporter") {
		t.Errorf("%v", err)
	}
}

// A second signal ends the grace period of a program of worker.Supervise too.
func TestProgramIsToldTwice(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	a := c.program(t, "a", 1)
	id := c.insert(t, "kind, payload", "busy", `{"Millis": 100000000}`)
	a.logged(t, "task_started")
	a.signal(t, syscall.SIGTERM)
	a.logged(t, "draining")
	a.signal(t, syscall.SIGTERM)
	a.logged(t, "shutdown_forced")
	<-a.exited
	if got := c.outcomes(t, id); got != "shutdown" {
		t.Errorf("outcomes: %s", got)
	}
}
