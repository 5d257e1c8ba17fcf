package memory

import (
	"testing"

	"onejob/lock"
	"onejob/lock/locktest"
)

func TestLocker(t *testing.T) {
	locktest.Run(t, func(*testing.T) locktest.Backend {
		s := New()
		return locktest.Backend{
			New:        func(*testing.T) lock.Locker { return s.Locker() },
			EndSession: func(_ *testing.T, session string) { s.EndSession(session) },
			DeleteKey:  func(_ *testing.T, key string) { s.DeleteKey(key) },
			LockDelay:  lockDelay,
		}
	})
}
