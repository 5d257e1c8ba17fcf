package tasks_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"onejob/tasks"
)

type greeting struct {
	Name string `json:"name"`
}

func TestHandle(t *testing.T) {
	t.Parallel()
	failure := errors.New("no")
	kinds := tasks.Kinds{}
	tasks.Handle(kinds, "greet", func(_ context.Context, a *tasks.Attempt, p greeting) (map[string]string, error) {
		if p.Name == "nobody" {
			return nil, failure
		}
		return map[string]string{"greeting": "hello " + p.Name}, nil
	})
	tasks.Handle(kinds, "nothing", func(context.Context, *tasks.Attempt, greeting) (struct{}, error) {
		return struct{}{}, nil
	})
	tasks.Handle(kinds, "impossible", func(context.Context, *tasks.Attempt, greeting) (func(), error) {
		return func() {}, nil
	})
	run := func(kind, payload string) (tasks.Result, error) {
		return kinds[kind].Run(t.Context(), &tasks.Attempt{Task: tasks.Task{Payload: json.RawMessage(payload)}})
	}

	t.Run("returns the value as JSON", func(t *testing.T) {
		result, err := run("greet", `{"name": "you"}`)
		if err != nil || string(result.Value) != `{"greeting":"hello you"}` || result.Committed {
			t.Errorf("%s, %v", result.Value, err)
		}
	})
	t.Run("returns nothing for nothing", func(t *testing.T) {
		if result, err := run("nothing", `{}`); err != nil || result.Value != nil {
			t.Errorf("%s, %v", result.Value, err)
		}
	})
	t.Run("returns the function's error as it is", func(t *testing.T) {
		if _, err := run("greet", `{"name": "nobody"}`); err != failure {
			t.Errorf("%v", err)
		}
	})
	t.Run("refuses a payload that does not fit", func(t *testing.T) {
		if err := kinds["greet"].Check(json.RawMessage(`{"name": 1}`)); err == nil || !strings.Contains(err.Error(), "payload") {
			t.Errorf("Check: %v", err)
		}
		if _, err := run("greet", `{"name": 1}`); !tasks.IsPermanent(err) {
			t.Errorf("Run: %v", err)
		}
		if err := kinds["greet"].Check(json.RawMessage(`{"name": "you"}`)); err != nil {
			t.Errorf("Check of a good one: %v", err)
		}
	})
	t.Run("a value that JSON cannot carry is permanent", func(t *testing.T) {
		if _, err := run("impossible", `{}`); !tasks.IsPermanent(err) {
			t.Errorf("%v", err)
		}
	})
	t.Run("panics for a mistake of the program", func(t *testing.T) {
		for _, name := range []string{"", "greet"} {
			func() {
				defer func() {
					if recover() == nil {
						t.Errorf("%q was accepted", name)
					}
				}()
				tasks.Handle(kinds, name, func(context.Context, *tasks.Attempt, greeting) (int, error) { return 0, nil })
			}()
		}
	})
}
