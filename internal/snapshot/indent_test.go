package snapshot_test

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"onejob/internal/snapshot"
)

// deep is a list in lists, with a long list in the middle.
func deep(depth, length int) string {
	return strings.Repeat("[", depth) + "1" + strings.Repeat(",1", length) + strings.Repeat("]", depth)
}

func TestIndent(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ text, want string }{
		"Object":     {`{"a": [1, {"b": "[,{\\\""}], "c": {}}`, "{\n  \"a\": [\n    1,\n    {\n      \"b\": \"[,{\\\\\\\"\"\n    }\n  ],\n  \"c\": {}\n}"},
		"NoJSON":     {`[1, "`, `[1, "`},
		"Newline":    {"[1]\n", "[\n  1\n]\n"},
		"DeepIsLine": {deep(300, 21_000), deep(300, 21_000)},
		"DeepString": {`["` + strings.Repeat("[,", 50_000) + `"]`, "[\n  \"" + strings.Repeat("[,", 50_000) + "\"\n]"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := string(snapshot.Indent([]byte(test.text))); got != test.want {
				t.Errorf("%.300q, want %.300q", got, test.want)
			}
		})
	}
	if short := deep(20, 3000); !strings.Contains(string(snapshot.Indent([]byte(short))), "\n") {
		t.Error("a list that is 20 deep and has 3000 numbers is one line")
	}
}

// What is shown is never much more than there is, and never means anything else.
func TestIndentIsBounded(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		text := []byte(deep(rapid.IntRange(1, 2000).Draw(t, "depth"), rapid.IntRange(0, 100_000).Draw(t, "length")))
		got := snapshot.Indent(text)
		if len(got) > max(4*len(text), 256<<10) {
			t.Fatalf("%d bytes of %d", len(got), len(text))
		}
		var b bytes.Buffer
		if err := json.Compact(&b, got); err != nil || !bytes.Equal(b.Bytes(), text) {
			t.Fatalf("it is not the same any more: %v", err)
		}
	})
}
