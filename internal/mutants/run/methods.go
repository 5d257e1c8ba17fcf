package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"onejob/internal/mutants"
	"onejob/internal/procfs"
)

// test runs tests until one fails: the one that must, or all whose packages contain what is
// broken. A test that fails without the mutant as well catches nothing.
func (s *result) test(ctx context.Context, m mutants.Mutant, overlay string, whole bool) error {
	if m.Test != "" {
		if err := s.named(ctx, overlay, m.Test, fails); s.Caught || err != nil || !whole {
			return err
		}
	}
	packages, err := dependents(ctx, m.Packages())
	if err != nil {
		return err
	}
	failed, err := firstFailure(ctx, overlay, packages)
	if failed == "" || err != nil {
		return err
	}
	return s.confirm(ctx, failed, fails)
}

// runTest runs one test, and reports whether it fails.
type runTest func(ctx context.Context, overlay, name string) (failed bool, err error)

// named lets one test look at the mutant.
func (s *result) named(ctx context.Context, overlay, name string, run runTest) error {
	failed, err := run(ctx, overlay, name)
	if err != nil {
		return err
	}
	if !failed {
		s.Caught, s.How = false, name
		return nil
	}
	return s.confirm(ctx, name, run)
}

// confirm runs a test that has failed once without the mutant. If it fails then as well, for want of
// time or of a server, the mutant is not caught.
func (s *result) confirm(ctx context.Context, name string, run runTest) error {
	failed, err := run(ctx, "", name)
	if err != nil {
		return err
	}
	s.Caught, s.How = !failed, name
	if failed {
		s.How += " fails without it, too"
	}
	return nil
}

// fails is a runTest.
func fails(ctx context.Context, overlay, name string) (bool, error) {
	pkg, test := mutants.TestOf(name)
	out, err := command(ctx, overlay, "go", "test", "-count=1", "-pgo=off", "-timeout=10m", "-run", "^"+test+"$", pkg).CombinedOutput()
	exit := (*exec.ExitError)(nil)
	if ctx.Err() != nil || err != nil && !errors.As(err, &exit) || strings.Contains(string(out), "[build failed]") || strings.Contains(string(out), "no tests to run") {
		return false, fmt.Errorf("the test did not run: %w\n%s", cmp.Or(err, errors.New("there is none")), out)
	}
	return err != nil, nil
}

// adopt makes this program the parent of what the builds leave behind: a guard that stops nothing
// goes on after the test that started it.
func adopt() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become a child subreaper: %w", err)
	}
	return nil
}

// killLeftovers kills all that a look at a mutant has left behind.
func killLeftovers() {
	for left := procfs.Children(os.Getpid()); len(left) > 0; left = procfs.Children(os.Getpid()) {
		for _, pid := range left { // what they have started comes to us
			_ = unix.Kill(pid, unix.SIGKILL)
			_, _ = unix.Wait4(pid, nil, 0, nil)
		}
	}
}

// dependents returns the packages whose tests contain one of these, themselves first. The
// harnesses that look at the whole are not among them.
func dependents(ctx context.Context, of []string) ([]string, error) {
	out, err := command(ctx, "", "go", "list", "-test", "-f", "{{.ForTest}} {{.Deps}}", "./...").Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	var all []string
	for line := range strings.Lines(string(out)) {
		pkg, deps, _ := strings.Cut(line, " ")
		if pkg == "" || strings.Contains(pkg, "/chaos") || strings.Contains(pkg, "/simulate") || slices.Contains(of, pkg) || slices.Contains(all, pkg) {
			continue
		}
		if slices.ContainsFunc(strings.Fields(strings.Trim(deps, "[]\n")), func(d string) bool { return slices.Contains(of, d) }) {
			all = append(all, pkg)
		}
	}
	return append(slices.Clone(of), all...), nil
}

