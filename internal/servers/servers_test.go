package servers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"
	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"onejob/internal/procfs"
)

// parentFlag makes the test binary start servers, print them and wait to be
// killed.
const parentFlag = "ONEJOB_TEST_PARENT"

func TestMain(m *testing.M) {
	if os.Getenv(parentFlag) != "" {
		beParent()
	}
	if os.Getenv(holderFlag) != "" {
		beHolder()
		return
	}
	goleak.VerifyTestMain(m)
}

func TestPostgresIsStoppedAndStarted(t *testing.T) {
	t.Parallel()
	p, err := StartPostgres(t.Context(), PostgresConfig{Settings: map[string]string{"work_mem": "5MB"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	dsn := p.DSN("postgres")

	if got := query(t, dsn, "SELECT current_setting('work_mem') || current_setting('fsync') || current_setting('server_encoding')"); got != "5MBoffUTF8" {
		t.Errorf("the settings are %q", got)
	}
	query(t, dsn, "CREATE TABLE kept AS SELECT 'yes' AS answer")

	ends := map[string]func() error{
		"fast":      func() error { return p.Stop(Fast) },
		"immediate": func() error { return p.Stop(Immediate) },
		"kill": func() error {
			children := procfs.Children(p.process.cmd.Process.Pid)
			if len(children) < 3 {
				t.Errorf("only %d children were found", len(children))
			}
			p.Kill()
			for _, pid := range children {
				if state := stateOf(pid); state != 0 && state != 'Z' {
					t.Errorf("child %d is in state %c", pid, state)
				}
			}
			return nil
		},
	}
	for name, end := range ends {
		conn, err := pgx.Connect(t.Context(), dsn)
		if err != nil {
			t.Fatal(err)
		}
		if err := end(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := conn.Ping(t.Context()); err == nil {
			t.Errorf("%s: a connection lives on", name)
		}
		conn.Close(t.Context())
		checkHeld(t, p.port)
		if err := p.Start(t.Context()); err != nil {
			t.Fatalf("start after %s: %v", name, err)
		}
		if got := query(t, dsn, "SELECT answer FROM kept"); got != "yes" {
			t.Errorf("after %s the data says %q", name, got)
		}
	}
	if err := p.Restart(t.Context(), Fast); err != nil {
		t.Errorf("restart: %v", err)
	}

	pid := p.process.cmd.Process.Pid
	if err := p.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	checkGone(t, p.folder.path, pid)
	checkReleased(t, p.port)
}

// A server that does not stop in time is killed with its children, or else it could not start again.
func TestPostgresThatDoesNotStopStartsAgain(t *testing.T) {
	t.Parallel()
	p, err := StartPostgres(t.Context(), PostgresConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	children := procfs.Children(p.PID())
	t.Cleanup(func() {
		for _, pid := range children { // none is left if the test passes
			_ = syscall.Kill(pid, syscall.SIGCONT)
		}
	})
	for _, pid := range children {
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil && err != syscall.ESRCH {
			t.Fatal(err)
		}
	}
	if err := p.Stop(Fast); !errors.Is(err, ErrKilled) {
		t.Errorf("a stop while %d children are stopped: %v", len(children), err)
	}
	for _, pid := range children {
		if state := stateOf(pid); state != 0 && state != 'Z' {
			t.Errorf("child %d is in state %c", pid, state)
		}
	}
	if err := p.Start(t.Context()); err != nil {
		t.Error(err)
	}
}

// A child that hangs does not notice that the first process has ended, and has the shared memory.
func TestPostgresStartsBesideItsOrphans(t *testing.T) {
	t.Parallel()
	p, err := StartPostgres(t.Context(), PostgresConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	children := procfs.Children(p.PID())
	if len(children) == 0 {
		t.Fatal("the server has no children")
	}
	t.Cleanup(func() {
		for _, pid := range children { // none is left if the test passes
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	})
	for _, pid := range children {
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil && err != syscall.ESRCH {
			t.Fatal(err)
		}
	}
	p.process.kill()
	if err := p.Start(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestPostgresLeavesNoSharedMemory(t *testing.T) {
	t.Parallel()
	p, err := StartPostgres(t.Context(), PostgresConfig{})
	if err != nil {
		t.Fatal(err)
	}
	p.Kill()
	id, ok := sharedMemory(p.data)
	if !ok {
		t.Error("the segment was not found")
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if _, err := unix.SysvShmCtl(id, unix.IPC_STAT, new(unix.SysvShmDesc)); err != unix.EINVAL && err != unix.EIDRM {
		t.Errorf("segment %d is left (%v)", id, err)
	}
}

func TestPostgresThatCannotStart(t *testing.T) {
	t.Parallel()
	_, err := StartPostgres(t.Context(), PostgresConfig{Dir: worldFolder(t), Settings: map[string]string{"work_mem": "plenty"}})
	if err == nil {
		t.Fatal("it started")
	}
	if !strings.Contains(err.Error(), `invalid value for parameter "work_mem"`) {
		t.Errorf("the error does not show the log: %v", err)
	}
}

func TestConsulIsStoppedAndStarted(t *testing.T) {
	t.Parallel()
	c, err := StartConsul(t.Context(), ConsulConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })

	put(t, c, "kept")
	session, _, err := c.Client().Session().Create(&api.SessionEntry{TTL: "10s"}, nil)
	if err != nil {
		t.Fatalf("no session can be made: %v", err)
	}

	ends := map[string]func() error{
		"stop": c.Stop,
		"kill": func() error { c.Kill(); return nil },
		"stop while frozen": func() error {
			if err := c.Freeze(); err != nil {
				return err
			}
			return c.Stop()
		},
	}
	for name, end := range ends {
		if err := end(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := c.Client().Status().Leader(); err == nil {
			t.Errorf("%s: it still answers", name)
		}
		checkHeld(t, c.held.numbers...)
		if err := c.Start(t.Context()); err != nil {
			t.Fatalf("start after %s: %v", name, err)
		}
		if pair, _, err := c.Client().KV().Get("kept", nil); err != nil || pair == nil {
			t.Errorf("after %s the key is %v (%v)", name, pair, err)
		}
		if entry, _, err := c.Client().Session().Info(session, nil); err != nil || entry == nil {
			t.Errorf("after %s the session is %v (%v)", name, entry, err)
		}
	}

	pid, ports := c.process.cmd.Process.Pid, c.held.numbers
	if err := c.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	checkGone(t, c.folder.path, pid)
	checkReleased(t, ports...)
}

func TestConsulIsFrozen(t *testing.T) {
	t.Parallel()
	c, err := StartConsul(t.Context(), ConsulConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })

	if err := c.Freeze(); err != nil {
		t.Fatal(err)
	}
	answer := make(chan error, 1)
	go func() {
		_, err := c.Client().Status().Leader()
		answer <- err
	}()
	select {
	case err := <-answer:
		t.Errorf("it answered while frozen (%v)", err)
	case <-time.After(300 * time.Millisecond):
	}
	if err := c.Thaw(); err != nil {
		t.Fatal(err)
	}
	if err := <-answer; err != nil {
		t.Errorf("it did not answer after the thaw: %v", err)
	}
}

func TestConsulThatCannotStart(t *testing.T) {
	t.Parallel()
	base := t.TempDir()
	_, err := StartConsul(t.Context(), ConsulConfig{Dir: base, Extra: `{"no_such_key": 1}`})
	if err == nil {
		t.Fatal("it started")
	}
	if !strings.Contains(err.Error(), "no_such_key") {
		t.Errorf("the error does not show the log: %v", err)
	}
	if left, _ := os.ReadDir(base); len(left) != 0 {
		t.Errorf("%v is left", left)
	}
}

func TestServersDieWithTheirParent(t *testing.T) {
	t.Parallel()
	base := worldFolder(t)
	parent := exec.Command(os.Args[0])
	parent.Env = append(os.Environ(), parentFlag+"="+base)
	parent.Stderr = os.Stderr
	output, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 100)
	n, err := output.Read(line)
	if err != nil {
		t.Fatalf("the parent started no servers: %v", err)
	}
	parent.Process.Kill()
	parent.Wait()

	for _, field := range strings.Fields(string(line[:n])) {
		pid, err := strconv.Atoi(field)
		if err != nil {
			t.Fatal(err)
		}
		awaitState(pid, 'Z')
		if state := stateOf(pid); state != 0 && state != 'Z' {
			t.Errorf("server %d outlives its parent, in state %c", pid, state)
		}
	}

	t.Run("and the next one removes their folders", func(t *testing.T) {
		folders, _ := filepath.Glob(filepath.Join(base, folderPrefix+"*"))
		if len(folders) != 2 {
			t.Fatalf("the folders are %q", folders)
		}
		old := time.Now().Add(-2 * newFolder)
		for _, folder := range folders {
			if err := os.Chtimes(folder, old, old); err != nil {
				t.Fatal(err)
			}
		}
		sweep(base)
		if left, _ := os.ReadDir(base); len(left) != 0 {
			t.Errorf("%v is left", left)
		}
	})
}

// beParent is the whole life of the program that is killed.
func beParent() {
	config := PostgresConfig{Dir: os.Getenv(parentFlag)}
	p, err := StartPostgres(context.Background(), config)
	if err != nil {
		panic(err)
	}
	c, err := StartConsul(context.Background(), ConsulConfig{Dir: config.Dir})
	if err != nil {
		panic(err)
	}
	pids := append(procfs.Children(p.process.cmd.Process.Pid), p.process.cmd.Process.Pid, c.process.cmd.Process.Pid)
	line := ""
	for _, pid := range pids {
		line += strconv.Itoa(pid) + " "
	}
	os.Stdout.WriteString(line)
	select {}
}

func TestSweepSparesTheLiving(t *testing.T) {
	t.Parallel()
	base := t.TempDir()
	kept, err := makeFolder(base, "test", 0)
	if err != nil {
		t.Fatal(err)
	}
	old := time.Now().Add(-2 * newFolder)
	if err := os.Chtimes(kept.path, old, old); err != nil {
		t.Fatal(err)
	}
	sweep(base)
	if _, err := os.Stat(kept.path); err != nil {
		t.Error(err)
	}
	if err := kept.remove(); err != nil {
		t.Error(err)
	}
}

// Folders of others may have such names, too.
func TestSweepSparesWhatIsNotOurs(t *testing.T) {
	t.Parallel()
	base := t.TempDir()
	work := filepath.Join(base, folderPrefix+"hot-fix")
	if err := os.Mkdir(work, 0o755); err != nil {
		t.Fatal(err)
	}
	old := time.Now().Add(-2 * newFolder)
	if err := os.Chtimes(work, old, old); err != nil {
		t.Fatal(err)
	}
	sweep(base)
	if _, err := os.Stat(work); err != nil {
		t.Error(err)
	}
}

func TestPortThatIsTaken(t *testing.T) {
	t.Parallel()
	c, err := StartConsul(t.Context(), ConsulConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_, taken, _ := strings.Cut(c.Addr(), ":")

	// These settings spoil every port that is chosen, so all tries are used up.
	_, err = StartPostgres(t.Context(), PostgresConfig{Settings: map[string]string{"port": taken}})
	if exit, ok := errors.AsType[*exitError](err); !ok || !exit.portTaken() {
		t.Errorf("PostgreSQL: the error is %v", err)
	}
	for _, port := range []string{"http", "server", "serf_lan"} {
		extra := fmt.Sprintf(`{"ports": {%q: %s}}`, port, taken)
		_, err = StartConsul(t.Context(), ConsulConfig{Extra: extra})
		if exit, ok := errors.AsType[*exitError](err); !ok || !exit.portTaken() {
			t.Errorf("Consul's port %s: the error is %v", port, err)
		}
	}
}

func TestConsulVersions(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]consulVersion{
		"Consul v1.22.5\nRevision 1a2b": {1, 22, 5},
		"/home/me/.cache/consul-1.9.10": {1, 9, 10},
		"Consul v1.23.0-dev":            {1, 23, 0},
	} {
		if got, ok := parseConsulVersion(text); !ok || got != want {
			t.Errorf("parseConsulVersion(%q) = %v, %t", text, got, ok)
		}
	}
	versions := []consulVersion{{1, 9, 10}, {1, 22, 5}, {1, 14, 0}}
	slices.SortFunc(versions, consulVersion.compare)
	if versions[2] != (consulVersion{1, 22, 5}) {
		t.Errorf("the newest is %v", versions[2])
	}
}

// worldFolder is a temporary folder that other users can enter, and that a unix
// socket's path has room for.
func worldFolder(t *testing.T) string {
	t.Helper()
	base, err := os.MkdirTemp("/tmp", "servers-test-*")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(base) })
	if err := os.Chmod(base, 0o755); err != nil {
		t.Fatal(err)
	}
	return base
}

// query runs one statement and returns the one value it yields, if any.
func query(t *testing.T, dsn, statement string) string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	rows, err := conn.Query(t.Context(), statement)
	if err != nil {
		t.Fatal(err)
	}
	values, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(values, "")
}

func put(t *testing.T, c *Consul, key string) {
	t.Helper()
	if _, err := c.Client().KV().Put(&api.KVPair{Key: key}, nil); err != nil {
		t.Fatal(err)
	}
}

func checkGone(t *testing.T, folder string, pid int) {
	t.Helper()
	if _, err := os.Stat(folder); !os.IsNotExist(err) {
		t.Errorf("folder %s is left (%v)", folder, err)
	}
	if err := syscall.Kill(pid, 0); err != syscall.ESRCH {
		t.Errorf("process %d is left (%v)", pid, err)
	}
}
