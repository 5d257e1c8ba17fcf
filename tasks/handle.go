package tasks

import (
	"context"
	"encoding/json"
	"fmt"

	"onejob/internal/payload"
)

// Handle makes a kind of a typed Go function and puts it under name. The
// payload is decoded into a P; one that does not fit fails the task at once. So
// does one with a field that P has no place for, such as a misspelt one; to
// accept those take a [Lenient] of P, or a type with an UnmarshalJSON of its own.
// What fn returns besides the error is kept as the task's result, as JSON; null and an empty
// object are not kept, so a handler without a result can return struct{}{}.
//
// fn must return soon after ctx has ended: nobody can stop a goroutine from
// outside, and until it returns its slot stays taken.
//
// Handle panics if name is empty or taken: both are mistakes of the program.
func Handle[P, R any](kinds Kinds, name string, fn func(ctx context.Context, a *Attempt, payload P) (R, error)) {
	if name == "" {
		panic("tasks: a kind needs a name")
	}
	if _, taken := kinds[name]; taken {
		panic(fmt.Sprintf("tasks: kind %q is registered twice", name))
	}
	kinds[name] = typed[P, R]{fn}
}

type typed[P, R any] struct {
	fn func(context.Context, *Attempt, P) (R, error)
}

// Prepare decodes the payload.
func (k typed[P, R]) Prepare(raw json.RawMessage) (Handler, error) {
	var p P
	if err := payload.Decode(raw, &p); err != nil {
		return nil, err
	}
	return func(ctx context.Context, a *Attempt) (Result, error) {
		value, err := k.fn(ctx, a, p)
		if err != nil {
			return Result{}, err
		}
		raw, err := json.Marshal(value)
		if err != nil {
			return Result{}, Permanent(fmt.Errorf("encode the result: %w", err))
		}
		if string(raw) == "null" || string(raw) == "{}" {
			raw = nil
		}
		return Result{Value: raw}, nil
	}, nil
}

// Lenient is a payload type for [Handle] that accepts, and drops, fields that P
// has no place for:
//
//	tasks.Handle(kinds, "resize", func(ctx context.Context, a *tasks.Attempt, p tasks.Lenient[Resize]) (Result, error) {
//		return resize(ctx, p.Value)
//	})
//
// What [Handle] refuses besides is refused here, too: null for a struct, and two names that
// differ in case alone.
type Lenient[P any] struct{ Value P }

// UnmarshalJSON decodes into Value.
func (l *Lenient[P]) UnmarshalJSON(b []byte) error {
	if err := json.Unmarshal(b, &l.Value); err != nil {
		return err
	}
	return payload.Check(b, &l.Value)
}

// MarshalJSON encodes Value alone, as UnmarshalJSON reads it.
func (l Lenient[P]) MarshalJSON() ([]byte, error) { return json.Marshal(l.Value) }
