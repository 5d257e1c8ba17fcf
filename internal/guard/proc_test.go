//go:build linux

package guard

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"onejob/boottime"
)

// A program whose own packages end it in a guard says so at once, and not for each command.
func TestTry(t *testing.T) {
	t.Parallel()
	if err := Try(); err != nil {
		t.Error(err)
	}
	program := filepath.Join(t.TempDir(), "early")
	if out, err := exec.Command("go", "build", "-pgo=off", "-o", program, "./testdata/early").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	c := exec.Command(program)
	c.Env = append(os.Environ(), "NEEDED=there")
	out, err := c.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "there no command can be started") || !strings.Contains(string(out), "NEEDED is not set") {
		t.Errorf("%v: %s", err, out)
	}
}

// In a PID namespace that has kept the /proc of its parent, a guard would look for what it has to kill
// under numbers of strangers. Without /proc it would find nothing.
func TestProcOfAnotherNamespace(t *testing.T) {
	const inside = "GUARD_TEST_INSIDE"
	if os.Getenv(inside) != "" {
		p, err := Start(Spec{Path: "/bin/true", Deadline: boottime.Now().Add(time.Minute)})
		fmt.Println(p == nil, err)
		os.Exit(0)
	}
	if os.Getuid() != 0 {
		t.Skip("only root may make a PID namespace")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for want, unshare := range map[string][]string{
		"/proc is that of another PID namespace": {"--pid", "--fork"},
		"/proc is not mounted":                   {"--mount", "sh", "-c", `umount --lazy /proc && exec "$@"`, "sh"},
	} {
		c := exec.Command("unshare", append(unshare, self, "-test.run=^TestProcOfAnotherNamespace$")...)
		c.Env = append(os.Environ(), inside+"=1")
		var stderr strings.Builder // there the race detector complains that it needs /proc
		c.Stderr = &stderr
		out, err := c.Output()
		if err != nil || !strings.HasPrefix(string(out), "true "+want) {
			t.Errorf("%q: %v: %s%s", unshare, err, out, stderr.String())
		}
	}
}
