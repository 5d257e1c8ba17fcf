package worker

import (
	"testing"
	"time"
)

func TestRetryDelayDoubles(t *testing.T) {
	w := Worker{cfg: Config{RetryBase: time.Second, RetryMax: time.Minute}}
	for attempt, full := range map[int]time.Duration{
		1: time.Second, 2: 2 * time.Second, 3: 4 * time.Second, 6: 32 * time.Second,
		7: time.Minute, 40: time.Minute, 64: time.Minute, 1000: time.Minute, // where it would not fit into a Duration, too
	} {
		var least, most time.Duration = full, 0
		for range 1000 {
			d := w.retryDelay(attempt)
			least, most = min(least, d), max(most, d)
		}
		if least < full-full/5 || most > full {
			t.Errorf("after attempt %d the delay is between %v and %v, want %v shortened by up to a fifth", attempt, least, most, full)
		}
		if most-least < full/10 {
			t.Errorf("after attempt %d it is always between %v and %v: tasks that failed together return together", attempt, least, most)
		}
	}
}
