package store

import (
	"testing"

	"onejob/tasks"
)

// TestFitting splits what would not fit into one statement.
func TestFitting(t *testing.T) {
	of := func(sizes ...int) (list []*ending) {
		for _, n := range sizes {
			list = append(list, &ending{Ending: tasks.Ending{Result: make([]byte, n/2), Output: string(make([]byte, n-n/2))}})
		}
		return list
	}
	for _, test := range []struct {
		sizes []int
		want  int
	}{
		{[]int{0}, 1},
		{[]int{0, 0, 0}, 3},
		{[]int{maxEndingBytes + 1}, 1},
		{[]int{maxEndingBytes, 0}, 2},
		{[]int{maxEndingBytes, 1, 0}, 1},
		{[]int{1, maxEndingBytes, 0}, 1},
		{[]int{maxEndingBytes / 2, maxEndingBytes / 2, 2}, 2},
	} {
		if got := fitting(of(test.sizes...)); got != test.want {
			t.Errorf("of results of %d bytes: %d go into one statement, want %d", test.sizes, got, test.want)
		}
	}
}
