package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"onejob/chaos/checker"
	"onejob/chaos/harness"
	"onejob/chaos/observer"
	"onejob/internal/retry"
)

// Schedules that are in the table while a run goes on, every so many seconds.
var scheduleSeconds = []int{1, 2, 3, 5}

// policies are further schedules, of every second, by their names. Their tasks take longer
// than that where it matters.
var policies = []struct {
	name, kind, payload string
	checker.Policy
}{
	{"skips what was missed", "noop", "{}", checker.Policy{OnMissed: "skip", Cap: 100, OnOverlap: "allow", QueueCap: 100}},
	{"makes one for all that was missed", "noop", "{}", checker.Policy{OnMissed: "one", Cap: 100, OnOverlap: "allow", QueueCap: 100}},
	{"makes few of what was missed", "noop", "{}", checker.Policy{OnMissed: "all", Cap: 3, OnOverlap: "allow", QueueCap: 100}},
	{"skips what overlaps", "go", `{"ms": 5000}`, checker.Policy{OnMissed: "all", Cap: 10000, OnOverlap: "skip", QueueCap: 100}},
	{"queues what overlaps", "go", `{"ms": 1500}`, checker.Policy{OnMissed: "all", Cap: 10000, OnOverlap: "queue", QueueCap: 3}},
}

// editedSchedules is how many more there are, which faults edit.
const editedSchedules = 3

// addSchedules inserts the schedules and returns those that are not edited, when each
// has its first due time.
func (c *cluster) addSchedules(ctx context.Context) ([]checker.Schedule, error) {
	add := func(name, cron, kind, payload string, p checker.Policy) error {
		_, err := c.operator.Exec(ctx, `
INSERT INTO onejob.schedules (name, cron, kind, payload, on_missed, missed_cap, on_overlap, queue_cap)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8)`, name, cron, kind, payload, p.OnMissed, p.Cap, p.OnOverlap, p.QueueCap)
		if err != nil {
			return fmt.Errorf("add schedules: %w", err)
		}
		return nil
	}
	everything := checker.Policy{OnMissed: "all", Cap: 10000, OnOverlap: "allow", QueueCap: 100}
	var list []checker.Schedule
	for _, s := range scheduleSeconds {
		name := fmt.Sprintf("every %d s", s)
		if err := add(name, fmt.Sprintf("*/%d * * * * *", s), "noop", "{}", everything); err != nil {
			return nil, err
		}
		list = append(list, checker.Schedule{Name: name, Every: time.Duration(s) * time.Second})
	}
	for _, p := range policies {
		if err := add(p.name, "* * * * * *", p.kind, p.payload, p.Policy); err != nil {
			return nil, err
		}
		list = append(list, checker.Schedule{Name: p.name, Every: time.Second, Policy: &p.Policy})
	}
	for i := range editedSchedules {
		if err := add(edited(i), "*/1 * * * * *", "noop", "{}", everything); err != nil {
			return nil, err
		}
	}
	err := harness.Eventually(ctx, time.Minute, "schedules have a due time", func() error {
		found, err := rows(ctx, c, `SELECT next_at FROM onejob.schedules ORDER BY id LIMIT $1`, pgx.RowTo[*time.Time], len(list))
		for i, at := range found {
			if at == nil {
				return fmt.Errorf("one has none")
			}
			list[i].First = observer.At(*at)
		}
		return err
	})
	return list, err
}

func edited(i int) string { return fmt.Sprint("edited ", i+1) }

// endSchedules waits until every due time up to now has been looked at, and
// disables the schedules. It fills in until when they are checked.
func (c *cluster) endSchedules(ctx context.Context, e *checker.Evidence) error {
	now := time.Now()
	err := harness.Eventually(ctx, 2*time.Minute, "schedules are up to date", func() error {
		var behind int
		err := c.operator.QueryRow(ctx, `
SELECT (SELECT count(*) FROM onejob.schedules WHERE enabled AND paused_until IS DISTINCT FROM 'infinity' AND (next_at IS NULL OR next_at <= $1))
     + (SELECT count(*) FROM onejob.former_schedules)`, now).Scan(&behind)
		if err == nil && behind > 0 {
			err = fmt.Errorf("%d are behind", behind)
		}
		return err
	})
	e.Until = observer.At(now)
	for i, s := range e.Schedules {
		n := (e.Until - s.First) / observer.Time(s.Every)
		e.Schedules[i].Last = s.First + n*observer.Time(s.Every)
	}
	c.clock.Lock()
	e.ClockSteps = c.clockSteps
	c.clock.Unlock()
	if _, stopErr := c.operator.Exec(ctx, `UPDATE onejob.schedules SET enabled = false`); stopErr != nil {
		return stopErr
	}
	if err != nil {
		c.say("%v: the checker will say", err)
	}
	return nil
}

