package worker

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"onejob/tasks"
)

// roomy is a kind with room for so many tasks.
type roomy struct {
	tasks.Noop
	room   int
	scarce bool
}

func (r *roomy) Room() (int, bool) { return r.room, r.scarce }

// A replica claims no more tasks of a kind than can begin, if that has kept some waiting.
func TestKindsHaveRoom(t *testing.T) {
	t.Parallel()
	sql := &roomy{}
	s := newServing(tasks.Kinds{"noop": tasks.Noop{}, "sql": sql, "limited": sql}, nil, map[string]string{"limited": "l"})
	for _, test := range []struct {
		room        int
		scarce      bool
		want, under string
	}{
		{8, false, "[noop sql] 30", "[named by-kind]"},
		{0, false, "[noop sql] 30", "[named by-kind]"},
		{0, true, "[noop] 30", "[named]"},
		{3, true, "[noop sql] 3", "[named by-kind]"},
		{99, true, "[noop sql] 30", "[named by-kind]"},
	} {
		sql.room, sql.scarce = test.room, test.scarce
		if kinds, n := s.ready(s.none, 30); fmt.Sprint(kinds, n) != test.want {
			t.Errorf("room for %d, scarce %v: %v %d, want %s", test.room, test.scarce, kinds, n, test.want)
		}
		var under []string
		l := &limits{config: func() *serving { return s }, claim: func(_ context.Context, _ string, c tasks.Claim) (*tasks.Task, bool) {
			if slices.Contains(c.Kinds, "sql") != (test.room > 0 || !test.scarce) && c.Limit != "" {
				t.Errorf("room for %d, scarce %v: rows that name a limit are claimed of %v", test.room, test.scarce, c.Kinds)
			}
			under = append(under, map[bool]string{true: "named", false: "by-kind"}[c.Limit != ""])
			return nil, false
		}}
		if l.claimUnder(t.Context(), "l"); fmt.Sprint(under) != test.under {
			t.Errorf("room for %d, scarce %v: under a limit %v are claimed, want %s", test.room, test.scarce, under, test.under)
		}
	}
}
