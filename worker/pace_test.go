package worker

import (
	"testing"
	"time"
)

func TestPace(t *testing.T) {
	var p pace
	for i, test := range []struct{ took, want time.Duration }{
		{time.Millisecond, 5 * time.Second},
		{100 * time.Millisecond, 20 * time.Second},
		{2 * time.Second, 40 * time.Second}, // once: it may have been the machine
		{2 * time.Second, 800 * time.Second},
		{time.Second, 400 * time.Second},
		{time.Millisecond, 5 * time.Second},
		{time.Second, 30 * time.Second},
		{200 * time.Millisecond, 30 * time.Second},
	} {
		if got := p.rest(5*time.Second, test.took); got != test.want {
			t.Errorf("look %d, which took %v: it rests %v, want %v", i, test.took, got, test.want)
		}
	}
}
