package store

import (
	"fmt"
	"testing"

	"onejob/tasks"
)

// How many rows a statement of retention deletes comes down when it takes too long, and goes
// up again from there.
func TestSizeOfRetention(t *testing.T) {
	t.Parallel()
	var k kept
	const s = tasks.StatusFailed
	var got []int
	look := func() { got = append(got, k.most(s, 1000)) }
	k.grow(s, 8)
	look()
	k.shrink(s, 4)
	look()
	k.grow(s, 8)
	look()
	k.grow(s, 2)
	look()
	k.grow(s, 4000)
	look()
	if want := "[1000 4 8 8 1000]"; fmt.Sprint(got) != want {
		t.Errorf("%v, want %s", got, want)
	}
	if n := k.most(tasks.StatusSucceeded, 1000); n != 1000 {
		t.Errorf("%d of another status", n)
	}
}
