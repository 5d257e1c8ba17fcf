// Package apilock holds a key by the lock of Consul's own Go client, used as its
// documentation says: the work's context ends when the lock is lost.
//
// That lock is lost to its holder when the key says so or cannot be read. It has
// no fence, and a holder that hears nothing of Consul hears no error either.
package apilock

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"
)

// waitTime is how long Hold waits for somebody else to leave. Zero would stand
// for 15 s.
const waitTime = 100 * time.Millisecond

// ErrLost is the cause with which work's context ends when the lock is lost.
var ErrLost = errors.New("the lock was lost")

// Hold calls work while it holds key, and reports whether it got the key, for
// which it tries once. The context that work is given ends when ctx does, or
// when the lock is lost. The error is Consul's or work's; that a lock could not
// be given up is no error, as its session ends all the same.
func Hold(ctx context.Context, consul *api.Client, key string, work func(context.Context) error) (mine bool, err error) {
	lock, err := consul.LockOpts(&api.LockOptions{Key: key, LockTryOnce: true, LockWaitTime: waitTime})
	if err != nil {
		return false, fmt.Errorf("lock %s: %w", key, err)
	}
	lost, err := lock.Lock(ctx.Done())
	if err != nil {
		return false, fmt.Errorf("lock %s: %w", key, err)
	}
	if lost == nil {
		return false, nil
	}
	defer func() {
		if lock.Unlock() == nil {
			_ = lock.Destroy() // it is in use when somebody else has it by now
		}
	}()
	ctx, cancel := context.WithCancelCause(ctx)
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-lost:
			cancel(ErrLost)
		case <-ctx.Done():
		}
	})
	defer func() {
		cancel(nil)
		watch.Wait()
	}()
	return true, work(ctx)
}
