// Package model_test holds the model to the product's times.
package model_test

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"onejob/internal/guard"
	"onejob/lock"
	"onejob/lock/consul"
)

// defined returns a time of the model.
func defined(t *testing.T, model, name string) time.Duration {
	t.Helper()
	m := regexp.MustCompile(`(?m)^#define `+name+`\s+\((\d+)/TICK\)`).FindAllStringSubmatch(model, -1)
	if len(m) == 0 {
		t.Fatalf("onejob.pml does not define %s", name)
	}
	ms, err := strconv.Atoi(m[len(m)-1][1]) // the last one is the product's, after those of switched-off protections
	if err != nil {
		t.Fatal(err)
	}
	return time.Duration(ms) * time.Millisecond
}

// written returns a time that a source file defines and does not export.
func written(t *testing.T, file, name string) time.Duration {
	t.Helper()
	source, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`\b` + name + `\s*=\s*(\d+)? ?\*? ?time\.(Second|Millisecond)`).FindSubmatch(source)
	if m == nil {
		t.Fatalf("%s does not define %s", file, name)
	}
	n, unit := 1, time.Second
	if len(m[1]) > 0 {
		if n, err = strconv.Atoi(string(m[1])); err != nil {
			t.Fatal(err)
		}
	}
	if string(m[2]) == "Millisecond" {
		unit = time.Millisecond
	}
	return time.Duration(n) * unit
}

func TestModelHasTheTimesOfTheCode(t *testing.T) {
	text, err := os.ReadFile("onejob.pml")
	if err != nil {
		t.Fatal(err)
	}
	model := string(text)
	c := consul.Config{}.WithDefaults()
	check := lock.Timing{TTL: c.CheckTTL, Heartbeat: c.Heartbeat, Margin: c.Margin}
	for name, want := range map[string]time.Duration{
		"CHECK_TTL":     c.CheckTTL,
		"HEARTBEAT":     c.Heartbeat,
		"RENEW":         c.Renew,
		"VERIFY":        c.Verify,
		"MARGIN":        c.Margin,
		"LOCK_DELAY":    c.LockDelay,
		"SILENCE":       lock.Silence,
		"LAPSE":         written(t, "../internal/guard/guard.go", "lapse"),
		"BEAT_TIMEOUT":  written(t, "../store/replicas.go", "beatTimeout"),
		"CHECK_TIMEOUT": max(c.Heartbeat, check.Slack()/2),
	} {
		if got := defined(t, model, name); got != want {
			t.Errorf("%s is %v in the model and %v in the code", name, got, want)
		}
	}
	if c.CheckTTL < c.LockDelay {
		t.Error("the model's TAKEOVER_WAIT is CHECK_TTL, which is not the greater one any more")
	}
	if lapse := written(t, "../internal/guard/guard.go", "lapse"); guard.MinMargin-lapse != 100*time.Millisecond {
		t.Errorf("guard.MinMargin is %v, not the lapse and 100 ms", guard.MinMargin)
	}
	if tick := fmt.Sprintf("#define TICK %d ", written(t, "../internal/guard/guard.go", "lapse").Milliseconds()); !regexp.MustCompile(`(?m)^` + tick).MatchString(model) {
		t.Errorf("the model's tick is not the shortest time, the guard's lapse: no line begins with %q", tick)
	}
}

func TestEverySingleFaultHasAResult(t *testing.T) {
	model, err := os.ReadFile("onejob.pml")
	if err != nil {
		t.Fatal(err)
	}
	expected, err := os.ReadFile("expected.txt")
	if err != nil {
		t.Fatal(err)
	}
	faults := []string{"none"}
	for _, m := range regexp.MustCompile(`(?m)^#define F_([A-Z_]+) `).FindAllStringSubmatch(string(model), -1) {
		faults = append(faults, strings.ReplaceAll(strings.ToLower(m[1]), "_", "-"))
	}
	if len(faults) < 10 {
		t.Fatalf("found only these faults: %q", faults)
	}
	for _, fault := range faults {
		for _, check := range []string{"exclusion", "fences"} {
			if run := fault + " " + check; !strings.Contains("\n"+string(expected), "\n"+run+"\t") {
				t.Errorf("expected.txt has no result of %q", run)
			}
		}
	}
}
