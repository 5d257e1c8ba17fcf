package store_test

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// The alerts in SQL that the documentation shows are silent while all is well, and each is
// raised by what it is for, and by nothing else.
func TestAlertsInSQL(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../docs/reference/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(string(page), "## Alerts as SQL")
	_, text, _ = strings.Cut(text, "```sql\n")
	text, _, _ = strings.Cut(text, "```")
	alerts := map[string]string{}
	for statement := range strings.SplitSeq(text, ";\n") {
		if names := regexp.MustCompile(`\(Onejob[A-Za-z, ]+\)`).FindString(statement); names != "" {
			alerts[names] = statement
		}
	}
	raise := map[string]func(b *bench){ // by the alert, and in which way after a colon
		"(OnejobBehind)": func(b *bench) { b.insert("run_at=now() - interval '10 minutes'") },
		"(OnejobNoReplica)": func(b *bench) {
			b.sql(`UPDATE onejob.replicas SET heartbeat_at = now() - interval '1 minute'`)
		},
		"(OnejobTasksFail, OnejobQuarantined)": func(b *bench) { b.insert("status='failed'", "finished_at=now()", "error='no'") },
		"(OnejobTasksFail, OnejobQuarantined): keep_for": func(b *bench) {
			b.insert("status='failed'", "finished_at=now()", "error='no'", "keep_for='1 day'")
		},
		"(OnejobOverlaps)": func(b *bench) {
			b.sql(`
INSERT INTO onejob.attempts (fence, task_id, attempt, lock_key, replica, session, started_at, begun_at, stopped_at, finished_at, outcome, stopped_fence)
SELECT f, f, 1, 'k', 'one', gen_random_uuid(), now() - interval '2 minutes', now() - interval '2 minutes', now(), now(), CASE f WHEN 1 THEN 'lease_lost' ELSE 'succeeded' END, CASE f WHEN 1 THEN 2 END
  FROM generate_series(1, 2) f`)
		},
		"(OnejobOccurrencesSkipped)": func(b *bench) {
			b.sql(`INSERT INTO onejob.schedules (name, cron, kind) VALUES ('s', '@hourly', 'noop')`)
			b.sql(`INSERT INTO onejob.occurrences (schedule_id, due_at, skipped) SELECT id, now(), 'missed' FROM onejob.schedules`)
		},
	}
	raised := map[string]bool{}
	for way, happen := range raise {
		cause, _, _ := strings.Cut(way, ":")
		raised[cause] = true
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			b := newBareBench(t)
			b.serves("one", "{}", "{noop}", "", 0, 5)
			// All is well: work that waits, is done, failed long ago, and is on time.
			b.insert()
			b.insert("run_at=now() + interval '1 hour'")
			b.insert("queue='paused'", "run_at=now() - interval '1 hour'")
			b.sql(`SELECT onejob.pause_queue('paused')`)
			b.insert("status='succeeded'", "finished_at=now()")
			b.insert("status='failed'", "finished_at=now() - interval '2 hours'", "error='no'")
			b.insert("status='failed'", "finished_at=now() - interval '2 hours'", "error='no'", "keep_for='1 day'")
			for name, sql := range alerts {
				if rows := b.sql(`SELECT a::text FROM (` + sql + `) a`); len(rows) != 0 {
					t.Errorf("%s is raised by nothing: %v", name, rows)
				}
			}
			happen(b)
			for name, sql := range alerts {
				if rows := b.sql(`SELECT a::text FROM (` + sql + `) a`); len(rows) != 1 && name == cause || len(rows) != 0 && name != cause {
					t.Errorf("%s is raised by %s: %v", name, way, rows)
				}
			}
		})
	}
	if len(alerts) != len(raised) {
		t.Errorf("the documentation has %d alerts, the test %d", len(alerts), len(raised))
	}
}