// firstFailure runs the tests of packages, one package after the other, and returns the name
// of the first test that fails; none if empty.
func firstFailure(ctx context.Context, overlay string, packages []string) (failed string, err error) {
	ctx, stop := context.WithTimeout(ctx, 30*time.Minute)
	defer stop()
	cmd := command(ctx, overlay, "go", append([]string{"test", "-json", "-count=1", "-pgo=off", "-p=1", "-timeout=20m"}, packages...)...)
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", err
	}
	if err := cmd.Start(); err != nil {
		return "", err
	}
	for lines := bufio.NewReader(out); ; {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			break
		}
		var event struct{ Action, Package, Test, ImportPath string }
		if json.Unmarshal(line, &event) != nil {
			continue
		}
		if event.Action == "build-fail" {
			stop()
			_ = cmd.Wait()
			return "", fmt.Errorf("%s does not compile", event.ImportPath)
		}
		if event.Action == "fail" && event.Test != "" {
			test, _, _ := strings.Cut(event.Test, "/")
			failed = strings.TrimPrefix(event.Package, "onejob/") + "." + test
			break
		}
	}
	stop()
	_ = cmd.Wait() // it was told to end, or what failed has no name
	return failed, nil
}

var caught = regexp.MustCompile(`seed (\d+): (.*)|panic: (.*)`)

// simulate goes through schedules for a minute on each processor.
func (s *result) simulate(ctx context.Context) error {
	cmd := command(ctx, "", "go", "run", "./simulate/run", "-mutants", "-only", s.Mutant, "-duration", "1m", "-seed", strconv.Itoa((s.Seed-1)*1_000_000+1))
	out, err := cmd.CombinedOutput()
	if exit := (*exec.ExitError)(nil); ctx.Err() != nil || err != nil && !errors.As(err, &exit) {
		return fmt.Errorf("%w\n%s", err, out)
	}
	found := caught.FindSubmatch(out)
	switch {
	case found != nil:
		s.Caught, s.How = true, string(found[0])
	case !strings.Contains(string(out), "NOT CAUGHT"):
		return fmt.Errorf("%w\n%s", cmp.Or(err, errors.New("it says nothing")), out)
	}
	return nil
}

// How a run of chaos exits that worked.
const (
	violated     = 1
	inconclusive = 3
)

// chaos lets a run with the mutant's faults judge it, or one with faults of all sorts. What is lost for
// want of time does not count.
func (s *result) chaos(ctx context.Context, m mutants.Mutant, overlay, folder string) error {
	binary, path := filepath.Join(folder, "chaos"), filepath.Join(folder, "report.json")
	if out, err := command(ctx, overlay, "go", "build", "-o", binary, "onejob/chaos").CombinedOutput(); err != nil {
		return fmt.Errorf("build: %w\n%s", err, out)
	}
	faults, duration := cmp.Or(m.Faults, "freeze,cut-consul,cut-both,kill,session-unheard,key-delete,row-reset"), "60s"
	if faults == "none" { // there is nothing to wait for
		duration = "30s"
	}
	cmd := command(ctx, overlay, binary)
	cmd.Env = append(cmd.Env, "DURATION="+duration, "DRAIN=30s", "SEED="+strconv.Itoa(s.Seed), "FAULTS="+faults, "KEEP=0", "REPORT="+path)
	out, err := cmd.CombinedOutput()
	if exit, ok := errors.AsType[*exec.ExitError](err); ctx.Err() != nil || err != nil && (!ok || exit.ExitCode() != violated && exit.ExitCode() != inconclusive) {
		return fmt.Errorf("the run did not work: %w\n%s", err, out)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var report map[string]any
	if err := json.Unmarshal(text, &report); err != nil {
		return err
	}
	for _, number := range m.Found {
		found, ok := report[number]
		if !ok {
			return fmt.Errorf("the report has no %s", number)
		}
		n, _ := found.(float64)
		if list, ok := found.([]any); ok { // of leaks
			n = float64(len(list))
		}
		if n > 0 && !s.Caught {
			s.Caught, s.How = true, fmt.Sprintf("%s: %.0f", number, n)
		}
	}
	if s.Caught {
		return nil
	}
	violations, _ := report["violations"].([]any)
	for _, v := range violations {
		if text, _ := v.(string); !strings.HasPrefix(text, "lost") {
			s.Caught = s.Caught || len(m.Found) == 0
			s.How = text
			break
		}
	}
	return nil
}
