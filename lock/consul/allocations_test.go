package consul

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"

	"github.com/hashicorp/consul/api"

	"onejob/lock"
	"onejob/lock/internal/hold"
)

// TestAllocationsOfALock bounds what a lock and its release allocate besides the requests:
// 128 leases are put on the session's list, the transactions that lock and unlock their keys
// are built, and the answer is read. It takes 6 objects and 0.9 kB for each of them.
func TestAllocationsOfALock(t *testing.T) {
	const mostObjects, mostBytes = 11, 1700
	c := &client{keyNames: "service/onejob", cfg: &Config{Prefix: "service/onejob"}}
	k := newLocks(context.Background(), c, func() bool { return true })
	session := &ttlSession{Session: hold.NewSession(nil, nil), client: c, id: "0f9b2c1e-6a5d-4c38-9e7f-1b2a3c4d5e6f"}
	in := &leases{ttlSession: session, removed: func() {}, own: map[string]*lease{}, names: map[string]*lease{}}
	unlock := each(1, func(b []byte, ls *lease, _ int) []byte {
		return appendOp(b, api.KVUnlock, ls.path, ls.in.id, nil, 0)
	})

	const together = maxBatch - 10
	var answer api.TxnResponse
	requests := make([]lock.Request, together)
	for i := range requests {
		id := int64(1_000_000 + i)
		requests[i] = lock.Request{Session: session.id, Key: fmt.Sprint(id), Task: id, Value: []byte(`{"task_id":1000000,"fence":2000000}`)}
		answer.Results = append(answer.Results, &api.TxnResult{KV: &api.KVPair{Key: c.reusedKey(id), Session: session.id, ModifyIndex: 123456}})
	}
	text, err := json.Marshal(answer)
	if err != nil {
		t.Fatal(err)
	}
	result := testing.Benchmark(func(b *testing.B) {
		for b.Loop() {
			list := make([]*lease, together)
			for i, r := range requests {
				list[i] = k.newLease(in, r, c.taskKey(r.Key))
				if list[i].path = list[i].reused; !in.reserve(list[i]) {
					b.Fatal("it is on the list already")
				}
			}
			k.lockBatch(list).build(list)
			results := txnResults{text}
			for _, ls := range list {
				if ls.index = results.next(ls.path); ls.index != 123456 {
					b.Fatalf("%s has the index %d", ls.path, ls.index)
				}
				ls.Grant()
			}
			unlock(list)
			for _, ls := range list {
				ls.LetGo()
				ls.settle(true)
			}
		}
	})
	objects, bytes := result.AllocsPerOp()/together, result.AllocedBytesPerOp()/together
	t.Logf("%d objects, %d bytes", objects, bytes)
	if objects > mostObjects || bytes > mostBytes {
		t.Errorf("a lock allocates %d objects and %d bytes, more than %d and %d", objects, bytes, mostObjects, mostBytes)
	}
}
