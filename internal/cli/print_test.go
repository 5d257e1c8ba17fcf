package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"onejob/internal/testenv"
	"onejob/lock/consul"
	"onejob/store"
)

func TestPrintableJSONMeansTheSame(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	if err := printJSON(&b, []string{hostile, "日本 \U000e0041 \U0001f600"}); err != nil {
		t.Fatal(err)
	}
	if found := unsafe.FindString(b.String()); found != "" {
		t.Errorf("%q is in %s", found, b.String())
	}
	var back []string
	if err := json.Unmarshal(b.Bytes(), &back); err != nil || back[0] != hostile || back[1] != "日本 \U000e0041 \U0001f600" {
		t.Errorf("it reads as %q, %v", back, err)
	}
	if !strings.Contains(b.String(), `日本 \udb40\udc41 😀`) {
		t.Errorf("it is %s", b.String())
	}
}

// Output is not hundreds of times as long as the payload in it.
func TestADeepPayloadIsPrintedOnOneLine(t *testing.T) {
	t.Parallel()
	deep := strings.Repeat("[", 300) + "1" + strings.Repeat(",1", 21_000) + strings.Repeat("]", 300)
	var b bytes.Buffer
	if err := printJSON(&b, pageView{Tasks: []store.Row{{ID: 7, Payload: json.RawMessage(deep)}}}); err != nil {
		t.Fatal(err)
	}
	if b.Len() > 100_000 || !strings.Contains(b.String(), deep) || !strings.HasSuffix(b.String(), "}\n") {
		t.Errorf("a payload of %d bytes makes %d", len(deep), b.Len())
	}
}

func TestBetween(t *testing.T) {
	t.Parallel()
	begin := time.Date(2026, 11, 23, 9, 0, 0, 0, time.UTC)
	for d, want := range map[time.Duration]string{
		-time.Second: "0s", 0: "0s", 250*time.Millisecond + 300: "250ms", 4210 * time.Millisecond: "4.2s", 192 * time.Second: "3m12s",
		time.Hour: "1h0m", 5*time.Hour + 10*time.Minute + 29*time.Second: "5h10m", 47 * time.Hour: "47h0m", 49 * time.Hour: "2d", 24 * 400 * time.Hour: "400d",
	} {
		if got := between(store.Time{At: begin}, store.Time{At: begin.Add(d)}); got != want {
			t.Errorf("%v is %q, want %q", d, got, want)
		}
	}
	if got := between(store.Time{At: begin}, store.Time{Infinite: pgtype.Infinity}); got != "" {
		t.Errorf("until infinity: %q", got)
	}
}

func TestDidYouMean(t *testing.T) {
	t.Parallel()
	known := []string{"downloads", "mail", "nightly backup", "発送"}
	for name, want := range map[string]string{
		"download": "downloads", "Mail": "mail", "mial": "mail", "down": "downloads", "nightly-backup": "nightly backup", "発走": "発送",
		"uploads": "", "x": "", "m": "", "": "", "weekly": "", "mailing list": "",
	} {
		if want != "" {
			want = fmt.Sprintf("; did you mean %q?", want)
		}
		if got := didYouMean(name, known); got != want {
			t.Errorf("%q: %q, want %q", name, got, want)
		}
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
		{"tasks", "list"}, {"tasks", "show", "1"}, {"status"},
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
	if err := errors.Join(
		showLeader(&b, &consul.Leader{Replica: replica, Since: time.Now(), Session: hostile}),
		showLeader(&b, &consul.Leader{Value: []byte(hostile), Session: hostile}),
		showLimit(&b, limitView{Name: hostile, Holders: []holderView{{Session: hostile, Value: []byte(hostile)}}}),
	); err != nil {
		t.Fatal(err)
	}
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
