package consul

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"onejob/internal/testenv"
)

// deaf is a list that no end can be told.
type deaf struct {
	alone
	tries atomic.Int64
}

func (d *deaf) Leave(context.Context, string, bool) error {
	d.tries.Add(1)
	return errors.New("the list cannot be told")
}

// A replica that has lost its session, and stops before the list of replicas can be told, says so in
// Consul. Otherwise the others would think that it has died, and charge its tasks for that.
func TestStopAfterALostSession(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	l := create(t, config(t, kv))
	ctx, cancel := context.WithCancel(t.Context())
	list := &deaf{}
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx, list) }()
	defer cancel()
	ready(t, l)
	session := l.Session()
	if _, err := kv.Client.Session().Destroy(session, nil); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, maxWait, "it tries to tell the list", func() bool { return list.tries.Load() > 0 })
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	pair, _, err := kv.Client.KV().Get(l.stoppedKey(session), nil)
	if err != nil || pair == nil {
		t.Errorf("of the session that was lost Consul says %v, %v", pair, err)
	}
}
