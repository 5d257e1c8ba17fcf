package testenv_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// make retest runs failed tests once more. What failed otherwise has to stay a failure.
func TestRetestFailsUnlessTestsFailed(t *testing.T) {
	const (
		start   = `{"Time":"2026-01-01T00:00:00Z","Action":"start","Package":"p"}`
		runA    = `{"Action":"run","Package":"p","Test":"TestA"}`
		passedA = `{"Action":"pass","Package":"p","Test":"TestA","Elapsed":0}`
		failedA = `{"Action":"fail","Package":"p","Test":"TestA","Elapsed":0}`
		pass    = `{"Action":"output","Package":"p","Output":"PASS\n"}`
		fail    = `{"Action":"output","Package":"p","Output":"FAIL\n"}`
		line    = `{"Action":"output","Package":"p","Output":"FAIL\tp\t0.1s\n"}`
		quote   = `{"Action":"output","Package":"p","Test":"TestA","Output":"FAIL\n"}`
		passed  = `{"Action":"pass","Package":"p","Elapsed":0.1}`
		failed  = `{"Action":"fail","Package":"p","Elapsed":0.1}`
		quiet   = `{"Action":"output","Package":"p","Test":"TestA","Output":"    all is well\n"}`
		panics  = `{"Action":"output","Package":"p","Test":"TestA","Output":"panic: \"it\" broke\n"}`
	)
	for name, c := range map[string]struct {
		events []string
		fails  bool
	}{
		"a package that passes":                            {[]string{start, runA, passedA, pass, passed}, false},
		"a test that passes the second time":               {[]string{start, runA, failedA, fail, line, failed, start, runA, passedA, pass, passed}, false},
		"a TestMain that fails":                            {[]string{start, runA, passedA, pass, line, failed, start, pass, passed}, true},
		"an end in the middle of a test":                   {[]string{start, runA, quote, line, failed, start, runA, passedA, pass, passed}, true},
		"a panic":                                          {[]string{start, runA, quiet, panics, quiet, line, failed, start, runA, passedA, pass, passed}, true},
		"an end after a failed test":                       {[]string{start, runA, failedA, line, failed, start, runA, passedA, pass, passed}, true},
		"a TestMain that fails after a test was run again": {[]string{start, runA, failedA, fail, line, failed, start, runA, passedA, pass, line, failed}, true},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "retest.json")
			if err := os.WriteFile(file, []byte(strings.Join(c.events, "\n")+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			cmd := exec.Command("../../scripts/retest-check.sh")
			cmd.Env = append(os.Environ(), "GOTESTSUM_JSONFILE="+file)
			out, err := cmd.CombinedOutput()
			if exit, ok := err.(*exec.ExitError); err != nil && (!ok || exit.ExitCode() != 1) {
				t.Fatalf("%v: %s", err, out)
			}
			if (err != nil) != c.fails || strings.Contains(string(out), "p failed") != c.fails {
				t.Errorf("%v: %s", err, out)
			}
			if panicked := slices.Contains(c.events, panics); strings.Contains(string(out), "before that:\npanic: \"it\" broke\n") != panicked {
				t.Errorf("a panic is to be printed, and nothing from before it: %s", out)
			}
		})
	}
}
