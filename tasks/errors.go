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

// ErrRefused is returned by a kind that commits its own success, when the
// fence has been superseded: another replica holds the task, and nothing of
// this attempt was kept.
var ErrRefused = errors.New("the fence has been superseded")

// Permanent marks an error that another attempt cannot mend: the task fails
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
	var p *permanentError
	return errors.As(err, &p)
}

type permanentError struct{ error }

func (e *permanentError) Unwrap() error { return e.error }

// RetryAfter marks an error after which the next attempt must not begin before
// d has passed, whatever the usual backoff is. RetryAfter(d, nil) is nil.
func RetryAfter(d time.Duration, err error) error {
	if err == nil {
		return nil
	}
	return &retryAfterError{err, d}
}

// RetryDelay returns the delay that [RetryAfter] asked for in err or in one
// that it wraps, and whether it did.
func RetryDelay(err error) (time.Duration, bool) {
	var r *retryAfterError
	if errors.As(err, &r) {
		return r.after, true
	}
	return 0, false
}

type retryAfterError struct {
	error
	after time.Duration
}

func (e *retryAfterError) Unwrap() error { return e.error }

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
