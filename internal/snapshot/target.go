package snapshot

import (
	"encoding/json"
	"net/url"
	"strings"
)

// Target says what a task works on: the command of an exec task, the URL of an http
// task without its query, the statement of an sql task, and the payload of any other.
func Target(kind string, payload json.RawMessage) string {
	var p struct {
		Command   string
		Args      []string
		Method    string
		URL       string
		Statement string
	}
	builtIn := json.Unmarshal(payload, &p) == nil
	switch {
	case builtIn && kind == "exec" && p.Command != "":
		return strings.Join(append([]string{p.Command}, p.Args...), " ")
	case builtIn && kind == "http" && p.URL != "":
		u, err := url.Parse(p.URL)
		if err != nil {
			return ""
		}
		u.RawQuery, u.User = "", nil // may hold secrets
		return strings.TrimSpace(p.Method + " " + u.String())
	case kind == "http": // of another form, or cut off: it may hold secrets anywhere
		return ""
	case builtIn && kind == "sql" && p.Statement != "":
		return p.Statement
	case string(payload) == "{}":
		return ""
	}
	return string(payload)
}
