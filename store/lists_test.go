package store_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"onejob/internal/snapshot"
	"onejob/internal/testenv"
	"onejob/store"
)

// finished plants n tasks that have ended, the newest of which are younger than
// all others.
func (b *bench) finished(status string, n int) {
	b.t.Helper()
	b.sql(`INSERT INTO onejob.tasks (kind, queue, status, finished_at)
		SELECT 'noop', 'default', $1, now() FROM generate_series(1, $2) i`, status, n)
}

// pages follows a list from page to page, and returns the ids of all of them.
func (b *bench) pages(f store.Filter) (ids []int64, pages int, cut bool) {
	b.t.Helper()
	for {
		p := b.page(f)
		if len(p.Rows) > f.Limit || (len(p.Rows) < f.Limit && p.Next != 0 && !p.Cut) {
			b.t.Fatalf("%+v: a page of %d rows, next %d, cut %v", f, len(p.Rows), p.Next, p.Cut)
		}
		for _, r := range p.Rows {
			ids = append(ids, r.ID)
		}
		pages, cut = pages+1, cut || p.Cut
		if p.Next == 0 {
			return ids, pages, cut
		}
		f.Before = p.Next
	}
}

func TestListsArePagesOfWhatTheFilterChooses(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`
INSERT INTO onejob.tasks (kind, queue, status, limit_name, session, replica, fence, started_at, finished_at)
SELECT (ARRAY['noop', 'exec'])[1 + i % 2], (ARRAY['default', 'mail', 'slow'])[1 + i % 3], s, CASE WHEN i % 5 = 0 THEN 'l' END,
       CASE WHEN s = 'running' THEN gen_random_uuid() END, CASE WHEN s = 'running' THEN 'r' END, i, now(), CASE WHEN s IN ('succeeded', 'failed', 'cancelled') THEN now() END
  FROM generate_series(1, 300) i
 CROSS JOIN LATERAL (SELECT (ARRAY['pending', 'running', 'succeeded', 'failed', 'cancelled'])[1 + i / 2 % 5] AS s) statuses`)
	for _, status := range []string{"", "pending", "running", "succeeded", "failed", "cancelled"} {
		for _, kind := range []string{"", "noop", "none"} {
			for _, queue := range []string{"", "mail"} {
				want := b.sql(`
SELECT id
  FROM onejob.tasks
 WHERE ($1 = '' OR status = $1)
   AND ($2 = '' OR kind   = $2)
   AND ($3 = '' OR queue  = $3)
 ORDER BY id DESC`, status, kind, queue)
				for _, limit := range []int{1, 7, len(want), 1000} {
					f := store.Filter{Status: status, Kind: kind, Queue: queue, Limit: max(limit, 1)}
					ids, pages, cut := b.pages(f)
					if fmt.Sprint(ids) != "["+strings.Join(want, " ")+"]" {
						t.Errorf("%+v: got %v, want %v", f, ids, want)
					}
					if wantPages := max(1, (len(want)+f.Limit-1)/f.Limit); pages != wantPages || cut {
						t.Errorf("%+v: %d pages of %d rows, want %d; cut %v", f, pages, len(want), wantPages, cut)
					}
				}
			}
		}
	}
}

// A list that no index serves ends after so many tasks, and goes on from there.
func TestNamesAreThoseInUse(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	if names, err := b.Names(b.t.Context()); err != nil || len(names.Queues) != 0 || len(names.Kinds) != 0 {
		t.Errorf("of an empty schema: %v, %v", names, err)
	}
	b.sql(`INSERT INTO onejob.tasks (kind, queue) SELECT 'old', 'old' FROM generate_series(1, 10)`)
	b.sql(`INSERT INTO onejob.tasks (kind, queue) SELECT 'noop', 'mail' FROM generate_series(1, 1000)`)
	b.sql(`INSERT INTO onejob.schedules (name, cron, kind, queue) VALUES ('s', '@daily', 'exec', 'mail'), ('t', '@daily', 'exec', 'nightly')`)
	names, err := b.Names(b.t.Context())
	if err != nil || !slices.Equal(names.Queues, []string{"mail", "nightly"}) || !slices.Equal(names.Kinds, []string{"exec", "noop"}) {
		t.Errorf("%v, %v", names, err)
	}
}

