package consul

import (
	"encoding/json"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

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

// BenchmarkTxn builds the body of a transaction that takes so many locks, and
// reads the answer: ns/op is the time per lock.
func BenchmarkTxn(b *testing.B) {
	for _, locks := range []int{1, 128} {
		var paths []string
		var answer api.TxnResponse
		for i := range locks {
			paths = append(paths, fmt.Sprint("service/onejob/tasks/", 1000000+i))
		}
		value := []byte(`{"replica":"7f3a9c51","task_id":1000000,"kind":"noop","fence":2000000,"started":"2026-01-02T03:04:05.678901234Z"}`)
		session := "0f9b2c1e-6a5d-4c38-9e7f-1b2a3c4d5e6f"
		b.Run(fmt.Sprintf("build/%d", locks), func(b *testing.B) {
			b.ReportAllocs()
			for i := 0; i < b.N; i += locks {
				body := append(make([]byte, 0, 512*locks), '[')
				for _, path := range paths {
					body = append(appendOp(body, api.KVLock, path, session, value, 0), ',')
				}
			}
		})
		for _, path := range paths {
			answer.Results = append(answer.Results, &api.TxnResult{KV: &api.KVPair{
				Key: path, Session: session, CreateIndex: 123456, ModifyIndex: 123456, LockIndex: 1}})
		}
		text, err := json.Marshal(answer)
		if err != nil {
			b.Fatal(err)
		}
		b.Run(fmt.Sprintf("read/%d", locks), func(b *testing.B) {
			b.ReportAllocs()
			for i := 0; i < b.N; i += locks {
				got := txnResults{text}
				for _, path := range paths {
					if got.next(path) != 123456 {
						b.Fatalf("no index of %s", path)
					}
				}
			}
		})
	}
}
