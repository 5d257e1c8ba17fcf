package worker

import (
	"fmt"
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
		room   int
		scarce bool
		want   string
	}{
		{8, false, "[noop sql] 30"},
		{0, false, "[noop sql] 30"},
		{0, true, "[noop] 30"},
		{3, true, "[noop sql] 3"},
		{99, true, "[noop sql] 30"},
	} {
		sql.room, sql.scarce = test.room, test.scarce
		if kinds, n := s.ready(30); fmt.Sprint(kinds, n) != test.want {
			t.Errorf("room for %d, scarce %v: %v %d, want %s", test.room, test.scarce, kinds, n, test.want)
		}
	}
}
