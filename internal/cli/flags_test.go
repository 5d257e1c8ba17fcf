package cli

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// A text flag that is given as "" is a usage error, before anything is done. Each line gets the
// flag FLAG "".
func TestEmptyFlagsAreRefused(t *testing.T) {
	t.Parallel()
	filter := []string{"kind", "queue", "command", "error", "schedule", "limit-name", "lock-key", "since", "until"}
	for line, flags := range map[string][]string{
		"tasks delete --status failed --yes": filter,
		"tasks cancel --yes":                 filter,
		"tasks retry --kind noop --yes":      filter,
		"tasks list":                         {"kind", "queue"},
		"enqueue noop":                       {"queue", "lock-key", "limit", "unique-key", "run-at", "payload"},
		"queues pause mail":                  {"until", "reason"},
		"schedules pause nightly":            {"until", "reason"},
		"schedules preview nightly":          {"from"},
		"schedules preview":                  {"cron"},
		"schedules backfill nightly":         {"from", "to"},
		"lock":                               {"prefix", "liveness"},
	} {
		for _, flag := range flags {
			args := append(strings.Fields(line), "--"+flag, "")
			if line == "lock" { // flags come before the key
				args = append(args, "key", "--", "true")
			}
			var stdout, stderr bytes.Buffer
			code := run(t.Context(), Program{}, args, nil, &stdout, &stderr)
			words := strings.Fields(line)
			command := strings.Join(words[:min(len(words), 2)], " ")
			if words[0] == "enqueue" {
				command = words[0]
			}
			want := fmt.Sprintf("onejob: --%s: the value is empty; give one, or leave the flag out; see onejob %s --help\n", flag, command)
			if code != exitUsage || stderr.String() != want || stdout.Len() > 0 {
				t.Errorf("%q: %d, %q %q; want %q", args, code, stdout.String(), stderr.String(), want)
			}
		}
	}
}

// Every other text flag is refused as "", in every command.
func TestFlagsThatMayBeEmpty(t *testing.T) {
	t.Parallel()
	var may []string
	for _, c := range descendants(NewRoot(Program{})) {
		if c.PersistentPreRun != nil || c.PersistentPreRunE != nil {
			t.Errorf("%s: cobra does not run the PersistentPreRunE of the root, which refuses empty flags", c.CommandPath())
		}
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if f.Value.Type() != "string" || c.Flags().Set(f.Name, "") != nil { // one of a few words
				return
			}
			var refused *exitError
			switch err := refuseEmpty(c); {
			case err == nil && f.Name == "config":
				may = append(may, f.Name)
			case err == nil:
				may = append(may, c.Name()+" "+f.Name)
			case !errors.As(err, &refused) || refused.code != exitUsage:
				t.Errorf("%s --%s: %v", c.CommandPath(), f.Name, err)
			}
			if err := c.Flags().Set(f.Name, "x"); err != nil {
				t.Fatal(err)
			}
		})
	}
	slices.Sort(may)
	if may = slices.Compact(may); !slices.Equal(may, []string{"config", "enqueue traceparent", "roles prefix"}) {
		t.Errorf("flags that may be empty: %v", may)
	}
}
