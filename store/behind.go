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
// waiting for nothing that is known: it came after the claim had passed. The last row has, in
// the place of an ID, how many microseconds Postgres took: what the network and this process
// take is no reason to look at less.
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
        LIMIT 1) t
UNION ALL
SELECT -1, '0001-01-01 UTC', (extract(epoch FROM clock_timestamp() - statement_timestamp()) * 1000000)::bigint`

const (
	// lookFor is about how long one call of LookBehind looks. It is called every second.
	lookFor = 20 * time.Millisecond

	// A portion that takes longer than longPortion is split; one that takes less than
	// shortPortion is joined with the one before it.
	longPortion  = 10 * time.Millisecond
	shortPortion = 3 * time.Millisecond

	// leastPortion is not split, and there are no more than maxPortions.
	leastPortion = 10 * time.Millisecond
	maxPortions  = 512

	// slowLooks is how often a portion is looked at that takes longer than longPortion: the
	// quickest look tells what it costs. The others may have waited for a processor, and the more
	// portions there are, the longer it takes until all have been looked at.
	slowLooks = 3
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
// processor busy for long. Each call begins with the newest portion: most of what claims pass
// over has just come.
func (s *Store) LookBehind(ctx context.Context, c tasks.Claim) (some bool, err error) {
	l := s.lanesOf(c)
	defer l.lookBehind()()
	began := time.Now()
	for portions := 0; portions < 2 || time.Since(began) < lookFor; portions++ {
		p, due := l.toLookBehind(began, portions == 0)
		if !due {
			break
		}
		found, took, err := s.lookBehind(ctx, p.marks, p.from, p.to)
		p.took, p.looks = took, 1
		for ; err == nil && len(found) == 0 && p.took > longPortion && p.looks < slowLooks; p.looks++ {
			found, took, err = s.lookBehind(ctx, p.marks, p.from, p.to)
			p.took = min(p.took, took)
		}
		if err != nil {
			if p.took > longPortion { // or it would be too long again
				l.lookedBehind(p, nil)
			}
			return some, fmt.Errorf("look behind claims: %w", err)
		}
		some = some || len(found) > 0
		if l.lookedBehind(p, found) {
			break
		}
	}
	return some, nil
}

// lookBehind is what LookBehind looks at at a time.
type lookBehind struct {
	marks    map[int64]mark
	from, to time.Time // the portion; zero for none
	newest   bool      // out of turn

	took  time.Duration // the quickest look
	looks int
}

// lookBehind returns the first row of each lane, and how long Postgres took.
func (s *Store) lookBehind(ctx context.Context, marks map[int64]mark, from, to time.Time) (found map[int64]mark, took time.Duration, err error) {
	began := time.Now()
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
		return nil, time.Since(began), err
	}
	found = make(map[int64]mark, len(rows))
	for _, r := range rows {
		if r.Lane == -1 {
			took = time.Duration(r.ID) * time.Microsecond
			continue
		}
		found[r.Lane] = mark{runAt: r.RunAt, id: r.ID - 1}
	}
	return found, took, nil
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
// call that began then. The first one of a call is the newest, if there are several.
func (l *lanes) toLookBehind(began time.Time, first bool) (p lookBehind, due bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.expensive || l.since.Before(began) && time.Since(l.since) < l.rest() {
		return p, false
	}
	if l.since.Before(began) {
		l.again(time.Now())
	}
	p.marks = maps.Clone(l.marks)
	if p.newest = first && len(l.behind.bounds) > 0; p.newest {
		p.from = l.behind.bounds[len(l.behind.bounds)-1]
	} else {
		p.from, p.to = l.behind.next()
	}
	return p, true
}

// lookedBehind lets claims go on from what was found. Where looking was cheap they
// do it themselves again. It reports whether all portions were looked at.
func (l *lanes) lookedBehind(p lookBehind, found map[int64]mark) (all bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.since, l.cost = time.Now(), l.cost+min(p.took*time.Duration(p.looks), maxCharge)
	if p.newest {
		if p.took > longPortion {
			l.behind.split(len(l.behind.bounds), p.took, l.since)
		}
	} else {
		var total time.Duration
		if total, all = l.behind.looked(p.took, l.since); all && total < expensiveCost {
			l.marks, l.expensive, l.empty, l.cost, l.behind = nil, false, false, p.took, portions{}
			return all
		}
	}
	if len(found) > 0 {
		l.finds++
	}
	for lane, m := range found {
		old, known := l.marks[lane]
		if known && m.before(old) {
			m.busy, m.found = old.busy, l.finds
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
	parts := 0
	switch {
	case took > longPortion:
		parts = p.split(p.at, took, now)
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

// split divides a portion that took so long, and returns how many there are more. Of one that
// has no beginning it divides the last hour.
func (p *portions) split(at int, took time.Duration, now time.Time) int {
	var from time.Time
	to := now
	if at > 0 {
		from = p.bounds[at-1]
	}
	if at < len(p.bounds) {
		to = p.bounds[at]
	}
	parts := min(int(took*2/longPortion), 64, maxPortions-len(p.bounds))
	if parts < 1 {
		return 0
	}
	var bounds []time.Time
	if from.IsZero() {
		from = to.Add(-time.Hour)
		bounds = append(bounds, from)
	}
	parts = min(parts, int(to.Sub(from)/leastPortion))
	for i := 1; i < parts; i++ {
		bounds = append(bounds, from.Add(to.Sub(from)/time.Duration(parts)*time.Duration(i)))
	}
	p.bounds = slices.Insert(p.bounds, at, bounds...)
	return len(bounds)
}
