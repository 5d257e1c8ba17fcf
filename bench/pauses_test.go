package main

import (
	"os"
	"path/filepath"
	"testing"
)

// A log grows between two looks, the last line in two parts.
func TestLostIsCountedOnce(t *testing.T) {
	p := pauses{log: filepath.Join(t.TempDir(), "log")}
	file, err := os.Create(p.log)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for _, c := range []struct {
		text             string
		sessions, leases int
	}{
		{"", 0, 0},
		{`{"msg":"task_lease_lost"}` + "\n" + `{"msg":"task_lea`, 0, 1},
		{`se_lost"}` + "\n" + `{"msg":"session_lost","leases":2}` + "\n", 1, 2},
		{"", 1, 2},
	} {
		if _, err := file.WriteString(c.text); err != nil {
			t.Fatal(err)
		}
		if err := p.count(); err != nil {
			t.Fatal(err)
		}
		if p.sessionsLost != c.sessions || p.leasesLost != c.leases {
			t.Errorf("after %q: %d sessions and %d leases lost, want %d and %d", c.text, p.sessionsLost, p.leasesLost, c.sessions, c.leases)
		}
	}
}
