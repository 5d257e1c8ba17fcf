package procfs

import (
	"errors"
	"testing"
)

func TestParse(t *testing.T) {
	p, err := parse(7, []byte("7 (a) b (c) Z 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 1900 20 21\n"))
	if want := (Process{PID: 7, Parent: 1, Group: 2, Session: 3, Dead: true, Start: 1900}); err != nil || p != want {
		t.Errorf("got %+v, %v, want %+v", p, err, want)
	}
	for _, line := range []string{"7 (a) S", "", "7 (a) S x 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21"} {
		if _, err := parse(7, []byte(line)); !errors.Is(err, ErrOdd) {
			t.Errorf("%q: got %v", line, err)
		}
	}
}
