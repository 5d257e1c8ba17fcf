package store_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"onejob/tasks"
)

// claimedQueues claims all that can be had, and returns the queues of it, in order.
func (b *bench) claimedQueues(limit string) string {
	b.t.Helper()
	var queues []string
	for more := true; more; {
		c, err := b.Claim(b.t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop"}, Limit: limit, Max: 10})
		if err != nil {
			b.t.Fatal(err)
		}
		for _, t := range c.Tasks {
			queues = append(queues, b.one(`SELECT queue FROM onejob.tasks WHERE id = $1`, t.ID))
		}
		more = c.More
	}
	return strings.Join(queues, " ")
}

// Claims take nothing from a paused queue, with or without a limit, whatever they remember,
// and what waits there is in nobody's way.
func TestClaimsTakeNothingFromAPausedQueue(t *testing.T) {
	t.Parallel()
	for _, limit := range []string{"", "calls"} {
		t.Run("Limit"+limit, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			b.join()
			add := func(queue string, n, priority int, key string) {
				b.sql(`INSERT INTO onejob.tasks (kind, queue, limit_name, priority, lock_key) SELECT 'noop', $1, nullif($2, ''), $4, nullif($5, '') FROM generate_series(1, $3)`, queue, limit, n, priority, key)
			}
			due := func() int {
				b.t.Helper()
				var list []string
				var err error
				if limit == "" {
					list, err = b.DueKinds(t.Context(), tasks.Claim{Kinds: []string{"noop"}})
				} else {
					list, err = b.DueLimits(t.Context(), tasks.Claim{Kinds: []string{"noop"}}, []string{limit})
				}
				if err != nil {
					t.Fatal(err)
				}
				return len(list)
			}
			add("mail", 2, 0, "")
			equal(t, "claimed before the pause", b.claimedQueues(limit), "mail mail")
			if err := b.PauseQueue(t.Context(), "mail", "a test", time.Time{}, 0); err != nil {
				t.Fatal(err)
			}
			add("mail", 300, 10, "")
			add("mail", 50, 10, "k")
			equal(t, "what is due elsewhere", due(), 0)
			add("other", 3, 0, "")
			equal(t, "what is due elsewhere", due(), 1)
			equal(t, "claimed while it is paused", b.claimedQueues(limit), "other other other")
			equal(t, "claimed while it is paused", b.claimedQueues(limit), "")
			resumed, err := b.ResumeQueue(t.Context(), "mail")
			if err != nil || !resumed {
				t.Fatal(resumed, err)
			}
			b.Forget()
			equal(t, "the number claimed after it", len(strings.Fields(b.claimedQueues(limit))), 301) // one of those with the key
			if resumed, err := b.ResumeQueue(t.Context(), "mail"); err != nil || resumed {
				t.Errorf("resumed twice: %v, %v", resumed, err)
			}

			// A pause ends by itself.
			add("mail", 1, 0, "")
			b.sql(`SELECT onejob.pause_queue('mail', until => clock_timestamp() + interval '1 hour')`)
			equal(t, "claimed while it is paused", b.claimedQueues(limit), "")
			b.sql(`UPDATE onejob.queues SET paused_until = now()`)
			b.Forget()
			equal(t, "claimed when the time has come", b.claimedQueues(limit), "mail")
		})
	}
}

// A lock key that becomes free in a paused queue is not claimed by name either.
func TestAFreedLockKeyOfAPausedQueueWaits(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.join()
	holder := b.claimed("lock_key='k'", "queue='mail'")
	b.insert("lock_key='k'", "queue='mail'")
	b.insert("lock_key='l'", "queue='other'")
	equal(t, "claimed beside it", b.claimedQueues(""), "other")
	if err := b.PauseQueue(t.Context(), "mail", "", time.Time{}, time.Hour); err != nil {
		t.Fatal(err)
	}
	if err := b.Complete(t.Context(), succeeded(holder)); err != nil {
		t.Fatal(err)
	}
	equal(t, "claimed while it is paused", b.claimedQueues(""), "")
	if _, err := b.ResumeQueue(t.Context(), "mail"); err != nil {
		t.Fatal(err)
	}
	b.Forget()
	equal(t, "claimed after it", b.claimedQueues(""), "mail")
}

func TestBadPausesAreRefused(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	for sql, want := range map[string]string{
		`SELECT onejob.pause_queue(NULL)`:                                      "the name of the queue is missing",
		`SELECT onejob.pause_queue('')`:                                        "name_is_1_to_100_characters",
		`SELECT onejob.pause_queue('mail', until => now() - interval '1 day')`: "is not in the future",
		`SELECT onejob.pause_queue('mail', repeat('x', 1001))`:                 "reason_is_at_most_1000_characters",
	} {
		if _, err := b.try(sql); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", sql, err, want)
		}
	}
	// Postgres counts microseconds, and none of them stands for no end.
	if err := b.PauseQueue(t.Context(), "mail", "", time.Time{}, 500*time.Nanosecond); err == nil || !strings.Contains(err.Error(), "is not in the future") {
		t.Errorf("a pause of half a microsecond: %v", err)
	}
	equal(t, "the number of paused queues", b.one(`SELECT count(*) FROM onejob.queues`), "0")
	equal(t, "what is on record", b.one(`SELECT count(*) FROM onejob.actions`), "0")
}

// A queue that no live replica serves is found, unless it is paused or its tasks are not due.
func TestUnservedQueues(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	b.serves("one", "{served}", "{noop}", "", 0, 5)
	for _, queue := range []string{"served", "paused", "b", "a"} {
		b.insert("queue='"+queue+"'", "run_at=now() - interval '1 minute'")
	}
	b.insert("queue='later'", "run_at=now() + interval '1 minute'")
	b.sql(`SELECT onejob.pause_queue('paused')`)
	unserved := func() string {
		list, err := b.UnservedQueues(t.Context(), 10)
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint(list)
	}
	equal(t, "the queues that nobody serves", unserved(), "[a b]")
	b.serves("two", "{}", "{noop}", "", 0, 5)
	equal(t, "the queues that nobody serves beside a replica of all", unserved(), "[]")
}

// Pauses that have ended by themselves are not kept for ever.
func TestEndedPausesAreRemoved(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	for _, name := range []string{"long ago", "lately", "locked", "still"} {
		if err := b.PauseQueue(t.Context(), name, "a test", time.Time{}, time.Hour); err != nil {
			t.Fatal(err)
		}
	}
	b.sql(`UPDATE onejob.queues SET paused_until = now() - CASE name WHEN 'lately' THEN interval '1 minute' WHEN 'still' THEN interval '-1 hour' ELSE interval '2 hours' END`)
	_, end := openTransaction(t, b.dsn, `BEGIN`, `SELECT FROM onejob.queues WHERE name = 'locked' FOR UPDATE`)
	if err := b.PauseQueue(t.Context(), "other", "a test", time.Time{}, time.Hour); err != nil {
		t.Fatal(err)
	}
	end()
	equal(t, "the queues on record", b.one(`SELECT string_agg(name, ', ' ORDER BY name) FROM onejob.queues`), "lately, locked, other, still")
	if err := b.PauseQueue(t.Context(), "locked", "again", time.Time{}, time.Hour); err != nil {
		t.Fatal(err)
	}
	equal(t, "a pause that is begun anew", b.one(`SELECT paused_until > now() AND paused_at > now() - interval '1 minute' FROM onejob.queues WHERE name = 'locked'`), "true")
}
