package supervisor

import (
	"os"
	"testing"
	"time"
)

func TestParseStat(t *testing.T) {
	line := "42 (a) b (c) Z 17 42 42 0 -1 4194304 100 200 0 0 120 30 7 5 20 0 1 0 4711 1000 10"
	p, ok := parseStat(42, []byte(line))
	if want := (proc{pid: 42, parent: 17, started: 4711, dead: true}); !ok || p != want {
		t.Errorf("got %+v, %v, want %+v", p, ok, want)
	}
	if _, ok := parseStat(42, []byte("42 (short) S 1")); ok {
		t.Error("a line that is cut off was accepted")
	}
}

func TestDescendants(t *testing.T) {
	nobody := func(proc) bool { return false }
	self := false
	for _, p := range descendants(os.Getppid(), nobody) {
		self = self || p.pid == os.Getpid()
	}
	if !self {
		t.Error("this process is not among the descendants of its parent")
	}
	if skipped := descendants(os.Getppid(), func(p proc) bool { return p.pid == os.Getpid() }); len(skipped) > 0 {
		for _, p := range skipped {
			if p.pid == os.Getpid() {
				t.Error("what is to be skipped is there")
			}
		}
	}
}

func TestDelay(t *testing.T) {
	want := []time.Duration{0, 1, 2, 4, 8, 16, 30, 30}
	for crashes, seconds := range want {
		if got := delay(crashes); got != seconds*time.Second {
			t.Errorf("after %d crashes %v, want %v", crashes, got, seconds*time.Second)
		}
	}
	if got := delay(1 << 40); got != lastDelay {
		t.Errorf("after very many crashes %v", got)
	}
}
