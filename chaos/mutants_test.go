//go:build mutants

package main

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A checker that cannot fail is worth nothing. Each mutant of onejob lacks one of
// its protections; a short run with the fault that the protection is there for
// must find it guilty, and of the right thing. "make mutants" runs this.
func TestMutantsAreCaught(t *testing.T) {
	for name, m := range map[string]struct {
		mutant string
		faults string
		found  []string // numbers of the report, one of which is above zero
	}{
		"the fence in the status write":                  {"fence", "freeze", []string{"stale_accepted", "double_success"}},
		"self-fencing":                                   {"selffencing", "cut-both", []string{"overlaps"}},
		"the guard":                                      {"guard", "kill,freeze", []string{"overlaps"}},
		"the second witness of a death":                  {"witness", "session-unheard", []string{"overlaps", "limit_excesses"}},
		"the end of a dead replica's statement":          {"statement", "worker-kill", []string{"double_statements"}},
		"the cluster's id in Consul":                     {"identity", "wrong-consul", []string{"limit_excesses", "overlaps"}},
		"that nothing is left of a process that is dead": {"burial", "worker-kill", []string{"overlaps"}},
		"the unique index":                               {"index", "none", []string{"double_running"}},
		"what was due before an edit":                    {"edits", "schedule-edit", []string{"occurrences_missing"}},
		"the list of keys that are held by this process": {"list", "row-reset", []string{"overlaps"}},
		"that a command is killed in time":               {"lapse", "freeze,cut-consul", []string{"late_ends"}},
		"that a lease has a deadline":                    {"selffencing", "cut-both", []string{"late_ends"}},
		"that onejob lock has the same lock keys":        {"lockkey", "outsider-cut", []string{"overlaps"}},

		// They do less than they should, or other things, and never two things at once.
		"that due times make tasks":            {"schedules", "none", []string{"occurrences_missing"}},
		"that a task waits until it is due":    {"runat", "none", []string{"illegal_steps"}},
		"that a failed attempt is tried again": {"retries", "none", []string{"illegal_steps"}},
		"that a lost lease is no failure":      {"lost", "session-destroy", []string{"illegal_steps"}},
		"that a cancel ends a running task":    {"cancels", "none", []string{"overstays"}},
		"that a timeout ends an attempt":       {"timeouts", "none", []string{"unexpected_ends", "overstays"}},
		"that a takeover comes in time":        {"late", "kill", []string{"late_takeovers"}},
		"that the delay of retries doubles":    {"doubling", "none", []string{"illegal_steps"}},
	} {
		t.Run(name, func(t *testing.T) {
			duration := "60s"
			if m.faults == "none" { // there is nothing to wait for
				duration = "30s"
			}
			r, violated := judged(t, m.mutant, m.faults, duration, "30s")
			if !violated {
				t.Errorf("the mutant is not caught: %v", r)
			}
			// Tasks that are lost for want of time do not count.
			sum := 0.0
			for _, number := range m.found {
				n, ok := r[number].(float64)
				if !ok {
					t.Fatalf("the report has no %s", number)
				}
				sum += n
			}
			if sum == 0 {
				t.Errorf("none of %v was found, but %v", m.found, r["violations"])
			}
			for _, v := range r["violations"].([]any) {
				if !strings.HasPrefix(v.(string), "lost") {
					t.Logf("caught: %v", v)
					break
				}
			}
		})
	}
}

