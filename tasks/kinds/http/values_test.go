package http

import (
	"bytes"
	"encoding/json"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"
)

// What need not be replaced is kept as it came, and says the same as if it had been decoded.
func TestBodiesThatAreKeptAsTheyAre(t *testing.T) {
	t.Parallel()
	text := rapid.SampledFrom([]string{`"a"`, `"b"`, `""`, `"\u0000"`, `"\ud800"`, `"ü"`, "\"\xff\""})
	scalar := rapid.OneOf(text, rapid.SampledFrom([]string{`1`, `-0`, `1e400`, `1e-400`, `0e-999`, `0.0E-20000`, `0.00`, `true`, `null`, `[]`, `{}`}))
	member := rapid.Custom(func(t *rapid.T) string { return text.Draw(t, "key") + ": " + scalar.Draw(t, "value") })
	list := func(of *rapid.Generator[string], open, shut string) *rapid.Generator[string] {
		return rapid.Map(rapid.SliceOfN(of, 0, 3), func(some []string) string { return open + strings.Join(some, ", ") + shut })
	}
	value := rapid.OneOf(scalar, list(scalar, "[", "]"), list(member, "{", "}"))
	decode := func(text []byte) (value any) {
		d := json.NewDecoder(bytes.NewReader(text))
		d.UseNumber()
		if err := d.Decode(&value); err != nil {
			t.Error(err)
		}
		return value
	}
	rapid.Check(t, func(t *rapid.T) {
		body := []byte(list(value, "[", "]").Draw(t, "body"))
		want, ok := storable(decode(body), maxResultDepth)
		foreign := bytes.Contains(body, []byte("ud800")) || !utf8.Valid(body) // which Postgres would refuse
		if asItIs(body) && (!ok || foreign || !reflect.DeepEqual(want, decode(body))) {
			t.Fatalf("%q is kept, and would be %v (%v)", body, want, ok)
		}
	})
}

// Nor does a body of many small values take many times its size.
func TestManyValuesTakeLittleMemory(t *testing.T) {
	for name, body := range map[string]string{
		"kept":     "[" + strings.Repeat("{},", 300_000) + "{}]",
		"replaced": "[" + strings.Repeat("{},", 300_000) + `"\u0000"]`,
	} {
		in := incoming{body: []byte(body)}
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		value := in.value()
		runtime.GC()
		runtime.ReadMemStats(&after)
		if held := int64(after.HeapAlloc) - int64(before.HeapAlloc); held > int64(4*len(body)) {
			t.Errorf("%s: %d bytes are held for a body of %d", name, held, len(body))
		}
		if _, raw := value.(json.RawMessage); raw != (name == "kept") {
			t.Errorf("%s: it is a %T", name, value)
		}
		runtime.KeepAlive(value)
	}
}

// What is no status of HTTP says nothing of another attempt.
func TestStatusesThatAreTriedAgain(t *testing.T) {
	t.Parallel()
	for status, want := range map[int]bool{200: false, 404: false, 408: true, 429: true, 500: true, 599: true, 600: false, 999: false} {
		if got := triesAgain(status); got != want {
			t.Errorf("%d: %t", status, got)
		}
	}
}
