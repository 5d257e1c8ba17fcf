package cli

import (
	"bytes"
	"strings"
	"testing"
)

// A program of onejob.Main has its own name in examples and before errors.
func TestAProgramOfAnotherName(t *testing.T) {
	t.Parallel()
	mailer := Program{Name: "mailer"}
	for _, c := range descendants(NewRoot(mailer)) {
		if strings.Contains(c.Example, "onejob ") {
			t.Errorf("%s has the examples\n%s", c.CommandPath(), c.Example)
		}
	}
	for _, test := range []struct {
		args string
		code int
		want string // in what it prints
	}{
		{"tasks list --help", 0, "  mailer tasks list --status failed -o json | jq '.tasks[].id'\n"},
		{"tasks wait --help", 0, "  mailer tasks wait 17 --timeout 10m && mailer tasks logs 17\n"},
		{"config --help", 0, "  mailer config >onejob.yaml\n"},
		{"enqueue noop --in -5m", exitUsage, "mailer: --in: -5m0s is below zero\n"},
		{"no-such-command", exitUsage, "mailer: unknown command \"no-such-command\" for \"mailer\"; see mailer --help\n"},
	} {
		var out bytes.Buffer
		if code := run(t.Context(), mailer, strings.Fields(test.args), strings.NewReader(""), &out, &out); code != test.code || !strings.Contains(out.String(), test.want) {
			t.Errorf("%s: exit code %d, and not %q:\n%s", test.args, code, test.want, out.String())
		}
	}
	var out bytes.Buffer
	c := NewRoot(Program{Name: "mailer"})
	c.SetErr(&out)
	if note(c, "%d tasks, and %[1]d more: %s", 2, "100%\x1b"); out.String() != "mailer: 2 tasks, and 2 more: 100%\\x1b\n" {
		t.Errorf("a note: %q", out.String())
	}
}