// Protections whose fault cannot be had under load, or needs a server to be promoted, have
// a test of their own. It must fail for the mutant.
func TestMutantsFailTheirTest(t *testing.T) {
	for name, m := range map[string]struct{ mutant, pkg, test string }{
		"fences begin above those of another server":         {"fences", "onejob/worker", "TestFencesRiseThroughARestore"},
		"locks are had under the record of the database":     {"record", "onejob/lock/consul", "TestLocksNeedTheRecord"},
		"silence counts on the replica's own server only":    {"silence", "onejob/worker", "TestSilenceBesideASplitBrainIsNoDeath"},
		"a reused name is another task's only if it says so": {"names", "onejob/lock/consul", "TestNoTaskIsHeldTwice"},
		"what has not begun is not charged":                  {"begun", "onejob/store", "TestOnlyTheLikelyCauseIsQuarantined"},
		"a task that stalls replicas is charged":             {"stalls", "onejob/worker", "TestStallsAreHeldAgainstTheTask"},
		"a claim that has begun is finished":                 {"claims", "onejob/worker", "TestStopsLoseNoClaim"},
		"deaths of several at once are not charged":          {"others", "onejob/store", "TestWhoIsToBlame"},
		"a stop without Postgres shows in Consul":            {"stopped", "onejob/worker", "TestStopWithoutPostgres"},
		"a wrong verdict is taken back":                      {"verdict", "onejob/lock/consul", "TestWrongDeathIsTakenBack"},
		"a signal waits until the process can deal with it":  {"early", "onejob/internal/supervisor", "TestSignalAtTheStart"},
		"claims pause while locks cannot be had":             {"lock-gate", "onejob/worker", "TestFencesAreNotUsedUpWhileLocksFail"},
		"leases end when the machine was paused":             {"pause", "onejob/lock/consul", "TestPause"},
		"a slot stays shut while its holder's command dies":  {"delay", "onejob/lock/rabbitmq", "TestNeverBesideADyingCommand"},
		"what was written ahead of the clock is repaired":    {"setback", "onejob/worker", "TestPostgresClockIsSet"},
		"replicas find the successor of an old primary":      {"successor", "onejob/worker", "TestSplitBrain"},
		"a cgroup is killed as a whole":                      {"cgroup", "onejob/internal/guard", "TestSwarmIsDeadBeforeWaitReturns"},
		"a requeue needs the fence":                          {"returns", "onejob/store", "TestRequeue"},
		"the delay of retries doubles":                       {"doubling", "onejob/worker", "TestRetryDelayDoubles"},
	} {
		t.Run(name, func(t *testing.T) {
			run := func(mutant string) error {
				cmd := exec.CommandContext(t.Context(), "go", "test", "-count", "1", "-timeout", "10m", "-run", "^"+m.test+"$", m.pkg)
				// The test builds programs of its own, with the same flags.
				cmd.Env = append(os.Environ(), "GOFLAGS=-tags=mutants -ldflags=-X=onejob/internal/mutant.name="+mutant)
				out, err := cmd.CombinedOutput()
				if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) || strings.Contains(string(out), "[build failed]") || strings.Contains(string(out), "no tests to run") {
					t.Fatalf("the test did not run: %v\n%s", err, out)
				}
				return err
			}
			if err := run(""); err != nil {
				t.Errorf("%s fails without the mutant, too", m.test)
			}
			if run(m.mutant) == nil {
				t.Errorf("%s passes", m.test)
			}
		})
	}
}

// The same faults do no harm to what is not a mutant.
func TestNoMutantIsNotGuilty(t *testing.T) {
	if r, violated := judged(t, "", "freeze,cut-consul,kill,session-unheard,row-reset", "60s", "3m"); violated {
		t.Errorf("found guilty: %v", r["violations"])
	}
}

// checked builds this program, and with it onejob, as a mutant, lets it run, and
// returns its report.
func judged(t *testing.T, mutant, faults, duration, drain string) (report map[string]any, violated bool) {
	t.Helper()
	dir := t.TempDir()
	binary, path := filepath.Join(dir, "chaos"), filepath.Join(dir, "report.json")
	if out, err := exec.Command("go", "build", "-tags", "mutants", "-ldflags", "-X onejob/internal/mutant.name="+mutant, "-o", binary, "onejob/chaos").CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 6*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, binary)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // it cleans up
	cmd.WaitDelay = time.Minute
	cmd.Env = append(os.Environ(), "DURATION="+duration, "DRAIN="+drain, "SEED=1", "FAULTS="+faults, "KEEP=0", "REPORT="+path)
	out, err := cmd.CombinedOutput()
	if exit, ok := errors.AsType[*exec.ExitError](err); err != nil && (!ok || exit.ExitCode() != 1) {
		t.Fatalf("the run did not work: %v\n%s", err, out)
	}
	b, readErr := os.ReadFile(path)
	if readErr != nil {
		t.Fatalf("%v\n%s", readErr, out)
	}
	if err := json.Unmarshal(b, &report); err != nil {
		t.Fatal(err)
	}
	return report, err != nil
}
