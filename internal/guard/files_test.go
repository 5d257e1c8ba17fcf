//go:build linux

package guard

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"onejob/boottime"
	"onejob/internal/procfs"
)

// A daemon that can open no file does not take what it cannot see for gone. Not parallel: the
// limit is that of the whole process.
func TestNoFileCanBeOpened(t *testing.T) {
	c := exec.Command("/bin/sleep", "1000")
	c.Env = []string{envKey + "=left behind"}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Process.Kill(); _ = c.Wait() }()
	mark := envKey + "=left behind"
	until(t, "it has its environment", func() bool { m, err := markOf(c.Process.Pid); return m == mark && err == nil })

	group := &cgroup{dir: t.TempDir()} // a folder that looks like one
	if err := os.WriteFile(filepath.Join(group.dir, "cgroup.events"), []byte("populated 0\nfrozen 0\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: limit.Max}); err != nil {
		t.Fatal(err)
	}
	populated := group.populated()
	_, listed := procfs.Processes()
	_, read := procfs.Environ(c.Process.Pid)
	found := killMarked(-1, mark)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if listed == nil || read == nil || !found {
		t.Errorf("without files: Processes says %v, Environ %v, something may be left: %t", listed, read, found)
	}
	if !populated || group.populated() {
		t.Errorf("an empty cgroup has processes: %t without files (want true, as nobody can look), %t with them", populated, group.populated())
	}
	if gone(c.Process.Pid) {
		t.Error("it was killed nevertheless, so this test shows nothing")
	}
	if !killMarked(-1, mark) {
		t.Error("it is not found once files can be opened")
	}
	until(t, "it is dead", func() bool { return gone(c.Process.Pid) })
}

// Where no command can be started at all, Start says so: that is not the command's fault. Not
// parallel: the limit is that of the whole process.
func TestMachineIsExhausted(t *testing.T) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	_, _ = ourHierarchy() // which is looked for once, as a daemon does when it starts
	for _, noCgroup := range []bool{true, false} {
		testMachineIsExhausted(t, limit, Spec{Path: "/bin/true", NoCgroup: noCgroup, Deadline: boottime.Now().Add(10 * time.Minute)})
	}
}

func testMachineIsExhausted(t *testing.T, limit unix.Rlimit, spec Spec) {
	type started struct {
		p   *Process
		err error
	}
	for files := range uint64(64) {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: files, Max: limit.Max}); err != nil {
			t.Fatal(err)
		}
		answer := make(chan started, 1)
		go func() {
			p, err := Start(spec)
			answer <- started{p, err}
		}()
		var p *Process
		var err error
		select {
		case s := <-answer:
			p, err = s.p, s.err
		case <-time.After(time.Minute):
			t.Errorf("with %d files: no answer", files)
			_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)
			s := <-answer
			p, err = s.p, s.err
		}
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
			t.Fatal(err)
		}
		switch {
		case err == nil:
			if exit, err := p.Wait(); err != nil || exit.Code != 0 {
				t.Errorf("with %d files: %+v, %v", files, exit, err)
			}
			if files == 0 {
				t.Error("it could be started without files, so this test shows nothing")
			}
			return
		case !errors.Is(err, ErrExhausted):
			t.Errorf("with %d files: %v", files, err)
		}
	}
	t.Error("it could not be started with 64 files")
}
