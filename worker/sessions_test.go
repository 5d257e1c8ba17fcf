package worker_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"onejob/internal/testenv"
	"onejob/tasks"
	"onejob/worker"
)

// lookingStore counts how often somebody asks whose tasks run. It fails on demand,
// which cannot be had otherwise for one statement alone.
type lookingStore struct {
	worker.Store
	looks atomic.Int64
	last  atomic.Pointer[time.Time]
	fail  atomic.Bool
}

func (s *lookingStore) Sessions(ctx context.Context, mine string) ([]string, error) {
	now := time.Now()
	s.last.Store(&now)
	s.looks.Add(1)
	if s.fail.Load() {
		return nil, errors.New("no answer, for this test")
	}
	return s.Store.Sessions(ctx, mine)
}

// Each look for abandoned tasks reads all that is running, on behalf of one replica, so
// that many replicas together would do little else. While nobody comes or goes
// they hardly look; when somebody does, they do at once, and go on until it has
// succeeded.
func TestAbandonedTasksAreLookedForWhenSessionsChange(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	seen := &lookingStore{}
	c.replica(t, "seen", tasks.Kinds{"noop": tasks.Noop{}}, func(w *worker.Config) { seen.Store, w.Store = w.Store, seen })

	quiet := func() {
		testenv.Eventually(t, maxWait, "four seconds without a look", func() bool {
			last := seen.last.Load()
			return last != nil && time.Since(*last) > 4*time.Second
		})
	}
	quiet() // the session's own beginning is over

	before := seen.looks.Load()
	seen.fail.Store(true)
	c.replica(t, "another", tasks.Kinds{"noop": tasks.Noop{}}, nil)
	// One a second, where one in 10 s is usual, besides those that the other replica causes by coming.
	testenv.Eventually(t, time.Minute, "looks that go on while they fail", func() bool { return seen.looks.Load() >= before+12 })
	seen.fail.Store(false)
	quiet()
}
