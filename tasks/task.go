// Package tasks says what a task is and how its kinds run it.
//
// A [Task] is a claimed row of onejob.tasks. A [Kind] runs tasks of one name:
// [Handle] makes a kind of a typed Go function, and the packages kinds/exec,
// kinds/http and kinds/sql have those of the daemon. A kind's [Handler] gets an
// [Attempt], one try at one task, and a context that ends with the lease, the
// timeout, a cancel or a shutdown. It must return soon after the context has
// ended: the lock on the task is held until it does, or until Consul gives the
// lock away.
//
// The package does not know where tasks come from or where outcomes go.
package tasks

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"onejob/boottime"
)

// Task is one row of onejob.tasks, as it was when this replica claimed it.
type Task struct {
	ID          int64
	Kind        string
	Payload     json.RawMessage
	Queue       string
	Priority    int16
	LockKey     string        // what must not overlap; the row's lock_key, or its id
	LockShared  bool          // the row has a lock_key: others may have the same one
	Attempt     int           // counts from 1
	MaxAttempts int           // attempts after which a failure is final
	Crashes     int           // how many replicas died while they worked on it
	Stalls      int           // how many did not run for seconds, lost their leases and lived on
	Timeout     time.Duration // of one attempt; zero means none
	Fence       int64         // rises with every claim of the lock key
	Server      time.Time     // when the server was started that took the claim; zero if nobody asked
	Session     string        // the session that claimed it
	Replica     string        // the replica that claimed it
	CreatedAt   time.Time     // by Postgres' clock
	RunAt       time.Time     // when it came due, by Postgres' clock
	StartedAt   time.Time     // when it was claimed, by Postgres' clock

	// Traceparent is the trace that the attempt belongs to, as the HTTP header of that name
	// has it (W3C Trace Context): that of the row, or of a span of the replica if it traces;
	// empty if there is none.
	Traceparent string

	// HeardAt is when this replica heard that it had been claimed.
	HeardAt boottime.Instant
}

// IdempotencyKey names the task towards the outside. It is the same for every
// attempt, and differs between tasks even when a table is emptied and its
// identities start again.
func (t *Task) IdempotencyKey() string {
	return fmt.Sprintf("onejob-%d-%x", t.ID, t.CreatedAt.UnixMicro())
}

// An Attempt is one try at one task.
type Attempt struct {
	Task

	// Deadline returns the moment at which the lease runs out, as far as is
	// known now; each heartbeat moves it. It comes within seconds when the
	// replica stops and the context has ended. Never nil.
	Deadline func() boottime.Instant

	// Output keeps the head and the tail of what is written to it, for the
	// attempt's row. Never nil.
	Output *Output

	// Stopped is when all that the attempt had started was over, if a kind knows better
	// than by when its handler returns: the process may have been frozen then.
	Stopped boottime.Instant

	progress atomic.Pointer[Progress] // nil: the handler has not said how far it is
}

// Result is what a successful attempt leaves behind.
type Result struct {
	// Value is kept in the row's result column; nil leaves it null.
	Value json.RawMessage

	// Committed says that the success is already durable in Postgres, under
	// the fence: the kind wrote it in the transaction of its effect.
	Committed bool
}

// A Kind runs the tasks of one name. Many goroutines call Prepare at once.
type Kind interface {
	// Prepare parses a payload and returns the handler of one attempt. It
	// returns an error if the payload can never be run, for a reason that a
	// person can act on. The task then fails without another attempt. If the
	// error wraps [ErrUnknown], only this replica cannot run it: the task then
	// waits for one that can, and uses up no attempt.
	Prepare(payload json.RawMessage) (Handler, error)
}

// A Handler works on one attempt, and returns when nothing of that work goes on
// any more. An error fails the attempt; see [Permanent], [RetryAfter] and
// [Requeue] for what happens next.
type Handler func(ctx context.Context, a *Attempt) (Result, error)

// A Chooser is a [Kind] whose payloads choose something of the configuration by its name,
// as those of exec choose a command. Replicas write the names into onejob.replicas, so that
// onejob.why can tell that no replica has the one that a task asks for.
type Chooser interface {
	Kind

	// Names returns the field of the payload that holds the name, and all names that Prepare
	// does not refuse with [ErrUnknown].
	Names() (field string, names []string)
}

// Kinds holds what a replica can run, by the name that rows give in kind.
type Kinds map[string]Kind

// Names returns the names in kinds, sorted.
func (k Kinds) Names() []string { return slices.Sorted(maps.Keys(k)) }

// Choices returns the names that payloads can choose, by kind and field of the payload.
func (k Kinds) Choices() map[string]map[string][]string {
	choices := map[string]map[string][]string{}
	for kind, of := range k {
		if c, ok := of.(Chooser); ok {
			field, names := c.Names()
			choices[kind] = map[string][]string{field: append([]string{}, names...)}
		}
	}
	return choices
}

// Noop is a kind that does nothing, successfully. It accepts every payload.
type Noop struct{}

// Prepare accepts every payload.
func (Noop) Prepare(json.RawMessage) (Handler, error) {
	return func(context.Context, *Attempt) (Result, error) { return Result{}, nil }, nil
}
