package tasks

import (
	"errors"
	"time"
)

// Causes with which an attempt's context ends, besides the lease's own
// (lock.ErrLost and lock.ErrRevoked). A kind may ask context.Cause for them.
var (
	ErrTimeout   = errors.New("the attempt took longer than its timeout")
	ErrCancelled = errors.New("the task was cancelled")
	ErrShutdown  = errors.New("the replica is shutting down")
)

// ErrLeaseEnded is in the error of a task that was not started, or of an exec task that was
// stopped, because the lease ran out. The attempt's context may not have
// ended yet: the guard of the process goes by the lease alone.
var ErrLeaseEnded = errors.New("the lease ran out")

// ErrRefused is returned by a kind that commits its own success, when the
// fence has been superseded: another replica holds the task, and nothing of
// this attempt was kept. From any other handler it is an error like others: the
// attempt fails if the row is still its own.
var ErrRefused = errors.New("the fence has been superseded")

// ErrUnwritable is returned by a store to which Postgres says that the row cannot be
// changed, because of what it holds or what guards it. To ask again is of no use.
var ErrUnwritable = errors.New("the row cannot be changed")

// Permanent marks an error that another attempt cannot fix: the task fails
// now. Permanent(nil) is nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &permanentError{err}
}

// IsPermanent reports whether err, or one that it wraps, was marked by
// [Permanent].
func IsPermanent(err error) bool {
	return errors.As(err, new(*permanentError))
}

type permanentError struct{ error }

func (e *permanentError) Unwrap() error { return e.error }

// RetryAfter marks an error after which the next attempt must not begin before
// d has passed, whatever the usual backoff is. RetryAfter(d, nil) is nil.
func RetryAfter(d time.Duration, err error) error {
	if err == nil {
		return nil
	}
	return &retryAfterError{delayed{err, d}}
}

// RetryDelay returns the delay that [RetryAfter] asked for in err or in one
// that it wraps, and whether it did.
func RetryDelay(err error) (time.Duration, bool) {
	if r, ok := errors.AsType[*retryAfterError](err); ok {
		return r.after, true
	}
	return 0, false
}

type retryAfterError struct{ delayed }

// delayed is an error with a delay.
type delayed struct {
	error
	after time.Duration
}

func (e *delayed) Unwrap() error { return e.error }

// Requeue marks an error that is not the task's fault: the task goes back to
// pending without using up an attempt, however many it has left, and is not due
// again before d has passed. A d of zero leaves the delay to the worker. An
// error that is [Permanent] as well fails the task. Requeue(d, nil) is nil.
//
// It is about an attempt that nothing else has ended. One that was cancelled or has lost its lease
// ends as that, and a timeout uses up the attempt, whatever the handler returns then.
func Requeue(d time.Duration, err error) error {
	if err == nil {
		return nil
	}
	return &requeueError{delayed{err, d}}
}

// RequeueDelay returns the delay that [Requeue] asked for in err or in one that
// it wraps, and whether it did.
func RequeueDelay(err error) (time.Duration, bool) {
	if r, ok := errors.AsType[*requeueError](err); ok {
		return r.after, true
	}
	return 0, false
}

type requeueError struct{ delayed }

// ErrUnknown is in the error of a [Kind] whose payload is well-formed but
// names something that this replica's configuration lacks: a command, a
// statement, an endpoint. Another replica may have it, so the task waits for one
// instead of failing. Return an [*UnknownError] to say what is missing.
var ErrUnknown = errors.New("unknown to this replica")

// UnknownError is an [ErrUnknown] with the name of what this replica lacks.
type UnknownError struct {
	Name string // as in the log; no secrets
	Err  error  // what is missing and where to configure it
}

func (e *UnknownError) Error() string { return e.Err.Error() }

// Unwrap returns ErrUnknown and the cause.
func (e *UnknownError) Unwrap() []error { return []error{ErrUnknown, e.Err} }

// ExitError is the failure of an exec task's process.
type ExitError struct {
	Code int // the exit code, or 128 plus the signal's number
	err  error
}

// NewExitError returns an ExitError with a code and a message.
func NewExitError(code int, message string) *ExitError {
	return &ExitError{Code: code, err: errors.New(message)}
}

func (e *ExitError) Error() string { return e.err.Error() }