func TestListsThatLookAtTooMuchGoOnLater(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	rare := b.insert("kind='rare'")
	b.finished("failed", 1)
	b.sql(`UPDATE onejob.tasks SET kind = 'rare' WHERE status = 'failed'`)
	b.finished("failed", 9000)
	b.finished("succeeded", 3000)
	for _, f := range []store.Filter{
		{Kind: "rare", Limit: 50, Scan: 4000},
		{Kind: "rare", Status: "failed", Limit: 50, Scan: 4000},
	} {
		p, err := b.List(t.Context(), f)
		if err != nil || len(p.Rows) > 0 || !p.Cut || p.Next == 0 {
			t.Errorf("%+v: %d rows, next %d, cut %v, %v", f, len(p.Rows), p.Next, p.Cut, err)
		}
		ids, pages, _ := b.pages(f)
		want := "[2 1]"
		if f.Status != "" {
			want = "[2]"
		}
		if fmt.Sprint(ids) != want || pages < 2 {
			t.Errorf("%+v: %v on %d pages, want %s; the first is %s", f, ids, pages, want, rare)
		}
		f.Scan = 0
		if _, pages, cut := b.pages(f); pages != 1 || cut {
			t.Errorf("%+v: %d pages, cut %v", f, pages, cut)
		}
	}
}

// No statement of a list reads more than some thousands of rows, however many
// there are, whatever the planner knows of them. ONEJOB_LIST_ROWS is another
// number of tasks that succeeded than 50,000.
func TestListsReadFewRows(t *testing.T) {
	t.Parallel()
	n := number("ONEJOB_LIST_ROWS", 50_000)
	for _, statistics := range []string{"none", "ofAnEmptyTable", "analyzed"} {
		t.Run(statistics, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			b.Store = open(t, store.Config{DSN: b.dsn, MaxConns: 1})
			b.sql(`ALTER TABLE onejob.tasks SET (autovacuum_enabled = false)`)
			filters := []store.Filter{{}}
			for _, status := range []string{"pending", "running", "succeeded", "failed", "cancelled"} {
				for _, kind := range []string{"", "rare", "none"} {
					filters = append(filters, store.Filter{Status: status, Kind: kind}, store.Filter{Status: status, Kind: kind, Queue: "none"})
				}
			}
			if statistics == "ofAnEmptyTable" {
				// Plans that are made now, and kept.
				b.sql(`VACUUM ANALYZE onejob.tasks`)
				for range 8 {
					for _, f := range filters {
						f.Limit, f.Scan = 50, 2000
						if _, err := b.List(t.Context(), f); err != nil {
							t.Fatal(err)
						}
					}
				}
			}
			b.sql(`INSERT INTO onejob.tasks (kind) SELECT 'rare' FROM generate_series(1, 10)`)
			b.finished("failed", n/10)
			b.finished("cancelled", 100)
			b.finished("succeeded", n)
			b.sql(`INSERT INTO onejob.tasks (kind, status, session, replica, fence, started_at) SELECT 'noop', 'running', gen_random_uuid(), 'r', i, now() FROM generate_series(1, 100) i`)
			b.finished("succeeded", 100)
			if statistics == "analyzed" {
				b.sql(`ANALYZE onejob.tasks`)
			}
			look := func(what string, f store.Filter, most int64, want int) {
				t.Helper()
				f.Limit = 50
				seen, began := b.read(), time.Now()
				p, err := b.List(t.Context(), f)
				took := time.Since(began)
				if err != nil {
					t.Fatal(err)
				}
				rows := b.read() - seen
				t.Logf("%s: %+v: read %d rows and entries in %v, found %d, cut %v", what, f, rows, took, len(p.Rows), p.Cut)
				if rows > most {
					t.Errorf("%s: %+v: read %d rows and entries, want at most %d", what, f, rows, most)
				}
				if len(p.Rows) != want {
					t.Errorf("%s: %+v: found %d, want %d", what, f, len(p.Rows), want)
				}
			}
			window := int64(4*2000 + 1000) // a row and its entry, and what is left of old ones
			look("all", store.Filter{}, 1000, 50)
			look("in the middle", store.Filter{Before: int64(n / 2)}, 1000, 50)
			look("failed", store.Filter{Status: "failed"}, 1000, 50)
			look("failed, in the middle", store.Filter{Status: "failed", Before: int64(n / 20)}, 1000, 50)
			look("cancelled", store.Filter{Status: "cancelled"}, 1000, 50)
			look("running", store.Filter{Status: "running"}, 2000, 50)
			look("pending", store.Filter{Status: "pending"}, 2000, 10)
			look("a kind that is pending", store.Filter{Status: "pending", Kind: "rare"}, 2000, 10)
			look("succeeded", store.Filter{Status: "succeeded"}, window, 50)
			look("a kind, not found", store.Filter{Kind: "none", Scan: 2000}, window, 0)
			look("a queue that failed, not found", store.Filter{Status: "failed", Queue: "none", Scan: 2000}, window, 0)
			b.sql(`INSERT INTO onejob.tasks (kind, run_at) SELECT 'noop', 'infinity' FROM generate_series(1, 6000)`)
			look("many pending", store.Filter{Status: "pending"}, window+2*5000, 50)
			look("many pending, a kind", store.Filter{Status: "pending", Kind: "rare", Scan: 2000}, window+2*5000, 0)
		})
	}
}

