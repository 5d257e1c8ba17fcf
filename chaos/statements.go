package main

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/chaos/checker"
	"onejob/chaos/observer"
	"onejob/internal/retry"
)

// statements notes which statements of sql tasks are at work in Postgres. A statement
// that is undone leaves no trace in a table, and the backend of a dead replica works
// on until the statement ends, so somebody has to look while it does.
//
// A statement locks its lock key and its fence, shared, and then sleeps. Who holds
// that lock and sleeps is at work. A transaction that is merely open is not.
type statements struct {
	c    *cluster
	stop context.CancelFunc
	done chan struct{}
	seen map[statement]*checker.Statement
}

type statement struct {
	PID   int
	Fence int64
}

const (
	// workingSQL finds the statements at work. The lock is chaos.enter's.
	workingSQL = `
SELECT l.pid, l.objid::bigint, l.classid::bigint, a.application_name, chaos.clock()
  FROM pg_locks l
  JOIN pg_stat_activity a ON a.pid = l.pid
 WHERE l.locktype = 'advisory'
   AND l.objsubid = 2
   AND a.state = 'active'
   AND a.wait_event = 'PgSleep'`

	// lookEvery is how often it looks. What is shorter may be missed.
	lookEvery = 100 * time.Millisecond
)

// watchStatements begins to look. It ends with the func end.
func watchStatements(ctx context.Context, c *cluster) *statements {
	ctx, stop := context.WithCancel(ctx)
	s := &statements{c: c, stop: stop, done: make(chan struct{}), seen: map[statement]*checker.Statement{}}
	go func() {
		defer close(s.done)
		for ctx.Err() == nil {
			s.look(ctx)
			retry.Pause(ctx, lookEvery)
		}
	}()
	return s
}

// look notes what is at work now; nothing if Postgres is unavailable.
func (s *statements) look(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	var id statement
	var key int64
	var replica string
	var at time.Time
	found, err := s.c.operator.Query(ctx, workingSQL)
	if err != nil {
		return
	}
	_, _ = pgx.ForEachRow(found, []any{&id.PID, &id.Fence, &key, &replica, &at}, func() error {
		if s.seen[id] == nil {
			s.seen[id] = &checker.Statement{Fence: id.Fence, PID: id.PID, Key: key, Replica: replica, First: observer.At(at)}
		}
		s.seen[id].Last = observer.At(at)
		return nil
	})
}

// end stops looking and returns what was seen, the oldest first.
func (s *statements) end() (all []checker.Statement) {
	s.stop()
	<-s.done
	for _, id := range slices.SortedFunc(maps.Keys(s.seen), func(a, b statement) int { return cmp.Or(cmp.Compare(a.Fence, b.Fence), cmp.Compare(a.PID, b.PID)) }) {
		all = append(all, *s.seen[id])
	}
	return all
}

// working returns the names of the replicas whose statements are at work.
func (c *cluster) working(ctx context.Context) map[string]bool {
	ctx, cancel := context.WithTimeout(ctx, operatorMaxWait)
	defer cancel()
	names := map[string]bool{}
	found, err := rows(ctx, c, workingSQL, func(r pgx.CollectableRow) (name string, err error) {
		return name, r.Scan(nil, nil, nil, &name, nil)
	})
	if err != nil {
		return nil
	}
	for _, n := range found {
		names[n] = true
	}
	return names
}
