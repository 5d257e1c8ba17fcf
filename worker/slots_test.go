package worker

import (
	"testing"
	"testing/synctest"
	"time"
)

// Pauses grow, and end with news, but never before leastPause.
func TestPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &limits{pauses: map[string]time.Duration{}, stirred: make(chan struct{})}
		pause := func(stir time.Duration) time.Duration {
			began := time.Now()
			if stir >= 0 {
				time.AfterFunc(stir, l.stir)
			}
			l.pause(t.Context(), "limit")
			synctest.Wait()
			return time.Since(began).Round(time.Millisecond)
		}
		for _, c := range []struct{ stir, want time.Duration }{
			{-1, 50}, {-1, 100}, {-1, 200}, {-1, 400}, {-1, 800}, {-1, 1000}, {-1, 1000},
			{500, 500}, {-1, 50}, {-1, 100}, {10, 50}, {-1, 50},
		} {
			if got := pause(c.stir * time.Millisecond); got != c.want*time.Millisecond {
				t.Fatalf("a pause with news after %d ms took %v, want %d ms", c.stir, got, c.want)
			}
		}
		l.claimed("limit")
		if got := pause(-1); got != leastPause {
			t.Errorf("the pause after a claim took %v, want %v", got, leastPause)
		}
	})
}
