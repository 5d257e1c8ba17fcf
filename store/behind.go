package store

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/tasks"
)

// behindSQL returns, for each mark, the first row before it in a portion of time that is
// waiting for nothing that is known: it came after the claim had passed.
const behindSQL = `
SELECT m.lane, greatest(t.run_at, '0001-01-01 UTC'), t.id
  FROM unnest(@lanes::bigint[], @run_ats::timestamptz[], @ids::bigint[], @busy::text[]) AS m(lane, run_at, id, busy)
 CROSS JOIN LATERAL (
       SELECT run_at, id
         FROM onejob.tasks
        WHERE status = 'pending'
          AND limit_name IS NULL
          AND onejob.lane(priority, queue, kind, lock_key IS NULL) = m.lane
          AND (run_at, id) <= (m.run_at, m.id)
          AND run_at >= coalesce(@from::timestamptz, '-infinity')
          AND run_at <  coalesce(@to::timestamptz, 'infinity')
          AND NOT coalesce(m.busy::jsonb ? lock_key, false)
        ORDER BY run_at, id
        LIMIT 1) t`

const (
	// lookFor is about how long one call of LookBehind looks. It is called every second.
	lookFor = 20 * time.Millisecond

	// A portion that takes longer than longPortion is split; one that takes less than
	// shortPortion is joined with the one before it.
	longPortion  = 10 * time.Millisecond
	shortPortion = time.Millisecond

	// leastPortion is not split.
	leastPortion = 10 * time.Millisecond
)

// LookBehind looks for due tasks that claims like c would pass over because they
// became due, or free, behind where those go on: when a transaction that inserted
// them was slow to commit, or one that had locked them has ended. It does so where
// the claims do not, because for them it takes too long, and no more often than is
// worth it; call it every second. Where nobody does, claims look from the beginning themselves.
// It reports whether there are any.
//
// Beside an old snapshot it has to pass millions of dead index entries, which takes
// seconds. So it looks at portions of time, one after the other: no look keeps a
// processor busy for long.
func (s *Store) LookBehind(ctx context.Context, c tasks.Claim) (some bool, err error) {
	l := s.lanesOf(c)
	defer l.lookBehind()()
	began := time.Now()
	for spent := time.Duration(0); spent < lookFor; spent = time.Since(began) {
		marks, from, to, due := l.toLookBehind(began)
		if !due {
			break
		}
		looked := time.Now()
		found, err := s.lookBehind(ctx, marks, from, to)
		if err != nil {
			if took := time.Since(looked); took > longPortion { // or it would be too long again
				l.lookedBehind(nil, took)
			}
			return some, fmt.Errorf("look behind claims: %w", err)
		}
		some = some || len(found) > 0
		if l.lookedBehind(found, time.Since(looked)) {
			break
		}
	}
	return some, nil
}

func (s *Store) lookBehind(ctx context.Context, marks map[int64]mark, from, to time.Time) (map[int64]mark, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	type row struct {
		Lane  int64
		RunAt time.Time
		ID    int64
	}
	arguments := markArguments(marks)
	arguments["from"], arguments["to"] = moment(from), moment(to)
	rows, err := query(ctx, s.pool, pgx.RowToStructByPos[row], behindSQL, arguments)
	if err != nil {
		return nil, err
	}
	found := make(map[int64]mark, len(rows))
	for _, r := range rows {
		found[r.Lane] = mark{runAt: r.RunAt, id: r.ID - 1}
	}
	return found, nil
}

// lookBehind notes that a call of LookBehind has begun, and end that it returns.
func (l *lanes) lookBehind() (end func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.looking++
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.looking--
		l.lookedAt = time.Now()
	}
}

// toLookBehind returns the marks to look behind, and the next portion, if it is time in a
// call that began then.
func (l *lanes) toLookBehind(began time.Time) (marks map[int64]mark, from, to time.Time, due bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.expensive || l.since.Before(began) && time.Since(l.since) < l.rest() {
		return nil, from, to, false
	}
	if l.since.Before(began) {
		l.again(time.Now())
	}
	from, to = l.behind.next()
	return maps.Clone(l.marks), from, to, true
}

// lookedBehind lets claims go on from what was found. Where looking was cheap they
// do it themselves again. It reports whether all portions were looked at.
func (l *lanes) lookedBehind(found map[int64]mark, took time.Duration) (all bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.since, l.cost = time.Now(), l.cost+min(took, maxCharge)
	total, all := l.behind.looked(took, time.Now())
	if all && total < expensiveCost {
		l.marks, l.expensive, l.empty, l.cost, l.behind = nil, false, false, took, portions{}
		return all
	}
	for lane, m := range found {
		old, known := l.marks[lane]
		if known && m.before(old) {
			m.busy = old.busy
			l.marks[lane] = m
		}
	}
	return all
}

// portions divide time so that to look at each takes about as long.
type portions struct {
	bounds []time.Time   // between them, ascending
	at     int           // the next one
	spent  time.Duration // since the first
}

// next returns the next portion: from from on, before to. A zero time is no bound.
func (p *portions) next() (from, to time.Time) {
	if p.at > 0 {
		from = p.bounds[p.at-1]
	}
	if p.at < len(p.bounds) {
		to = p.bounds[p.at]
	}
	return from, to
}

// looked says how long that one took. Of the last one it returns how long all took, and
// begins anew.
func (p *portions) looked(took time.Duration, now time.Time) (total time.Duration, all bool) {
	p.spent += took
	from, to := p.next()
	parts := 0
	switch {
	case took > longPortion:
		parts = p.split(from, to, int(took*2/longPortion), now)
	case took < shortPortion && p.at > 0:
		p.bounds = slices.Delete(p.bounds, p.at-1, p.at)
		p.at--
	}
	p.at += 1 + parts
	if p.at <= len(p.bounds) {
		return 0, false
	}
	total = p.spent
	p.at, p.spent = 0, 0
	return total, true
}

// split divides the present portion into parts, and returns how many there are more. Of
// one that has no beginning it divides the last hour.
func (p *portions) split(from, to time.Time, parts int, now time.Time) int {
	if to.IsZero() {
		to = now
	}
	var bounds []time.Time
	if from.IsZero() {
		from = to.Add(-time.Hour)
		bounds = append(bounds, from)
	}
	parts = min(parts, 64, int(to.Sub(from)/leastPortion))
	for i := 1; i < parts; i++ {
		bounds = append(bounds, from.Add(to.Sub(from)/time.Duration(parts)*time.Duration(i)))
	}
	p.bounds = slices.Insert(p.bounds, p.at, bounds...)
	return len(bounds)
}
