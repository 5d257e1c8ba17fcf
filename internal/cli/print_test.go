package cli

import (
	"bytes"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/internal/testenv"
	"onejob/lock/consul"
)

func TestPrintable(t *testing.T) {
	t.Parallel()
	for s, want := range map[string]string{
		"":                             "",
		"Zoë 日本　語 e\u0301 ✅ \\n":       "Zoë 日本　語 e\u0301 ✅ \\n", // ordinary text
		"a\x1b[31mb\x07\x00\x7f":       `a\x1b[31mb\x07\x00\x7f`,
		"a\nb\r\tc\v":                  `a\nb\r\tc\x0b`,
		"\u009b31m":                    `\u009b31m`, // a C1 control: CSI in one character
		"\u202eevil\u2066\u200f\ufeff": `\u202eevil\u2066\u200f\ufeff`,
		"\u2028\u2029\u200b":           `\u2028\u2029\u200b`,
		"\U000e0041":                   `\U000e0041`, // a tag, which nobody sees
		"\xff\x9b\xc3":                 `\xff\x9b\xc3`,
		"\ufffd":                       "\ufffd",
	} {
		if got := printable(s); got != want {
			t.Errorf("printable(%q) = %s, want %s", s, got, want)
		}
	}
	if got, want := printableLines("a\tb\r\n\x1b[2J\rc\n"), "a    b\n"+`\x1b[2J\rc`+"\n"; got != want {
		t.Errorf("printableLines: %q, want %q", got, want)
	}
}

// hostile is what somebody may write into any column of text that takes it: it
// clears the screen, sets a title, fills the clipboard, turns the direction and
// forges a row. forged is how that row would begin.
const (
	hostile = "ev\x1b[2J\x1b]0;pwned\x07\x1b]52;c;ZXZpbA==\x07\u202e\u009b31m\tx\r\nforged row"
	forged  = "\nforged"
)

var unsafe = regexp.MustCompile(`[\x00-\x09\x0b-\x1f\x7f-\x{9f}\x{200b}-\x{200f}\x{2028}-\x{202e}\x{2066}-\x{2069}]`)

// Not parallel: the commands read the environment.
func TestNoRowCanWriteToTheTerminal(t *testing.T) {
	db, kv := testenv.Postgres(t), testenv.Consul(t)
	t.Setenv("ONEJOB_POSTGRES_DSN", db.DSN)
	t.Setenv("CONSUL_HTTP_ADDR", kv.Addr)
	t.Setenv("ONEJOB_CONSUL_PREFIX", kv.Prefix)
	t.Setenv("ONEJOB_CONFIG", "")
	os.Unsetenv("ONEJOB_CONFIG")
	onejob := func(args ...string) (string, int) {
		t.Helper()
		var out bytes.Buffer
		code := run(t.Context(), Program{}, args, strings.NewReader(""), &out, &out)
		return out.String(), code
	}
	if out, code := onejob("migrate", "up"); code != 0 {
		t.Fatal(out)
	}
	pool := db.Pool(t)
	// Such names are from before the tables refused them.
	if _, err := pool.Exec(t.Context(), `
ALTER TABLE onejob.tasks DISABLE TRIGGER USER;
ALTER TABLE onejob.schedules DISABLE TRIGGER kind_has_no_control_characters;
ALTER TABLE onejob.schedules DISABLE TRIGGER queue_has_no_control_characters;
ALTER TABLE onejob.schedules DISABLE TRIGGER limit_name_begins_with_no_dot_and_has_no_slash_space_or_control;
ALTER TABLE onejob.schedules DROP CONSTRAINT name_has_no_control_characters`, pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatal(err)
	}
	for _, statement := range []string{
		`INSERT INTO onejob.tasks (kind, payload, queue, limit_name, unique_key, status, session, replica, error, result, fence, started_at)
			VALUES ($1, jsonb_build_object('a', $1::text), $1, $1, $1, 'running', gen_random_uuid(), $1, $1, jsonb_build_object('a', $1::text), 1, now())`,
		`INSERT INTO onejob.attempts (task_id, fence, attempt, lock_key, replica, session, started_at, finished_at, outcome, error, output)
			VALUES (1, 1, 1, $1, $1, gen_random_uuid(), now(), now(), 'failed', $1, $1)`,
		`INSERT INTO onejob.schedules (name, cron, kind, payload, queue, limit_name, error)
			VALUES ($1, '@daily', $1, jsonb_build_object('a', $1::text), $1, $1, $1)`,
		`UPDATE onejob.schedules SET error = $1`,
	} {
		if _, err := pool.Exec(t.Context(), statement, hostile); err != nil {
			t.Fatal(err)
		}
	}
	for _, args := range [][]string{
		{"tasks", "list"}, {"tasks", "show", "1"},
		{"schedules", "list"}, {"schedules", "show", hostile}, {"schedules", "disable", hostile}, {"schedules", "preview", hostile},
		{"schedules", "enable", hostile}, {"schedules", "enable", "no" + hostile},
		{"schedules", "backfill", hostile, "--from", "2026-01-01", "--to", "2026-01-02", "--dry-run"},
		{"enqueue", "noop", "--unique-key", hostile}, {"limits", "show", hostile},
	} {
		out, _ := onejob(args...)
		// A command's output keeps its line breaks, indented.
		safe(t, strings.Join(args, " "), strings.ReplaceAll(out, "\n    forged row", ""))
	}
	out, _ := onejob("tasks", "show", "1")
	if !strings.Contains(out, "  output:\n    ev\\x1b[2J") || !strings.Contains(out, "\\u009b31m    x\n    forged row\n") {
		t.Errorf("the output is not in\n%s", out)
	}
	if out, _ := onejob("tasks", "show", "1", "-o", "json"); !strings.Contains(out, `ev\u001b[2J`) {
		t.Errorf("-o json has changed the text:\n%s", out)
	}

	var b bytes.Buffer
	replica := consul.Replica{Name: hostile, Host: hostile, HTTP: hostile, Version: hostile}
	showLeader(&b, &consul.Leader{Replica: replica, Since: time.Now(), Session: hostile})
	showLeader(&b, &consul.Leader{Value: []byte(hostile), Session: hostile})
	showLimit(&b, limitView{Name: hostile, Holders: []holderView{{Session: hostile, Value: []byte(hostile)}}})
	safe(t, "leader and limits", b.String())
}

func safe(t *testing.T, what, out string) {
	t.Helper()
	if out == "" {
		t.Errorf("%s prints nothing", what)
	}
	if found := unsafe.FindString(out); found != "" || strings.Contains(out, forged) {
		t.Errorf("%s prints %s:\n%s", what, fmt.Sprintf("%q", found), fmt.Sprintf("%q", out))
	}
}