// BenchmarkList looks for what there is little of, among two million tasks that
// succeeded and a tenth as many that failed. ONEJOB_LIST_ROWS is another number.
func BenchmarkList(bm *testing.B) {
	n := number("ONEJOB_LIST_ROWS", 2_000_000)
	b := newBareBench(bm)
	b.sql(`INSERT INTO onejob.tasks (kind) SELECT 'rare' FROM generate_series(1, 10)`)
	b.finished("failed", n/10)
	b.finished("cancelled", 10)
	b.finished("succeeded", n)
	for _, f := range []store.Filter{{}, {Status: "failed"}, {Status: "cancelled"}, {Status: "failed", Kind: "none"}, {Status: "pending"}, {Status: "running"}, {Status: "succeeded"}, {Kind: "rare"}} {
		name := strings.Trim(fmt.Sprintf("%s/%s", f.Status, f.Kind), "/")
		if name == "" {
			name = "all"
		}
		bm.Run(name, func(bm *testing.B) {
			var took []time.Duration
			f.Limit = 50
			for bm.Loop() {
				began := time.Now()
				if _, err := b.List(bm.Context(), f); err != nil {
					bm.Fatal(err)
				}
				took = append(took, time.Since(began))
			}
			bm.ReportMetric(float64(slices.Max(took).Microseconds())/1000, "max-ms")
		})
	}
}

