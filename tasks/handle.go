package tasks

import (
	"context"
	"encoding/json"
	"fmt"
)

// Handle makes a kind of a typed Go function and puts it under name. The
// payload is decoded into a P; one that does not fit fails the task at once. So
// does one with a field that P has no place for, such as a misspelt one; to
// accept those take a [Lenient] of P, or a type with an UnmarshalJSON of its own.
// What fn returns besides the error is kept as the task's result, as JSON.
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
	kinds[name] = handler[P, R]{fn}
}

type handler[P, R any] struct {
	fn func(context.Context, *Attempt, P) (R, error)
}

func (h handler[P, R]) Check(payload json.RawMessage) error {
	var p P
	return decode(payload, &p)
}

func (h handler[P, R]) Run(ctx context.Context, a *Attempt) (Result, error) {
	var p P
	if err := decode(a.Payload, &p); err != nil {
		return Result{}, Permanent(err)
	}
	value, err := h.fn(ctx, a, p)
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
}
