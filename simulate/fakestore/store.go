package fakestore

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"onejob/boottime"
	"onejob/tasks"
	"onejob/tasks/schedule"
	"onejob/worker"
)

// Link carries one call to the database and its answer back. It calls apply once, or never,
// or more than once, at once or later, also after it has returned; it returns an error unless
// the caller heard the answer of a call of apply that was over by then. What is the statement.
type Link func(ctx context.Context, what string, apply func()) error

// Direct is the link of those who stand beside the database.
func Direct(_ context.Context, _ string, apply func()) error {
	apply()
	return nil
}

// Store is one replica's way to the database.
type Store struct {
	db   *Database
	link Link
}

var _ worker.Store = (*Store)(nil)

// Store returns a way to the database.
func (d *Database) Store(link Link) *Store { return &Store{d, link} }

const (
	timeout     = 15 * time.Second
	beatTimeout = 2 * time.Second
)

// ask makes one call within a time.
func ask[T any](ctx context.Context, s *Store, what string, within time.Duration, f func(d *Database) (T, error)) (out T, err error) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	var heard T
	var refused error
	if err := s.link(ctx, what, func() {
		s.db.mu.Lock()
		defer s.db.mu.Unlock()
		heard, refused = f(s.db)
	}); err != nil {
		return out, fmt.Errorf("%s: %w", what, err)
	}
	return heard, refused
}

// notice is ask for what has no answer but an error.
func notice(ctx context.Context, s *Store, what string, within time.Duration, f func(d *Database) error) error {
	_, err := ask(ctx, s, what, within, func(d *Database) (struct{}, error) { return struct{}{}, f(d) })
	return err
}

// Claim implements worker.Store.
func (s *Store) Claim(ctx context.Context, c tasks.Claim) (tasks.Claimed, error) {
	// The rows are announced by a goroutine of the caller's, not by the database's: a simulated
	// process has a clock of its own, and those belong to it that its goroutines start.
	taken, over := make(chan []tasks.Taken, 1), make(chan struct{})
	var listener sync.WaitGroup
	if c.Taken != nil {
		listener.Go(func() {
			select {
			case rows := <-taken:
				c.Taken(rows)
				return
			case <-over: // what arrives later is no answer to this call
			}
			select {
			case rows := <-taken:
				c.Taken(rows)
			default:
			}
		})
	}
	announce := func(rows []tasks.Taken) {
		if len(rows) > 0 {
			select {
			case taken <- rows:
			default: // the claim was heard twice
			}
		}
	}
	claimed, err := ask(ctx, s, "claim", timeout, func(d *Database) (tasks.Claimed, error) { return d.claim(c, announce) })
	close(over)
	listener.Wait()
	for _, t := range claimed.Tasks {
		t.HeardAt = boottime.Now()
	}
	return claimed, err
}

// LookBehind implements worker.Store.
func (s *Store) LookBehind(ctx context.Context, c tasks.Claim) (bool, error) {
	return false, nil // a claim passes over nothing here
}

// Begin implements worker.Store.
func (s *Store) Begin(ctx context.Context, t *tasks.Task) error {
	return notice(ctx, s, "begin", timeout, func(d *Database) error { return d.begin(t) })
}

// Requeue implements worker.Store.
func (s *Store) Requeue(ctx context.Context, t *tasks.Task, delay time.Duration) error {
	return notice(ctx, s, "requeue", timeout, func(d *Database) error { d.requeue(t, delay); return nil })
}

// Complete implements worker.Store.
func (s *Store) Complete(ctx context.Context, e tasks.Completion) error {
	return notice(ctx, s, "complete", timeout, func(d *Database) error { return d.complete(e) })
}

// Sessions implements worker.Store.
func (s *Store) Sessions(ctx context.Context, mine string) ([]string, error) {
	return ask(ctx, s, "sessions", timeout, func(d *Database) ([]string, error) { return d.sessions(mine), nil })
}

// TakeOver implements worker.Store.
func (s *Store) TakeOver(ctx context.Context, dead []string, maxCrashes int) ([]tasks.Abandoned, []tasks.RowError, error) {
	abandoned, err := ask(ctx, s, "takeover", timeout, func(d *Database) ([]tasks.Abandoned, error) { return d.takeOver(dead, maxCrashes), nil })
	return abandoned, nil, err
}

