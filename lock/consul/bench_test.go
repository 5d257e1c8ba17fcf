package consul

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"onejob/internal/testenv"
)

// BenchmarkAcquireRelease measures locks taken and given back by so many callers
// at once, each with keys of its own: ns/op is the time per lock.
func BenchmarkAcquireRelease(b *testing.B) {
	for _, callers := range []int{1, 16, 128, 1024} {
		b.Run(fmt.Sprint(callers), func(b *testing.B) {
			cfg := config(b, testenv.Consul(b))
			cfg.CheckTTL, cfg.Heartbeat, cfg.Verify = 5*time.Second, time.Second, 3*time.Second
			l := start(b, cfg)
			var left atomic.Int64
			left.Store(int64(b.N))
			b.ResetTimer()
			together(callers, func(i int) {
				key := fmt.Sprint("key-", i)
				for left.Add(-1) >= 0 {
					lease, err := try(l, key)
					if err != nil {
						b.Error(err)
						return
					}
					release(b, lease)
				}
			})
			b.StopTimer()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "locks/s")
		})
	}
}
