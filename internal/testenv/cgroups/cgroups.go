// Package cgroups decides whether a test that needs cgroups of version 2 is run. It is
// apart from testenv because it must not make the guards of those tests larger.
package cgroups

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Need skips a test where no cgroup can be made, and says why. unavailable is why the
// code under test gives commands no cgroup, nil if it does. If cgroups can be made all
// the same, that is a defect, and the test fails. With TEST_CGROUPS=1 in the environment
// it fails in any case, for machines that are known to have cgroups.
func Need(t testing.TB, unavailable error) {
	t.Helper()
	if unavailable == nil {
		return
	}
	impossible := try()
	switch {
	case impossible == nil:
		t.Fatalf("a cgroup can be made here, but commands get none: %v", unavailable)
	case os.Getenv("TEST_CGROUPS") == "1":
		t.Fatalf("TEST_CGROUPS=1, but commands get no cgroup: %v (the test: %v)", unavailable, impossible)
	default:
		t.Skipf("this needs a writable cgroup v2 hierarchy: %v", unavailable)
	}
}

// try makes a cgroup below the test's own, starts nothing in it, and removes it. It
// returns why that is not possible. It looks only at the usual places, and shares no
// code with the package under test.
func try() error {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(text)) {
		own, unified := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::")
		if !unified {
			continue
		}
		var errs []error
		for _, mount := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
			err := tryIn(filepath.Join(mount, own))
			if err == nil {
				return nil
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	}
	return errors.New("this process is in no cgroup of version 2")
}

func tryIn(own string) error {
	procs, err := os.OpenFile(filepath.Join(own, "cgroup.procs"), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer procs.Close()
	dir, err := os.MkdirTemp(own, "onejob-test-")
	if err != nil {
		return err
	}
	defer os.Remove(dir)
	kind, err := os.ReadFile(filepath.Join(dir, "cgroup.type"))
	if err != nil {
		return err
	}
	if kind := strings.TrimSpace(string(kind)); kind != "domain" {
		return fmt.Errorf("a cgroup below %s is of type %q, which holds no processes", own, kind)
	}
	return nil
}
