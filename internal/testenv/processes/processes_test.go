package processes_test

import (
	"os"
	"testing"

	"onejob/internal/testenv/processes"
)

func TestStatus(t *testing.T) {
	number := func(name string) float64 {
		t.Helper()
		n, err := processes.Status(os.Getpid(), name)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	if now, most := number("VmRSS"), number("VmHWM"); now < 1 || now > 10_000 || most < now/2 {
		t.Errorf("%v MB now, %v MB at most", now, most)
	}
	if n := number("Pid"); int(n) != os.Getpid() {
		t.Errorf("Pid is %v", n)
	}
	for _, name := range []string{"VmNone", "Name"} {
		if n, err := processes.Status(os.Getpid(), name); err == nil {
			t.Errorf("%s is %v", name, n)
		}
	}
	if _, err := processes.Status(1<<30, "VmRSS"); err == nil {
		t.Error("a process that cannot be has a size")
	}
}
