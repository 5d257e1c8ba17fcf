//go:build linux

package guard

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"onejob/boottime"
	"onejob/internal/testenv"
)

// This one is not parallel: a file that was just written cannot be executed
// while a process that is being forked elsewhere has it open.
func TestStartSaysWhyItDoesNot(t *testing.T) {
	dir := t.TempDir()
	file := func(name, content string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	data := file("data", "hello", 0o644)
	for name, test := range map[string]struct {
		change func(*Spec)
		want   string
	}{
		"missing":             {func(s *Spec) { s.Path = "/nowhere/at/all" }, "start /nowhere/at/all: no such file"},
		"no path":             {func(s *Spec) { s.Path = "" }, "no path"},
		"not executable":      {func(s *Spec) { s.Path = data }, "is it executable"},
		"a directory":         {func(s *Spec) { s.Path = dir }, "it is a directory"},
		"no interpreter line": {func(s *Spec) { s.Path = file("bare", "echo hello\n", 0o755) }, "must be #!"},
		"no interpreter":      {func(s *Spec) { s.Path = file("lost", "#!/nowhere/sh\n", 0o755) }, "the interpreter that it names is not"},
		"no directory":        {func(s *Spec) { s.Dir = "/nowhere" }, "working directory: stat /nowhere: no such file"},
		"file as directory":   {func(s *Spec) { s.Dir = data }, "is not a directory"},
		"NUL":                 {func(s *Spec) { s.Args = []string{"a\x00b"} }, "NUL byte"},
		"expired":             {func(s *Spec) { s.Deadline = boottime.Now() }, ErrExpired.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			s, mark := script(t, "exit 0", nil)
			test.change(&s)
			if p, err := Start(s); err == nil {
				p.Kill()
				t.Fatal("it started")
			} else if !strings.Contains(err.Error(), test.want) {
				t.Fatalf("error %q does not say %q", err, test.want)
			}
			wantNoneLeft(t, mark)
		})
	}
}

// The guard looks at the clock once more, right before it starts the command.
func TestGuardRefusesWhatHasExpired(t *testing.T) {
	t.Parallel()
	link, guardEnd, err := socketPair()
	if err != nil {
		t.Fatal(err)
	}
	defer link.Close()
	guard := exec.Command("/proc/self/exe")
	guard.Args = []string{argv0}
	guard.ExtraFiles = []*os.File{guardEnd}
	if err := guard.Start(); err != nil {
		t.Fatal(err)
	}
	guardEnd.Close()
	line, err := json.Marshal(plan{Argv: pack([]string{"/bin/true"}), Env: pack([]string{"A=b"})})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := link.Write(line); err != nil {
		t.Fatal(err)
	}
	said, err := io.ReadAll(link)
	if err != nil || !strings.Contains(string(said), `"Expired":true`) {
		t.Errorf("%q, %v", said, err)
	}
	if err := guard.Wait(); err == nil {
		t.Error("the guard was content")
	}
}

func TestGuardIsNotForHands(t *testing.T) {
	t.Parallel()
	guard := exec.Command("/proc/self/exe")
	guard.Args = []string{argv0}
	said, err := guard.CombinedOutput()
	if err == nil || !strings.Contains(string(said), "not by hand") {
		t.Errorf("%q, %v", said, err)
	}
}

func TestExitCodes(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]Exit{
		"exit 0":        {},
		"exit 3":        {Code: 3},
		"exit 255":      {Code: 255},
		"kill -KILL $$": {Code: 137, Signal: syscall.SIGKILL},
		"kill -TERM $$": {Code: 143, Signal: syscall.SIGTERM},
	} {
		t.Run(text, func(t *testing.T) {
			t.Parallel()
			s, _ := script(t, text, nil)
			p := mustStart(t, s)
			if exit := mustWait(t, p); exit != want {
				t.Errorf("%+v, want %+v", exit, want)
			}
			p.Stop()
			p.Kill()
			p.Signal(syscall.SIGINT)
			p.Extend(boottime.Now())
			if exit := mustWait(t, p); exit != want {
				t.Errorf("a second Wait: %+v, want %+v", exit, want)
			}
		})
	}
}

func TestOutputIsInOrderAndComplete(t *testing.T) {
	t.Parallel()
	var out testenv.Output
	s, _ := script(t, `printf 'a\000'; printf 'b\377' >&2; printf c`, &out)
	mustWait(t, mustStart(t, s))
	if got := out.String(); got != "a\x00b\xffc" {
		t.Errorf("%q", got)
	}
}

func TestMuchOutput(t *testing.T) {
	t.Parallel()
	for name, w := range map[string]interface{ Write([]byte) (int, error) }{
		"read":   &testenv.Output{},
		"broken": brokenWriter{},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, _ := script(t, "head -c 3000000 /dev/zero", w)
			if exit := mustWait(t, mustStart(t, s)); exit != (Exit{}) {
				t.Errorf("%+v", exit)
			}
			if b, ok := w.(*testenv.Output); ok && len(b.String()) != 3000000 {
				t.Errorf("%d bytes", len(b.String()))
			}
		})
	}
}

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, errors.New("broken") }

func TestStdin(t *testing.T) {
	t.Parallel()
	payload := bytes.Repeat([]byte("0123456789abcde\n"), 1<<16)
	for text, want := range map[string]string{
		"cat":            string(payload),
		"cat /dev/stdin": string(payload),
		"true":           "",
		"exec <&-; true": "",
	} {
		t.Run(text, func(t *testing.T) {
			t.Parallel()
			var out testenv.Output
			s, _ := script(t, text, &out)
			s.Stdin = payload
			if exit := mustWait(t, mustStart(t, s)); exit != (Exit{}) {
				t.Errorf("%+v", exit)
			}
			if out.String() != want {
				t.Errorf("%d bytes came back, want %d", len(out.String()), len(want))
			}
		})
	}
}

