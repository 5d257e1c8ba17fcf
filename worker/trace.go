package worker

import (
	"context"
	"time"

	"onejob/tasks"
)

// A Tracer follows tasks for distributed tracing. Its methods are called on the hot path by
// many goroutines at once, and must not block.
type Tracer interface {
	// Claimed is called when a claim that took so long has brought tasks.
	Claimed(list []*tasks.Task, took time.Duration)

	// Attempt is called when an attempt at a claimed task begins, before its lock is known
	// to be given. Lines of the log have the trace that it writes to the task's Traceparent.
	Attempt(t *tasks.Task) Trace
}

// A Trace follows one attempt. Each of its methods ends the step before it; those of steps
// that an attempt does not reach are left out. Ended is called last, and always.
type Trace interface {
	// Locked is called when the lock was given, or with why it was not.
	Locked(err error)

	// Running is called when the handler is about to begin. The handler gets what it
	// returns, and the Traceparent that it writes to the attempt.
	Running(ctx context.Context, a *tasks.Attempt) context.Context

	// Ran is called when the handler has returned.
	Ran(err error)

	// Ended is called when the outcome is durable. An empty one means that there is none:
	// the handler did not begin, and the task was put back.
	Ended(outcome tasks.Outcome, err string)
}

// trace returns what follows an attempt.
func (w *Worker) trace(t *tasks.Task) Trace {
	if w.cfg.Tracer == nil {
		return untraced{}
	}
	return w.cfg.Tracer.Attempt(t)
}

// untraced follows nothing.
type untraced struct{}

func (untraced) Locked(error)                                                  {}
func (untraced) Running(ctx context.Context, _ *tasks.Attempt) context.Context { return ctx }
func (untraced) Ran(error)                                                     {}
func (untraced) Ended(tasks.Outcome, string)                                   {}
