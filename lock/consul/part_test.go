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

// A replica that has lost its session, and stops before the list of replicas can be told, or before what
// worked under the session has ended, says so in Consul. So does one whose session ends with the stop, while
// something works on. Otherwise the others would think that it has died, and charge its tasks for that.
func TestStopsAreSaidInConsul(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ lost, busy bool }{
		"a lost session": {lost: true},
		"a lost session under which something works": {lost: true, busy: true},
		"a session under which something works":      {busy: true},
	} {
		t.Run(name, func(t *testing.T) {
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
			if test.busy {
				acquire(t, l, "key")
			}
			if test.lost {
				if _, err := kv.Client.Session().Destroy(session, nil); err != nil {
					t.Fatal(err)
				}
				testenv.Eventually(t, maxWait, "the loss is seen", func() bool { return l.Session() != session && (test.busy || list.tries.Load() > 0) })
			}
			cancel()
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			pair, _, err := kv.Client.KV().Get(l.stoppedKey(session), nil)
			if err != nil || pair == nil {
				t.Errorf("of the session Consul says %v, %v", pair, err)
			}
			if tries := list.tries.Load(); test.busy && !test.lost && tries > 0 {
				t.Errorf("the list was told %d times", tries)
			}
		})
	}
}
