package procfs

import (
	"errors"
	"os"
	"os/exec"
	"testing"
)

func TestParse(t *testing.T) {
	p, err := parse(7, []byte("7 (a) b (c) Z 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 1900 20 21\n"))
	if want := (Process{PID: 7, Parent: 1, Group: 2, Session: 3, Dead: true, Start: 1900, threads: 17}); err != nil || p != want {
		t.Errorf("got %+v, %v, want %+v", p, err, want)
	}
	for _, line := range []string{"7 (a) S", "", "7 (a) S x 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21"} {
		if _, err := parse(7, []byte(line)); !errors.Is(err, ErrOdd) {
			t.Errorf("%q: got %v", line, err)
		}
	}
}

func TestGone(t *testing.T) {
	if Machine() == "" {
		t.Fatal("this /proc is not of our own PID namespace")
	}
	if Gone(os.Getpid(), Started()) {
		t.Error("this process is gone")
	}
	if !Gone(os.Getpid(), Started()+1) {
		t.Error("a process that had our number before us is not gone")
	}
	if Gone(os.Getpid(), 0) || Gone(0, 1) || Gone(-1, 1) {
		t.Error("what is unknown is gone")
	}
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p, err := Read(cmd.Process.Pid)
	if err != nil || Gone(p.PID, p.Start) {
		t.Errorf("a child that runs is gone (%v)", err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if !Gone(p.PID, p.Start) {
		t.Error("a child that was reaped is not gone")
	}
}
