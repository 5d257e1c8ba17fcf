package exec

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
)

// FuzzPayload checks that an accepted payload gives its command nothing that the
// command does not allow.
func FuzzPayload(f *testing.F) {
	k, err := New(Config{map[string]Command{"plain": {Path: "/bin/true"}, "open": {Path: "/bin/true", AllowArgs: true}}})
	if err != nil {
		f.Fatal(err)
	}
	for _, seed := range []string{
		`{"command": "plain"}`, `{"command": "open", "args": ["a", "\u0000"]}`, `{"command": "plain", "args": [], "data": 1}`,
		`null`, `[]`, `"x"`, `{`, "", "{\"command\": \"\xff\"}",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		c, err := k.parse(payload)
		if err != nil {
			return
		}
		var object map[string]json.RawMessage
		if json.Unmarshal(payload, &object) != nil || object == nil || len(c.args) > 0 && c.name != "open" {
			t.Errorf("%q is accepted: command %q with %q", payload, c.name, c.args)
		}
		for field := range object {
			if !slices.Contains([]string{"command", "args", "data"}, field) {
				t.Errorf("%q is accepted: nothing is done with %q", payload, field)
			}
		}
		if strings.Contains(strings.Join(c.args, ""), "\x00") {
			t.Errorf("%q is accepted: no process can be given %q", payload, c.args)
		}
	})
}
