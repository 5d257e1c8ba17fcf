package lock_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"onejob/lock"
)

// slow semaphores are inspected by several at once: each waits until so many are.
type slow struct {
	lock.Semaphores
	now, most atomic.Int32
	several   chan struct{}
	once      sync.Once
}

var errOdd = errors.New("odd")

func (s *slow) Inspect(_ context.Context, name string) (lock.Semaphore, error) {
	n := s.now.Add(1)
	defer s.now.Add(-1)
	for m := s.most.Load(); n > m && !s.most.CompareAndSwap(m, n); m = s.most.Load() {
	}
	if n == 8 {
		s.once.Do(func() { close(s.several) })
	}
	<-s.several
	if len(name)%2 == 1 {
		return lock.Semaphore{}, fmt.Errorf("%s: %w", name, errOdd)
	}
	return lock.Semaphore{Name: name}, nil
}

// Answers come in the order of the names, and are asked for eight at a time.
func TestInspectAll(t *testing.T) {
	s := &slow{several: make(chan struct{})}
	var names []string
	for i := range 30 {
		names = append(names, fmt.Sprint("x", 10*i)[:1+i%2])
	}
	list, errs := lock.InspectAll(t.Context(), s, names)
	for i, name := range names {
		if odd := len(name)%2 == 1; errors.Is(errs[i], errOdd) != odd || !odd && list[i].Name != name {
			t.Errorf("of %s: %+v, %v", name, list[i], errs[i])
		}
	}
	if most := s.most.Load(); most != 8 {
		t.Errorf("%d were asked for at once, not 8", most)
	}
	if list, errs := lock.InspectAll(t.Context(), s, nil); len(list)+len(errs) > 0 {
		t.Errorf("of no names: %v, %v", list, errs)
	}
}
