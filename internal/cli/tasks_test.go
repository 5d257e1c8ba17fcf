package cli

import (
	"bytes"
	"strings"
	"testing"

	"onejob/store"
)

// Between attempts, show says where somebody retried the task, and nowhere else.
func TestShowSaysWhereAttemptsCountAnew(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		attempts []store.AttemptRow
		want     int // in front of this attempt, counted from 0; zero: nowhere
	}{
		{[]store.AttemptRow{{Attempt: 1, Outcome: "failed"}, {Attempt: 2, Outcome: "failed"}, {Attempt: 1, Outcome: "succeeded"}}, 2},
		{[]store.AttemptRow{{Attempt: 1, Outcome: "succeeded"}, {Attempt: 1, Outcome: "failed"}}, 1},
		{[]store.AttemptRow{{Attempt: 1, Outcome: "cancelled"}, {Attempt: 1, Outcome: "failed"}, {Attempt: 2, Outcome: "failed"}}, 1},
		{[]store.AttemptRow{{Attempt: 1, Outcome: "shutdown"}, {Attempt: 1, Outcome: "lease_lost"}, {Attempt: 1, Outcome: "failed"}, {Attempt: 1, Outcome: "crashed"}, {Attempt: 2, Outcome: "timeout"}, {Attempt: 3, Outcome: "refused"}}, 0},
	} {
		var out bytes.Buffer
		if err := showTask(&out, store.Row{}, "", test.attempts, "onejob"); err != nil {
			t.Fatal(err)
		}
		parts := strings.Split(out.String(), "\nattempt ")
		for i, part := range parts[:len(parts)-1] {
			if said := strings.Contains(part, "count from 1 again"); said != (i == test.want && i > 0) {
				t.Errorf("of %+v: before attempt %d it is said: %v", test.attempts, i, said)
			}
		}
	}
}
