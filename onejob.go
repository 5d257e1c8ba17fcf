// Package onejob embeds onejob in a Go program: handlers are Go functions, and tasks are
// enqueued in the program's own transactions.
//
// The whole main of a program that runs tasks of a kind "greet":
//
//	func main() {
//		onejob.Main(onejob.Handle("greet", greet))
//	}
//
//	func greet(ctx context.Context, a *onejob.Attempt, p Greeting) (string, error) {
//		return "hello " + p.Name, nil
//	}
//
// The program has all commands of onejob, such as serve, check and dev. It reads the same
// configuration file and the same environment. [Main] needs Linux.
//
// [Enqueue], [EnqueueTx] and [EnqueueMany] add tasks. They need no replica in the same
// program, and no Consul.
//
// Package onejobtest runs handlers in tests, without servers. Package worker is the
// replica as a library, for programs that bring their own configuration. Package lock
// says what a lock service of one's own must do.
package onejob

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"onejob/store"
	"onejob/tasks"
)

// Attempt is one try at a task, as a handler gets it: the row, the fencing token, the
// lease's deadline and a place for output.
type Attempt = tasks.Attempt

// Kinds are handlers by the name that rows give in kind.
type Kinds = tasks.Kinds

// NewTask is a task to enqueue. Kind is required; zero values of the other fields mean the
// defaults of the table.
type NewTask = store.NewTask

// Handle returns fn as the handler of the tasks of one kind.
//
// The payload is decoded into a P. A payload that does not fit fails the task at once,
// and so does one with a field that P does not have, such as a misspelt one; take
// [tasks.Lenient] of P to accept unknown fields. What fn returns is stored as the task's
// result, as JSON. An error fails the attempt, which is retried; [tasks.Permanent],
// [tasks.RetryAfter] and [tasks.Requeue] change that.
//
// ctx ends with the lease, the timeout, a cancel or a shutdown. fn must return soon after:
// nobody can stop a goroutine from outside.
//
// Handle panics if kind is empty.
func Handle[P, R any](kind string, fn func(ctx context.Context, a *Attempt, payload P) (R, error)) Kinds {
	kinds := Kinds{}
	tasks.Handle(kinds, kind, fn)
	return kinds
}

// merge returns all kinds as one. A name that is there twice is a mistake of the program.
func merge(all []Kinds) Kinds {
	one := Kinds{}
	for _, kinds := range all {
		for name, kind := range kinds {
			if _, taken := one[name]; taken {
				panic(fmt.Sprintf("onejob: kind %q is registered twice", name))
			}
			one[name] = kind
		}
	}
	return one
}

// A DB runs statements: a *pgxpool.Pool, a *pgx.Conn or a pgx.Tx.
type DB = store.DB

// Enqueue adds a task and returns its ID. It returns 0 and no error if t has a UniqueKey
// and a pending or running task has the same one.
//
// The error is Postgres' own, wrapped, if a constraint refuses the row: the constraint's
// name says why.
func Enqueue(ctx context.Context, db DB, t NewTask) (id int64, err error) {
	ids, err := store.Enqueue(ctx, db, t)
	if err != nil {
		return 0, err
	}
	return ids[0], nil
}

// EnqueueTx is [Enqueue] in a transaction of the program's own: the task exists if and
// when tx commits.
func EnqueueTx(ctx context.Context, tx pgx.Tx, t NewTask) (id int64, err error) {
	return Enqueue(ctx, tx, t)
}

// EnqueueMany adds tasks in one round trip, all or none, and returns their IDs in the same
// order. An ID is 0 if the task was not added because of its UniqueKey.
//
// Two transactions that add tasks with the same UniqueKeys in different orders may wait for each
// other; Postgres then ends one of them (deadlock_detected). Add them in one order, or try again.
func EnqueueMany(ctx context.Context, db DB, list []NewTask) (ids []int64, err error) {
	return store.Enqueue(ctx, db, list...)
}