// A brief list reads of large payloads what says what a task works on, and of results nothing.
func TestBriefListsLeaveOutWhatIsLarge(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	many := strings.Repeat("x", 5000)
	for _, test := range []struct{ kind, payload, target string }{ // LONG is a string of 1 MiB, and … any more
		{"exec", `{"command": "backup", "args": ["-v"], "data": 1}`, "backup -v"},
		{"exec", `{"command": "backup", "args": ["-v"], "data": LONG}`, "backup -v"},
		{"exec", `{"command": "backup", "data": LONG}`, "backup"},
		{"exec", `{"command": "backup", "args": [LONG]}`, "backup [...]"},
		{"exec", `{"command": LONG}`, "c4ca4238a0b923820dcc509a6f75849b…"},
		{"exec", `{"data": "` + many + `"}`, `{"data": "xxx…`},
		{"http", `{"url": "https://me:secret@shop.example/hook?token=secret", "method": "POST", "body": LONG}`, "POST https://shop.example/hook"},
		{"http", `{"url": "https://me:secret@shop.example/` + many + `?token=secret"}`, "https://shop.example/xxx…"},
		{"sql", `{"statement": "close_month", "params": {"month": LONG}}`, "close_month"},
		{"mail", `{"to": "ann"}`, `{"to": "ann"}`},
		{"mail", `{"to": "` + many + `"}`, `{"to": "xxx…`},
		{"mail", `{"to": LONG}`, "[...] …"},
		{"noop", `{}`, ""},
	} {
		b.sql(`
INSERT INTO onejob.tasks (kind, payload, status, finished_at, result)
SELECT $1, replace($2, 'LONG', to_json(long)::text)::jsonb, 'succeeded', now(), to_jsonb(long)
  FROM (SELECT string_agg(md5(i::text), '' ORDER BY i) FROM generate_series(1, 32768) i) AS l(long)`, test.kind, test.payload)
		name := fmt.Sprintf("%s, %.60s", test.kind, test.payload)
		long, short := b.page(store.Filter{Limit: 1}).Rows, b.page(store.Filter{Limit: 1, Brief: true}).Rows
		if len(long) != 1 || len(short) != 1 {
			t.Fatalf("%s: lists of %d rows and, if brief, of %d", name, len(long), len(short))
		}
		whole, brief := long[0], short[0]
		if len(brief.Payload) > 16<<10 || brief.Result != nil {
			t.Errorf("%s: %d bytes of the payload and %d of the result are read", name, len(brief.Payload), len(brief.Result))
		}
		if len(whole.Result) < 1<<20 || strings.Contains(test.payload, "LONG") != (len(whole.Payload) > 1<<20) {
			t.Errorf("%s: a list that is not brief has %d bytes of the payload and %d of the result", name, len(whole.Payload), len(whole.Result))
		}
		target := snapshot.Target(brief.Kind, brief.Payload)
		begin, cut := strings.CutSuffix(test.target, "…")
		if !strings.HasPrefix(target, begin) || cut == (target == begin) || strings.Contains(target, "secret") {
			t.Errorf("%s: the target is %.100q, want %q", name, target, test.target)
		}
		whole.Payload, whole.Result, brief.Payload = nil, nil, nil
		if !reflect.DeepEqual(brief, whole) {
			t.Errorf("%s: the rest of the row is %+v, want %+v", name, brief, whole)
		}
	}
}

// page returns a page of a list. A busy Postgres may take longer than a list may, once.
func (b *bench) page(f store.Filter) (p store.Page) {
	b.t.Helper()
	testenv.Eventually(b.t, time.Minute, "a page is read", func() bool {
		var err error
		p, err = b.List(b.t.Context(), f)
		if err != nil && !errors.Is(err, store.ErrNoAnswer) {
			b.t.Fatal(err)
		}
		return err == nil
	})
	return p
}

// What waits for a list is told when Postgres does not answer.
func TestListsEndByStatementTimeout(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	tx, err := b.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }()
	if _, err := tx.Exec(t.Context(), `LOCK TABLE onejob.tasks IN ACCESS EXCLUSIVE MODE`); err != nil {
		t.Fatal(err)
	}
	if _, err := b.List(t.Context(), store.Filter{Limit: 1}); !errors.Is(err, store.ErrNoAnswer) || !strings.Contains(err.Error(), "no answer from Postgres within 5s") {
		t.Errorf("List of a locked table: %v", err)
	}
}

