package worker

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"onejob/boottime"
	"onejob/tasks"
)

// shutdown is how a replica ends: handlers have a grace period, are cancelled, and are then
// abandoned, with a moment left for what they write to the store.
type shutdown struct {
	forced   context.Context // ends with force
	force    func()          // ends the grace period
	stopping atomic.Bool     // no more claims
	end      atomic.Int64    // a boottime.Instant: no handler has longer than that; zero before they are cancelled

	giveUp  context.Context // ends when handlers are no longer waited for
	writing context.Context // ends lastTry later: the time that pending writes to the store have left
	abandon func()          // ends both
}

// prepare makes the contexts, with the values of ctx. They end with release at the latest.
func (s *shutdown) prepare(ctx context.Context) (release func()) {
	ctx = context.WithoutCancel(ctx)
	giveUp, stopWaiting := context.WithCancel(ctx)
	writing, stopWriting := context.WithCancelCause(ctx)
	s.giveUp, s.writing = giveUp, writing
	s.abandon = func() {
		stopWaiting()
		time.AfterFunc(lastTry, func() { stopWriting(errGivenUp) })
	}
	return func() { stopWriting(nil); stopWaiting() }
}

// errGivenUp is the cause when a stopping replica no longer waits for the store.
var errGivenUp = errors.New("the replica stops, and Postgres has not answered")

// lastTry is how long the store may still take to answer once the drain has given up.
const lastTry = 1500 * time.Millisecond

// How long cancelled handlers may take to return. Commands may have a grace of hours between
// SIGTERM and SIGKILL; their guards are given a deadline before that.
const (
	handlersEnd = 10 * time.Second
	commandsEnd = 8 * time.Second
)

// deadline returns when a handler must have ended whose lease holds until then.
func (s *shutdown) deadline(lease boottime.Instant) boottime.Instant {
	if end := s.end.Load(); end != 0 {
		return min(lease, boottime.Instant(end))
	}
	return lease
}

// drain waits for running tasks: for the grace period, then for a moment after
// cancelling them. It returns an error if some are still running then.
func (s *shutdown) drain(running *running, grace time.Duration, log *zap.Logger) error {
	done := running.done()
	if n := running.count(); n > 0 {
		log.Info("draining", zap.Int("running", n), zap.Duration("grace", grace))
	}
	select {
	case <-done:
		return nil
	case <-time.After(grace):
	case <-s.forced.Done():
	}
	running.cancelAll(tasks.ErrShutdown)
	s.end.Store(int64(boottime.Now().Add(commandsEnd)))
	select {
	case <-done:
		return nil
	case <-time.After(handlersEnd):
	}
	s.abandon()
	select {
	case <-done:
	case <-time.After(lastTry + 500*time.Millisecond):
	}
	if n := running.count(); n > 0 {
		log.Error("drain_incomplete", zap.Int("running", n))
		return fmt.Errorf("%d tasks were still running %v after they were cancelled; others take them over", n, handlersEnd)
	}
	return nil
}
