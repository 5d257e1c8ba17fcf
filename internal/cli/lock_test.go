package cli

import (
	"context"
	"errors"
	"testing"
	"time"

	"onejob/lock"
)

// noToken is a lock that nobody may have any more, as when a token has ended: there is no
// session, and every request fails at once.
type noToken struct{ asked int }

func (n *noToken) Run(context.Context) error   { return nil }
func (n *noToken) Ready(context.Context) error { return nil }
func (n *noToken) ask(context.Context, []byte) (lock.Lease, error) {
	n.asked++
	return nil, lock.ErrLost
}
func (n *noToken) await(context.Context) error               { return errors.New("403") }
func (n *noToken) notHad(_ context.Context, err error) error { return err }

// Who waits for a lock that cannot even be waited for does not ask again and again.
func TestObtainPauses(t *testing.T) {
	t.Parallel()
	var n noToken
	_, err := obtain(t.Context(), &n, 1500*time.Millisecond)
	if e, ok := errors.AsType[*exitError](err); !ok || e.code != exitNotLocked {
		t.Errorf("obtain: %v", err)
	}
	if n.asked < 1 || n.asked > 3 {
		t.Errorf("it asked %d times", n.asked)
	}
}