// Nor does anything else that people ask for wait without an end while somebody has locked the
// tables, as ALTER TABLE does.
func TestWhatPeopleAskForEndsByTimeout(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	b.schedule("nightly", time.Now())
	s := open(t, store.Config{DSN: b.dsn, Timeout: 300 * time.Millisecond})
	_, row, err := b.Schedule(t.Context(), "nightly")
	if err != nil {
		t.Fatal(err)
	}
	_, end := openTransaction(t, b.dsn, `BEGIN`, `LOCK TABLE onejob.tasks, onejob.schedules, onejob.occurrences IN ACCESS EXCLUSIVE MODE`)
	for what, ask := range map[string]func(ctx context.Context) error{
		"Status":      func(ctx context.Context) error { _, _, err := s.Status(ctx, 1); return err },
		"Show":        func(ctx context.Context) error { _, _, err := s.Show(ctx, 1); return err },
		"Enqueue":     func(ctx context.Context) error { _, err := s.Enqueue(ctx, store.NewTask{Kind: "noop"}); return err },
		"Schedules":   func(ctx context.Context) error { _, err := s.Schedules(ctx); return err },
		"Schedule":    func(ctx context.Context) error { _, _, err := s.Schedule(ctx, "nightly"); return err },
		"Occurrences": func(ctx context.Context) error { _, err := s.Occurrences(ctx, row.ID, 5); return err },
		"SkippedDueTimes": func(ctx context.Context) error {
			_, err := s.SkippedDueTimes(ctx, row.ID, time.Time{}, time.Now(), 5)
			return err
		},
		"WithoutTask": func(ctx context.Context) error {
			_, err := s.WithoutTask(ctx, row.ID, []time.Time{time.Now()})
			return err
		},
		"Backfill": func(ctx context.Context) error { _, err := s.Backfill(ctx, row, []time.Time{time.Now()}); return err },
	} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		if err := ask(ctx); !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil {
			t.Errorf("%s of locked tables: %v; after a minute: %v", what, err, ctx.Err())
		}
		cancel()
	}
	end()
	if n := b.one(`SELECT count(*) FROM onejob.tasks`); n != "0" {
		t.Errorf("%s tasks are there", n)
	}
}

