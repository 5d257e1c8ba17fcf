package tasks

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// FuzzPayload holds what the kinds make of payloads against what they may make
// of them: what Check accepts names something that is configured, and an exec
// command is given nothing that it does not allow.
func FuzzPayload(f *testing.F) {
	run := Exec{Commands: map[string]Command{"plain": {Path: "/bin/true"}, "open": {Path: "/bin/true", AllowArgs: true}}}
	call := newHTTP(f, HTTPConfig{Allow: []string{"https://example.com/v1"}})
	query := SQL{Statements: map[string]Statement{"touch": {SQL: "SELECT $1", Params: []string{"id"}}}}
	for _, seed := range []string{
		`{"command": "plain"}`, `{"command": "open", "args": ["a", "\u0000"]}`, `{"command": "plain", "args": [], "data": 1}`,
		`{"url": "https://example.com/v1/x", "method": "PUT", "headers": {"A": "b"}, "body": {"a": 1}}`,
		`{"statement": "touch", "params": {"id": 1}}`, `{"statement": "touch", "params": {"id": null, "x": 2}}`,
		`null`, `[]`, `"x"`, `{`, "", "{\"command\": \"\xff\"}",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		var object map[string]json.RawMessage
		isObject := json.Unmarshal(payload, &object) == nil && object != nil
		if err := run.Check(payload); err == nil {
			name, args, err := run.choose(payload)
			if err != nil || !isObject || len(args) > 0 && name != "open" {
				t.Errorf("exec accepts %q: command %q with %q, %v", payload, name, args, err)
			}
			for field := range object {
				if !slices.Contains([]string{"command", "args", "data"}, field) {
					t.Errorf("exec accepts %q: it does nothing with %q", payload, field)
				}
			}
			if strings.Contains(strings.Join(args, ""), "\x00") {
				t.Errorf("exec accepts %q: no process can be given %q", payload, args)
			}
		}
		if call.Check(payload) == nil && (!isObject || len(object["url"]) == 0) {
			t.Errorf("http accepts %q", payload)
		}
		if query.Check(payload) == nil {
			if s, args, err := query.parse(payload); err != nil || s.SQL != "SELECT $1" || len(args) != 1 {
				t.Errorf("sql accepts %q: %q with %d parameters, %v", payload, s.SQL, len(args), err)
			}
		}
	})
}

// FuzzSchedule checks that a cron line is refused or has due times that rise.
func FuzzSchedule(f *testing.F) {
	for _, seed := range []string{"30 2 * * *", "*/7 * * * * *", "0 0 30 2 *", "@hourly", "@every 90s", "0 0 29 2 1", "TZ=UTC 0 0 * * *", "@every 1ms", "60 * * * *"} {
		f.Add(seed, "Europe/Berlin", int64(1774746000))
		f.Add(seed, "Australia/Lord_Howe", int64(1775311200))
	}
	f.Fuzz(func(t *testing.T, line, zone string, at int64) {
		const year2200 = 7258118400
		if at %= year2200; at < 0 {
			at = -at
		}
		s, err := ParseSchedule(line, zone)
		if err != nil {
			if utf8.ValidString(line) && err.Error() == "" {
				t.Errorf("%q in %q is refused without a word", line, zone)
			}
			return
		}
		last := time.Unix(at, 0)
		for range 5 {
			next := s.Next(last)
			if next.IsZero() {
				return
			}
			if !next.After(last) {
				t.Fatalf("%q in %s: after %v comes %v", line, zone, last, next)
			}
			// Whoever asks a second before is told the same.
			if before := s.Next(next.Add(-time.Second)); !strings.HasPrefix(line, "@every") && !before.Equal(next) {
				t.Fatalf("%q in %s: after %v comes %v, not %v", line, zone, next.Add(-time.Second), before, next)
			}
			last = next
		}
	})
}
