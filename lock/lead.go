package lock

import (
	"context"
	"time"
)

// Elector makes one of many replicas the leader. A Locker is one.
type Elector interface {
	// Campaign waits until this replica leads, and returns the lease on that.
	// It waits through the backend's absence, and returns an error only when
	// ctx has ended.
	Campaign(ctx context.Context) (Lease, error)
}

// Lead runs f whenever this replica leads, until ctx ends or f returns while it
// still leads, which resigns. f's context ends when the leadership does. Lead
// then waits for f, and only then lets go: no two leaders work at once as long
// as f returns before the lease's deadline. It returns what f returned when it
// resigned, and nil when ctx has ended.
//
// Leadership is as good as a lease, and no better: a process that was frozen may
// go on for a moment before it notices. What f does should be harmless when done
// twice.
func Lead(ctx context.Context, e Elector, f func(ctx context.Context) error) error {
	for ctx.Err() == nil {
		lease, err := e.Campaign(ctx)
		if err != nil {
			return nil // ctx has ended
		}
		leading, stop := context.WithCancelCause(lease.Context())
		unhook := context.AfterFunc(ctx, func() { stop(context.Cause(ctx)) })
		err = f(leading)
		resigned := leading.Err() == nil
		unhook()
		stop(ErrReleased)

		release, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		_ = lease.Release(release) // if it fails the lease is over all the same
		cancel()
		if resigned {
			return err
		}
	}
	return nil
}