// Faults of the clock, and of those who edit schedules.
var (
	clockJump     = &kind{name: "clock-jump", what: "Postgres' clock is set, forward or back, and set right later", weight: 2, least: 2 * time.Second, most: 40 * time.Second, run: jumpClock}
	scheduleFault = &kind{name: "schedule-edit", what: "somebody edits schedules; the leader is killed at that moment, or not", weight: 3, least: time.Second, most: 10 * time.Second, run: editSchedules}

	scheduleFaults = []*kind{clockJump, scheduleFault}
)

// jumpClock sets the clocks of all servers. Each step is noted: due times are by that
// clock.
func jumpClock(ctx context.Context, h *fault) error {
	if !h.c.clockBusy.TryLock() {
		return errNothing
	}
	defer h.c.clockBusy.Unlock()
	ahead := time.Duration(3+h.rand.IntN(88)) * time.Second
	if h.rand.IntN(2) == 0 {
		ahead = -ahead
	}
	h.about = fmt.Sprintf(" by %v", ahead)
	if err := h.begins("the servers"); err != nil {
		return err
	}
	if err := h.c.setClock(ahead); err != nil {
		return err
	}
	h.lasts(ctx)
	return h.c.setClock(0)
}

func (c *cluster) setClock(ahead time.Duration) error {
	c.clock.Lock()
	defer c.clock.Unlock()
	c.clockSteps = append(c.clockSteps, checker.ClockStep{At: observer.At(time.Now()), Ahead: ahead})
	return c.postgres.setClock(ahead)
}

// editSchedules edits one schedule now and then. It does not wait for onejob between two
// edits.
func editSchedules(ctx context.Context, h *fault) error {
	name := edited(h.rand.IntN(editedSchedules))
	var leader *replica
	if h.rand.IntN(2) == 0 {
		leader = h.c.leader(ctx)
	}
	if leader != nil {
		h.about = ", and the leader is killed, " + leader.name
	}
	if err := h.begins(name); err != nil {
		return err
	}
	first := true
	for end := time.Now().Add(h.For); first || time.Now().Before(end) && ctx.Err() == nil; first = false {
		set, value := anEdit(h.rand)
		done := make(chan error, 1)
		go func() { done <- h.operate(ctx, "UPDATE onejob.schedules SET "+set+" WHERE name = $2", value, name) }()
		letGo := func() error { return nil }
		if leader != nil {
			m := observer.Mark{ID: h.c.nextMark(), Kind: checker.Kill, Target: leader.name}
			if err := h.c.observer.Begin(m); err != nil {
				return err
			}
			again := leader.hold()
			letGo = func() error { return errors.Join(again(), h.c.observer.End(m)) }
			leader.process().Kill()
			leader = nil
			retry.Pause(ctx, h.For/2)
		}
		err := <-done
		if err := letGo(); err != nil {
			return err
		}
		// A Postgres that is gone has not been edited. One that refuses the edit has shown
		// that this program is wrong.
		if refused := (*pgconn.PgError)(nil); errors.As(err, &refused) && (strings.HasPrefix(refused.Code, "22") || strings.HasPrefix(refused.Code, "42")) {
			return err
		}
		retry.Pause(ctx, time.Duration(h.rand.IntN(1500))*time.Millisecond)
	}
	return nil
}

// anEdit is one of those that the checker understands.
func anEdit(r *rand.Rand) (set string, value any) {
	pick := func(all ...string) string { return all[r.IntN(len(all))] }
	switch r.IntN(8) {
	case 0, 1:
		return "cron = $1", fmt.Sprintf("*/%d %s * * * *", []int{1, 2, 3, 5}[r.IntN(4)], pick("*", "*", "*/2", "1-59/2"))
	case 2, 3: // in Nepal the odd minutes are those that are even elsewhere
		return "time_zone = $1", pick("UTC", "Asia/Kathmandu", "Europe/Berlin")
	case 4:
		return "payload = $1::jsonb", fmt.Sprintf(`{"edit": %d}`, r.IntN(1_000_000))
	case 5, 6:
		return "paused_until = $1::timestamptz", []any{nil, nil, "infinity", time.Now().Add(time.Duration(r.IntN(8000)) * time.Millisecond)}[r.IntN(4)]
	default:
		return "enabled = $1::bool", pick("true", "true", "false")
	}
}