func TestCommandGetsWhatSpecSaysAndNoMore(t *testing.T) {
	t.Parallel()
	t.Run("environment", func(t *testing.T) {
		t.Parallel()
		var out testenv.Output
		s := Spec{
			Path: "/usr/bin/env", Output: &out, Deadline: boottime.Now().Add(time.Minute),
			Env: []string{"B=not utf-8: \xff", "A=1\n2", "ONEJOB_GUARD=outer"},
		}
		p := mustStart(t, s)
		mustWait(t, p)
		if want := "B=not utf-8: \xff\nA=1\n2\n" + p.mark + "\n"; out.String() != want {
			t.Errorf("%q, want %q", out.String(), want)
		}
	})
	t.Run("arguments and directory", func(t *testing.T) {
		t.Parallel()
		var out testenv.Output
		s, _ := script(t, `pwd; printf '<%s>' "$@"`, &out)
		s.Args = append(s.Args, "sh", "", "a b", "$HOME", "\xff")
		s.Dir = "/usr"
		mustWait(t, mustStart(t, s))
		if want := "/usr\n<><a b><$HOME><\xff>"; out.String() != want {
			t.Errorf("%q, want %q", out.String(), want)
		}
	})
	t.Run("files", func(t *testing.T) {
		t.Parallel()
		null, err := os.Open(os.DevNull)
		if err != nil {
			t.Fatal(err)
		}
		defer null.Close()
		leak, err := unix.FcntlInt(null.Fd(), unix.F_DUPFD, 50) // not close-on-exec
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(leak)
		var out testenv.Output
		mustWait(t, mustStart(t, Spec{
			Path: "/bin/ls", Args: []string{"/proc/self/fd"}, Env: []string{"LC_ALL=C"},
			Output: &out, Deadline: boottime.Now().Add(time.Minute),
		}))
		if want := "0\n1\n2\n3\n"; out.String() != want { // 3 is the directory
			t.Errorf("%q, want %q", out.String(), want)
		}
	})
	t.Run("signals", func(t *testing.T) {
		t.Parallel()
		var out testenv.Output
		s, _ := script(t, `exec grep -E '^Sig(Blk|Ign)' /proc/self/status`, &out)
		mustWait(t, mustStart(t, s))
		for line := range strings.Lines(out.String()) {
			name, hex, _ := strings.Cut(line, ":")
			mask, err := strconv.ParseUint(strings.TrimSpace(hex), 16, 64)
			if err != nil {
				t.Fatal(err)
			}
			// 32 and 33 are the C library's own; whoever started the tests may
			// have left them ignored, and no Go program can undo that.
			if mask &^= 1<<31 | 1<<32; mask != 0 {
				t.Errorf("%s: signals are blocked or ignored: %x", name, mask)
			}
		}
	})
}

func TestFilesAndSignalsPassThrough(t *testing.T) {
	t.Parallel()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	s, _ := script(t, `trap 'echo interrupted; exit 7' INT; echo ready; while :; do sleep 0.01; done`, nil)
	s.Files = []*os.File{os.Stdin, w, w}
	p := mustStart(t, s)
	w.Close()
	line := make([]byte, 64)
	if n, err := r.Read(line); err != nil || string(line[:n]) != "ready\n" {
		t.Fatalf("%q, %v", line[:n], err)
	}
	p.Signal(syscall.SIGINT)
	if exit := mustWait(t, p); exit != (Exit{Code: 7}) {
		t.Errorf("%+v", exit)
	}
	if n, err := r.Read(line); err != nil || string(line[:n]) != "interrupted\n" {
		t.Errorf("%q, %v", line[:n], err)
	}
}

// Somebody who is not the command's descendant may have its end of the pipe.
func TestWaitEndsThoughThePipeIsHeldOpen(t *testing.T) {
	t.Parallel()
	var out testenv.Output
	s, mark := script(t, "echo ready; exec sleep 1000", &out)
	p := mustStart(t, s)
	untilReady(t, &out)
	var pids []int // a process that is being replaced by exec shows no variables
	until(t, "the command shows its mark", func() bool { pids = marked(t, mark); return len(pids) > 0 })
	held, err := os.OpenFile("/proc/"+itoa(pids[0])+"/fd/1", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	p.Kill()
	if exit := mustWait(t, p); exit.Signal != syscall.SIGKILL || exit.Reason != Stopped {
		t.Errorf("%+v", exit)
	}
}

func TestPack(t *testing.T) {
	t.Parallel()
	for _, list := range [][]string{{""}, {"a"}, {"", ""}, {"a", "", "\xff"}} {
		if got := unpack(pack(list)); !slices.Equal(got, list) {
			t.Errorf("%q became %q", list, got)
		}
	}
}

func BenchmarkStart(b *testing.B) {
	for b.Loop() {
		p, err := Start(Spec{Path: "/bin/true", Deadline: boottime.Now().Add(time.Minute)})
		if err != nil {
			b.Fatal(err)
		}
		if _, err := p.Wait(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkStartWithoutCgroup(b *testing.B) {
	for b.Loop() {
		p, err := Start(Spec{Path: "/bin/true", Deadline: boottime.Now().Add(time.Minute), NoCgroup: true})
		if err != nil {
			b.Fatal(err)
		}
		if _, err := p.Wait(); err != nil {
			b.Fatal(err)
		}
	}
}
