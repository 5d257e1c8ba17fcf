package tasks_test

import (
	"context"
	"encoding/json"
	"errors"
	"testing"
	"time"

	"onejob/tasks"
)

type greeting struct {
	Name string `json:"name"`
}

type drawing struct {
	greeting
	Size   struct{ Width int } `json:"size,omitzero"`
	At     time.Time
	Hidden int `json:"-"`
}

// album has drawings, in every way that a payload can.
type album struct {
	drawing
	Title string `json:"title"`
	Cover drawing
	Back  *drawing
	Pages []drawing
	Loose []*drawing
	Named map[string]drawing
	Raw   json.RawMessage
	Old   tasks.Lenient[drawing]
	Sizes [1]struct{ Width int }
}

// post has embedded structs with names, what hides what, and what encoding/json does not know.
type (
	post struct {
		meta `json:"meta"`
		*Author
		left
		right
		ID
		N int
	}
	meta struct {
		Owner struct{} `json:"owner"`
		Items []struct{}
	}
	Author struct {
		N    struct{} // hidden
		City struct{}
	}
	left struct {
		Side struct{} `json:"left"`
		Same struct{}
		Both struct{}
	}
	right struct {
		Side struct{} `json:"right"`
		Same struct{} `json:"Same"`
		Both struct{}
	}
	ID string
)

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
	tasks.Handle(kinds, "draw", func(context.Context, *tasks.Attempt, *drawing) (struct{}, error) { return struct{}{}, nil })
	tasks.Handle(kinds, "album", func(context.Context, *tasks.Attempt, album) (struct{}, error) { return struct{}{}, nil })
	tasks.Handle(kinds, "albums", func(context.Context, *tasks.Attempt, []album) (struct{}, error) { return struct{}{}, nil })
	tasks.Handle(kinds, "lenient album", func(context.Context, *tasks.Attempt, tasks.Lenient[album]) (struct{}, error) {
		return struct{}{}, nil
	})
	tasks.Handle(kinds, "post", func(context.Context, *tasks.Attempt, tasks.Lenient[post]) (struct{}, error) { return struct{}{}, nil })
	tasks.Handle(kinds, "none", func(context.Context, *tasks.Attempt, struct{}) (struct{}, error) { return struct{}{}, nil })
	tasks.Handle(kinds, "lenient", func(_ context.Context, _ *tasks.Attempt, p tasks.Lenient[greeting]) (string, error) {
		return p.Value.Name, nil
	})
	tasks.Handle(kinds, "map", func(_ context.Context, _ *tasks.Attempt, p map[string]int) (int, error) { return len(p), nil })
	run := func(kind, payload string) (tasks.Result, error) {
		handler, err := kinds[kind].Prepare(json.RawMessage(payload))
		if err != nil {
			return tasks.Result{}, err
		}
		return handler(t.Context(), &tasks.Attempt{})
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
		if _, err := run("greet", `{"name": 1}`); err == nil || err.Error() != "payload: name cannot be a JSON number" {
			t.Errorf("%v", err)
		}
	})
	t.Run("refuses fields that the payload type does not have", func(t *testing.T) {
		for payload, want := range map[string]string{
			`{"NAME": "you"}`:                               "",
			`{"name": "you", "Name": "me"}`:                 `payload: "name" and "Name" are the same field`,
			` null `:                                        `payload: null is no object; for one without fields write {}`,
			`{"name": "you", "imge": "typo"}`:               `payload: unknown field "imge"; allowed are size, At, name`,
			`{"name": "you", "size": {"widht": 7}}`:         `payload: unknown field "widht"`,
			`{"name": "you", "size": {"width": 7}}`:         "",
			`{"name": "you", "At": "2026-01-02T00:00:00Z"}`: "",
			`{"name": "you"} {}`:                            `payload: something follows the JSON value`,
		} {
			got := ""
			if _, err := run("draw", payload); err != nil {
				got = err.Error()
			}
			if got != want {
				t.Errorf("%s: %q, want %q", payload, got, want)
			}
		}
		const null = ": null is no object; leave the field out or write {}"
		for payload, want := range map[string]string{
			`{"size": null}`:            `payload: "size"` + null,
			`{"Cover": null}`:           `payload: "Cover"` + null,
			`{"cover": {"size": null}}`: `payload: "size"` + null,
			`{"Back": null, "Pages": null, "At": null, "title": null}`: "",
			`{"Back": {"size": null}}`:                                 `payload: "size"` + null,
			`{"Pages": [{}, null]}`:                                    `payload: "Pages"` + null,
			`{"Loose": [{}, null]}`:                                    "",
			`{"Loose": [{"name": "a", "NAME": "b"}]}`:                  `payload: "name" and "NAME" are the same field`,
			`{"Old": {"more": 1, "MORE": 2}}`:                          "",
			`{"Old": null}`:                                            `payload: null is no object; for one without fields write {}`,
			`{"Old": {"name": "a", "NAME": "b"}}`:                      `payload: "name" and "NAME" are the same field`,
			`{"Named": {"a": {"size": null}, "A": {}}}`:                "",
			`{"Raw": {"a": null, "A": 1}}`:                             "",
			`{"Sizes": [{}, null]}`:                                    "",
			`{"Sizes": [null]}`:                                        `payload: "Sizes"` + null,
			`{"Cover": {"size": {"Width": 1}}, "size": {"Width": 1}, "title": "", "name": ""}`: "",
			`{"Cover": {"size": {"Width": 1, "width": 2}}}`:                                    `payload: "Width" and "width" are the same field`,
		} {
			for kind, payload := range map[string]string{"album": payload, "albums": "[{}, " + payload + "]", "lenient album": payload} {
				got := ""
				if _, err := run(kind, payload); err != nil {
					got = err.Error()
				}
				if got != want {
					t.Errorf("%s: %s: %q, want %q", kind, payload, got, want)
				}
			}
		}
		for payload, want := range map[string]string{
			`null`:                          `payload: null is no object; for one without fields write {}`,
			`{"title": "a", "Title": "b"}`:  `payload: "title" and "Title" are the same field`,
			`{"other": null, "OTHER": "b"}`: "",
		} {
			got := ""
			if _, err := run("lenient album", payload); err != nil {
				got = err.Error()
			}
			if got != want {
				t.Errorf("lenient album: %s: %q, want %q", payload, got, want)
			}
		}
		for payload, want := range map[string]string{
			`{"owner": null, "Items": null}`:    "",
			`{"owner": {}, "Owner": {}}`:        "",
			`{"items": {"a": 1}}`:               "",
			`{"N": 1, "ID": "x", "Both": null}`: "",
			`{"meta": {"owner": null}}`:         `payload: "owner"` + null,
			`{"meta": {"Items": [null]}}`:       `payload: "Items"` + null,
			`{"City": null}`:                    `payload: "City"` + null,
			`{"left": null}`:                    `payload: "left"` + null,
			`{"right": null}`:                   `payload: "right"` + null,
			`{"Same": null}`:                    `payload: "Same"` + null,
			`{"id": "x", "ID": "y"}`:            `payload: "id" and "ID" are the same field`,
		} {
			got := ""
			if _, err := run("post", payload); err != nil {
				got = err.Error()
			}
			if got != want {
				t.Errorf("post: %s: %q, want %q", payload, got, want)
			}
		}
		if _, err := run("none", `{"a": 1}`); err == nil || err.Error() != `payload: unknown field "a"; no fields are allowed` {
			t.Errorf("a field where there are none: %v", err)
		}
	})
	t.Run("accepts them for Lenient and for maps", func(t *testing.T) {
		if result, err := run("lenient", `{"name": "you", "imge": "typo"}`); err != nil || string(result.Value) != `"you"` {
			t.Errorf("Lenient: %s, %v", result.Value, err)
		}
		sent, err := json.Marshal(tasks.Lenient[greeting]{Value: greeting{Name: "me"}}) // as a program enqueues it
		if err != nil {
			t.Fatal(err)
		}
		if result, err := run("lenient", string(sent)); err != nil || string(result.Value) != `"me"` {
			t.Errorf("Lenient that was enqueued as %s: %s, %v", sent, result.Value, err)
		}
		if _, err := run("lenient", `{"name": 1}`); err == nil {
			t.Error("Lenient accepts a name that is a number")
		}
		if result, err := run("map", `{"a": 1}`); err != nil || string(result.Value) != "1" {
			t.Errorf("map: %s, %v", result.Value, err)
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