// UnknownKinds implements worker.Store.
func (s *Store) UnknownKinds(context.Context, []string) ([]string, error) { return nil, nil }

// CancelRequests implements worker.Store.
func (s *Store) CancelRequests(ctx context.Context, session string) ([]int64, error) {
	return ask(ctx, s, "cancels", timeout, func(d *Database) ([]int64, error) { return d.cancelRequests(session), nil })
}

// Held implements worker.Store.
func (s *Store) Held(ctx context.Context, session string) ([]*tasks.Task, error) {
	return ask(ctx, s, "held", timeout, func(d *Database) ([]*tasks.Task, error) { return d.heldBy(session), nil })
}

// Listen implements worker.Store. Nobody is woken: the worker looks every second.
func (s *Store) Listen(ctx context.Context, _ func(tasks.Signal, string)) error {
	<-ctx.Done()
	return ctx.Err()
}

// WakeAll implements worker.Store. Nobody hears it.
func (s *Store) WakeAll(context.Context) error { return nil }

// The list of replicas.

// ClusterID implements worker.Store.
func (s *Store) ClusterID(ctx context.Context) (string, error) {
	return ask(ctx, s, "cluster", timeout, func(d *Database) (string, error) { return d.state.cluster, nil })
}

// AdoptConsul implements worker.Store. Nobody else's call is let in between.
func (s *Store) AdoptConsul(ctx context.Context, id string, sessions []string, foreign bool, _ string, write func(ctx context.Context, id string) error) error {
	type step struct {
		next string
		may  bool
	}
	st, err := ask(ctx, s, "adopt", timeout, func(d *Database) (step, error) {
		if d.state.cluster != id {
			return step{}, nil
		}
		if err := d.mayAdopt(sessions, foreign); err != nil {
			return step{}, err
		}
		d.state.clusters++
		return step{fmt.Sprintf("c1c1c1c1-0000-4000-8000-%012x", d.state.clusters), true}, nil
	})
	if err != nil || !st.may {
		return err
	}
	if err := write(ctx, st.next); err != nil {
		return fmt.Errorf("write the cluster's id: %w", err)
	}
	return notice(ctx, s, "adopted", timeout, func(d *Database) error {
		if d.state.cluster != id {
			return errors.New("another adoption came between") // Postgres has a lock on the row
		}
		d.state.cluster = st.next
		return nil
	})
}

// Join implements worker.Store.
func (s *Store) Join(ctx context.Context, id string, r tasks.Replica) error {
	return notice(ctx, s, "join", timeout, func(d *Database) error { return d.join(id, r) })
}

// Beat implements worker.Store.
func (s *Store) Beat(ctx context.Context, r tasks.Replica, known tasks.Known) (tasks.Answer, error) {
	return ask(ctx, s, "beat", beatTimeout, func(d *Database) (tasks.Answer, error) { return d.beat(r, known), nil })
}

// Replicas implements worker.Store.
func (s *Store) Replicas(ctx context.Context) ([]tasks.Replica, error) {
	return ask(ctx, s, "replicas", timeout, func(d *Database) ([]tasks.Replica, error) { return d.replicas(), nil })
}

// DeclareProcessDead implements worker.Store.
func (s *Store) DeclareProcessDead(ctx context.Context, process string) ([]string, error) {
	return ask(ctx, s, "process dead", timeout, func(d *Database) ([]string, error) { return d.declareProcessDead(process), nil })
}

// DeclareDead implements worker.Store.
func (s *Store) DeclareDead(ctx context.Context, r tasks.Replica, stopped bool) (tasks.ReplicaState, error) {
	return ask(ctx, s, "declare dead", timeout, func(d *Database) (tasks.ReplicaState, error) { return d.declareDead(r, stopped), nil })
}

// EndReplica implements worker.Store.
func (s *Store) EndReplica(ctx context.Context, session string, how tasks.ReplicaState) error {
	return notice(ctx, s, "end replica", beatTimeout, func(d *Database) error { d.endReplica(session, how); return nil })
}

// Which server it is.

// Server implements worker.DatabaseStore.
func (s *Store) Server(ctx context.Context) (tasks.ServerReport, error) {
	return ask(ctx, s, "server", timeout, func(d *Database) (tasks.ServerReport, error) {
		return tasks.ServerReport{Server: d.server, Now: now(), LastFence: d.sequence, FencesFrom: d.state.fencesFrom}, nil
	})
}

