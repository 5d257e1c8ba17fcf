package testenv

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// sharedBinary is the onejob command, for tests that want replicas as processes.
var sharedBinary = &shared[binary]{start: func() (binary, error) {
	dir, err := os.MkdirTemp("", "testenv-binary-")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "onejob")
	if out, err := exec.Command("go", "build", "-pgo=off", "-o", path, "onejob/cmd/onejob").CombinedOutput(); err != nil {
		return "", fmt.Errorf("build onejob: %w\n%s", err, out)
	}
	return binary(path), nil
}}

type binary string

func (b binary) Close() error { return os.RemoveAll(filepath.Dir(string(b))) }

// Binary returns the path of the onejob command, built for this test binary
// without the race detector and without profile-guided optimization, and removed with it.
func Binary(t testing.TB) string {
	t.Helper()
	return string(sharedBinary.get(t))
}
