package hold

import (
	"context"
	"errors"
	"sync"
	"testing"

	"onejob/boottime"
	"onejob/lock"
)

// begun returns a lease that is held.
func begun(s *Session) *Lease {
	l := new(Lease)
	l.Init(s)
	l.Grant()
	return l
}

func TestLease(t *testing.T) {
	t.Run("it is let go once", func(t *testing.T) {
		l := begun(NewSession(nil, nil))
		if stood, lost := l.LetGo(); stood != Held || lost != nil || !errors.Is(context.Cause(l.Context()), lock.ErrReleased) {
			t.Errorf("got %v, %v", stood, lost)
		}
		if stood, _ := l.LetGo(); stood == Held || stood == Revoked {
			t.Errorf("again: got %v", stood)
		}
		if l.Revoke(lock.ErrRevoked) || l.State() != Releasing {
			t.Errorf("it was revoked afterwards: %v", l.State())
		}
	})
	t.Run("it is revoked once", func(t *testing.T) {
		l := begun(NewSession(nil, nil))
		if !l.Revoke(lock.ErrRevoked) || l.Revoke(lock.ErrRevoked) || !errors.Is(context.Cause(l.Context()), lock.ErrRevoked) {
			t.Error("it was not, or twice")
		}
		if at := l.Deadline(); !at.Passed() || at < boottime.Now().Add(-1e9) {
			t.Errorf("its deadline is %v", at)
		}
		if stood, lost := l.LetGo(); stood != Revoked || lost != nil {
			t.Errorf("got %v, %v", stood, lost)
		}
	})
	t.Run("one that is refused is not granted", func(t *testing.T) {
		l := new(Lease)
		l.Init(NewSession(nil, nil))
		if !l.Refuse() || l.Grant() || l.Refuse() {
			t.Error("it was")
		}
	})
	t.Run("it ends with its session", func(t *testing.T) {
		s := NewSession(nil, nil)
		l := begun(s)
		s.Lose(lock.ErrLost)
		if !errors.Is(context.Cause(l.Context()), lock.ErrLost) || !l.Deadline().Passed() {
			t.Error("it goes on")
		}
		if stood, lost := l.LetGo(); stood != Held || !errors.Is(lost, lock.ErrLost) {
			t.Errorf("got %v, %v", stood, lost)
		}
	})
	t.Run("what has leaked is given back by one caller", func(t *testing.T) {
		l := new(Lease)
		l.InitLeaked(NewSession(nil, nil))
		if !l.Retry() || l.Retry() || l.Context().Err() == nil {
			t.Error("by two, or none")
		}
	})
	t.Run("whoever is first, it is given back", func(t *testing.T) {
		for range 2000 {
			l := begun(NewSession(nil, nil))
			var wg sync.WaitGroup
			wg.Go(func() { l.Revoke(lock.ErrRevoked) })
			stood, _ := l.LetGo()
			wg.Wait()
			if stood != Held && stood != Revoked || l.State() != Releasing {
				t.Fatalf("it stood at %v, and is at %v now", stood, l.State())
			}
		}
	})
}