// Recorded implements worker.DatabaseStore.
func (s *Store) Recorded(ctx context.Context, fencesFrom int64) error {
	return notice(ctx, s, "recorded", timeout, func(d *Database) error {
		d.state.fencesFrom = max(d.state.fencesFrom, fencesFrom)
		return nil
	})
}

// Refuse implements worker.DatabaseStore. There is one server.
func (s *Store) Refuse(tasks.Server) {}

// Follow implements worker.DatabaseStore. There is one server.
func (s *Store) Follow(context.Context, tasks.Server) bool { return false }

// Limits; kinds have none.

// Limited implements worker.Store.
func (s *Store) Limited(ctx context.Context) (bool, error) {
	return ask(ctx, s, "limited", timeout, func(d *Database) (bool, error) { return d.limited(), nil })
}

// DueLimits implements worker.Store.
func (s *Store) DueLimits(ctx context.Context, c tasks.Claim, names []string) ([]string, error) {
	return ask(ctx, s, "due limits", timeout, func(d *Database) ([]string, error) { return d.limits(names, c.Kinds), nil })
}

// UnknownLimits implements worker.Store.
func (s *Store) UnknownLimits(context.Context, []string, int) ([]string, error) { return nil, nil }

// DueKinds implements worker.Store.
func (s *Store) DueKinds(context.Context, tasks.Claim) ([]string, error) { return nil, nil }

// Schedules, of which there are none.

// DueSchedules implements worker.Store.
func (s *Store) DueSchedules(context.Context, []string) (time.Time, []schedule.Due, error) {
	return now(), nil, nil
}

// MakeOccurrences implements worker.Store.
func (s *Store) MakeOccurrences(context.Context, schedule.Due, schedule.Plan) (bool, int, error) {
	return false, 0, nil
}

// MarkSchedule implements worker.Store.
func (s *Store) MarkSchedule(context.Context, schedule.Due, string) (bool, error) { return false, nil }

// UntilNextSchedule implements worker.Store.
func (s *Store) UntilNextSchedule(_ context.Context, atMost time.Duration, _ []string) (time.Duration, error) {
	return max(atMost, 10*time.Second), nil
}

// Purge implements worker.Store.
func (s *Store) Purge(context.Context, tasks.Status, time.Duration, int) (int, bool, []tasks.RowError, error) {
	return 0, false, nil, nil
}

// PurgeOccurrences implements worker.Store.
func (s *Store) PurgeOccurrences(context.Context, time.Duration, int) (int, error) { return 0, nil }

// PurgeActions implements worker.Store.
func (s *Store) PurgeActions(context.Context, time.Duration, int) (int, error) { return 0, nil }

// UnservedQueues implements worker.Store.
func (s *Store) UnservedQueues(context.Context, int) ([]string, error) { return nil, nil }

// HeldSnapshots implements worker.Store.
func (s *Store) HeldSnapshots(context.Context, time.Duration) ([]tasks.HeldSnapshot, error) {
	return nil, nil
}

// Overlaps implements worker.Store.
func (s *Store) Overlaps(context.Context, int) ([]tasks.Overlap, int, error) { return nil, 0, nil }

// Clock implements worker.Store.
func (s *Store) Clock(ctx context.Context) (at, started time.Time, err error) {
	err = notice(ctx, s, "clock", timeout, func(d *Database) error {
		at, started = now(), d.server.Started
		return nil
	})
	return at, started, err
}

// AfterSetBack implements worker.Store.
func (s *Store) AfterSetBack(context.Context) (int, error) { return 0, nil }

// SchedulesAhead implements worker.Store.
func (s *Store) SchedulesAhead(context.Context) ([]schedule.Ahead, error) { return nil, nil }

// SchedulesInZones implements worker.Store.
func (s *Store) SchedulesInZones(context.Context, int64) ([]schedule.Ahead, error) { return nil, nil }

// SetNext implements worker.Store.
func (s *Store) SetNext(context.Context, schedule.Ahead, time.Time) (bool, int, error) {
	return false, 0, nil
}

func number(n int64) string { return strconv.FormatInt(n, 10) }
