package procfs_test

import (
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"onejob/internal/procfs"
)

func TestChildren(t *testing.T) {
	child := exec.Command("cat")
	in, err := child.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	before := procfs.Children(os.Getpid())
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	if now := procfs.Children(os.Getpid()); len(now) != len(before)+1 || !slices.Contains(now, child.Process.Pid) {
		t.Errorf("children before %v, and with %d %v", before, child.Process.Pid, now)
	}
	_ = in.Close()
	if err := child.Wait(); err != nil {
		t.Fatal(err)
	}
	if now := procfs.Children(os.Getpid()); len(now) != len(before) {
		t.Errorf("children before %v, and after the end of another %v", before, now)
	}
}

func TestGone(t *testing.T) {
	child := exec.Command("/bin/sleep", "1000")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	alive, err := procfs.Read(child.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	if procfs.Gone(alive.PID, alive.Start) {
		t.Error("it is gone while it lives")
	}
	if !procfs.Gone(alive.PID, alive.Start-1) {
		t.Error("one that had its number before is there")
	}
	if procfs.Gone(alive.PID, 0) {
		t.Error("one of which nothing is known is gone")
	}
	if err := child.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for until := time.Now().Add(20 * time.Second); !procfs.Gone(alive.PID, alive.Start); time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatal("it is not gone while nobody has waited for it")
		}
	}
	_ = child.Wait()
	if !procfs.Gone(alive.PID, alive.Start) {
		t.Error("it is not gone after its end")
	}
}