// Postgres has moments that Go has not, and rows may lack what they should have.
// Postgres takes JSON that is nested deeper than encoding/json reads or writes. A list shows such
// rows, and the others.
func TestRowsWithDeepJSONAreShown(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	for _, depth := range []int{9_899, 10_001} { // the first with {"a": } around it is as deep as is shown
		deep := fmt.Sprintf(`(repeat('[', %d) || repeat(']', %[1]d))::jsonb`, depth)
		b.insert("kind='noop'", "payload=jsonb_build_object('a', "+deep+")", "status='succeeded'", "finished_at=now()", "result="+deep)
		b.sql(`INSERT INTO onejob.schedules (name, cron, kind, payload) VALUES ($1, '@daily', 'noop', `+deep+`)`, fmt.Sprint(depth))
	}
	p := b.page(store.Filter{Limit: 50})
	if len(p.Rows) != 2 {
		t.Fatalf("%d rows, want 2", len(p.Rows))
	}
	equal(t, "the payloads begin with", fmt.Sprintf("%.10s %.7s", p.Rows[0].Payload, p.Rows[1].Payload), `"{\"a\": [ {"a": [`)
	for _, row := range p.Rows {
		shown, _, err := b.Show(t.Context(), row.ID)
		if err != nil {
			t.Errorf("Show(%d): %v", row.ID, err)
		}
		equal(t, "the payload of Show", string(shown.Payload), string(row.Payload))
		if _, err := b.story(row.ID); err != nil {
			t.Errorf("Story(%d): %v", row.ID, err)
		}
	}
	schedules, err := b.Schedules(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range schedules {
		if _, _, err := b.Schedule(t.Context(), row.Name); err != nil {
			t.Errorf("Schedule(%s): %v", row.Name, err)
		}
	}
	if _, err := json.Marshal([]any{[]any{map[string]any{"tasks": p.Rows, "schedules": schedules}}}); err != nil {
		t.Error(err)
	}
}

func TestOddRowsAreShown(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	parked, err := b.Enqueue(t.Context(), store.NewTask{Kind: "noop", Parked: true, UniqueKey: "u"})
	if err != nil {
		t.Fatal(err)
	}
	b.withoutRules()
	past := b.insert("kind='noop'", "run_at='-infinity'", "created_at='infinity'")
	b.insert("kind='noop'", "run_at='294276-01-01Z'", "created_at='4713-01-01 BC'")
	odd := b.insert("kind='noop'", "status='running'", "session=gen_random_uuid()", "started_at='infinity'")
	b.insert("kind='noop'", "status='failed'", "finished_at='-infinity'", "started_at='-infinity'")
	b.sql(`INSERT INTO onejob.attempts (task_id, fence, finished_at, outcome) VALUES ($1, 1, 'infinity', 'refused'), ($1, 2, '-infinity', 'refused')`, odd)
	b.sql(`INSERT INTO onejob.attempts (task_id, fence, attempt, lock_key, replica, session, started_at, finished_at, outcome)
		VALUES ($1, 3, 1, 'k', 'r', gen_random_uuid(), '-infinity', 'infinity', 'crashed')`, odd)

	p := b.page(store.Filter{Limit: 50})
	if len(p.Rows) != 5 {
		t.Fatalf("%d rows, want 5", len(p.Rows))
	}
	text, err := json.Marshal(p.Rows)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"run_at":"infinity"`, `"run_at":"-infinity"`, `"created_at":"infinity"`, `"run_at":"294276-01-01T`, `"created_at":"-4712-`,
		`"started_at":"infinity"`, `"finished_at":"-infinity"`} {
		if !strings.Contains(string(text), want) {
			t.Errorf("%s is not in %s", want, text)
		}
	}
	for _, row := range p.Rows {
		_, attempts, err := b.Show(t.Context(), row.ID)
		if err != nil {
			t.Errorf("Show(%d): %v", row.ID, err)
		}
		if text, err := json.Marshal(attempts); err != nil || fmt.Sprint(row.ID) == odd && strings.Count(string(text), `infinity"`) != 6 {
			t.Errorf("Show(%d): %s, %v", row.ID, text, err)
		}
	}
	b.sql(`INSERT INTO onejob.attempts (task_id, fence, finished_at, outcome) SELECT $1, i, now(), 'refused' FROM generate_series(1000000, 1001999) i`, parked)
	if _, attempts, err := b.Show(t.Context(), parked); err != nil || len(attempts) != store.MostAttempts || attempts[0].Fence != 1001000 || attempts[len(attempts)-1].Fence != 1001999 {
		t.Errorf("Show returns %d of 2,000 attempts, %v", len(attempts), err)
	}
	if last, err := b.Attempts(t.Context(), parked, 2); err != nil || len(last) != 2 || last[0].Fence != 1001998 || last[1].Fence != 1001999 {
		t.Errorf("the last two attempts: %+v, %v", last, err)
	}
	again, err := b.Enqueue(t.Context(), store.NewTask{Kind: "noop", UniqueKey: "u"})
	equal(t, "Enqueue beside a parked one", fmt.Sprint(again, err), "0 <nil>")
	for _, id := range []int64{parked, p.Rows[3].ID} {
		cancelled, err := b.Cancel(t.Context(), id)
		equal(t, "Cancel", fmt.Sprint(cancelled, err), "true <nil>")
		retried, err := b.Retry(t.Context(), id)
		equal(t, "Retry", fmt.Sprint(retried, err), "true <nil>")
	}
	equal(t, "a parked row after Retry", b.one(`SELECT isfinite(run_at) FROM onejob.tasks WHERE id = $1`, parked), "true")
	equal(t, "the second row", fmt.Sprint(p.Rows[3].ID), past)

	b.sql(`INSERT INTO onejob.schedules (name, cron, kind, created_at) VALUES ('s', '@daily', 'noop', '-infinity')`)
	b.sql(`UPDATE onejob.schedules SET next_at = '-infinity', last_at = 'infinity'`)
	b.sql(`INSERT INTO onejob.occurrences (schedule_id, due_at, skipped, made_at) SELECT id, 'infinity', 'missed', '-infinity' FROM onejob.schedules`)
	schedules, err := b.Schedules(t.Context())
	if err != nil || len(schedules) != 1 {
		t.Fatalf("%v, %v", schedules, err)
	}
	if _, row, err := b.Schedule(t.Context(), "s"); err != nil {
		t.Error(err)
	} else if text, err := json.Marshal(row); err != nil || strings.Count(string(text), `infinity"`) != 2 {
		t.Errorf("%s, %v", text, err)
	}
	if o, err := b.Occurrences(t.Context(), schedules[0].ID, 10); err != nil || len(o) != 1 {
		t.Errorf("%v, %v", o, err)
	} else if text, err := json.Marshal(o); err != nil || strings.Count(string(text), `infinity"`) != 2 {
		t.Errorf("%s, %v", text, err)
	}
	if _, err := b.List(t.Context(), store.Filter{Limit: 1, Before: math.MinInt64 + 1}); err != nil {
		t.Error(err)
	}
}
