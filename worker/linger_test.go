package worker

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// Who comes while others wait goes on with them; who comes later waits anew.
func TestLinger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l linger
		began := time.Now()
		came := []time.Duration{0, 5, 19, 20, 70, 80} // ms
		want := []time.Duration{20, 20, 20, 40, 90, 90}
		var wg sync.WaitGroup
		for i := range came {
			wg.Go(func() {
				time.Sleep(came[i]*time.Millisecond + time.Duration(i)) // after what ends at the same moment
				l.wait()
				if got := time.Since(began).Round(time.Millisecond); got != want[i]*time.Millisecond {
					t.Errorf("who came after %d ms went on after %v; want %d ms", came[i], got, want[i])
				}
			})
		}
		wg.Wait()
	})
}
