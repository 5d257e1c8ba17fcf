package store

import (
	"testing"

	"onejob/tasks"
)

// TestFitting splits what would not fit into one statement.
func TestFitting(t *testing.T) {
	of := func(sizes ...int) (list []*completion) {
		for _, n := range sizes {
			list = append(list, &completion{Completion: tasks.Completion{Result: make([]byte, n/2), Output: string(make([]byte, n-n/2))}})
		}
		return list
	}
	for _, test := range []struct {
		sizes []int
		want  int
	}{
		{[]int{0}, 1},
		{[]int{0, 0, 0}, 3},
		{[]int{maxCompletionBytes + 1}, 1},
		{[]int{maxCompletionBytes, 0}, 2},
		{[]int{maxCompletionBytes, 1, 0}, 1},
		{[]int{1, maxCompletionBytes, 0}, 1},
		{[]int{maxCompletionBytes / 2, maxCompletionBytes / 2, 2}, 2},
	} {
		if got := fitting(of(test.sizes...), (*completion).size, maxCompletionBytes); got != test.want {
			t.Errorf("of results of %d bytes: %d go into one statement, want %d", test.sizes, got, test.want)
		}
	}
}
