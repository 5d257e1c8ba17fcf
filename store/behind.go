package store

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/tasks"
)

// behindSQL returns, for each mark, the first row before it in a portion of time that is
// waiting for nothing that is known: it came after the claim had passed. The last row has, in
// the place of an ID, how many microseconds Postgres took: what the network and this process
// take is no reason to look at less.
const behind = `
SELECT m.lane, greatest(t.run_at, '0001-01-01 UTC'), t.id
  FROM unnest(@lanes::bigint[], @run_ats::timestamptz[], @ids::bigint[], @busy::text[]) AS m(lane, run_at, id, busy)
 CROSS JOIN LATERAL (
       SELECT run_at, id
         FROM onejob.tasks
        WHERE status = 'pending'
          AND limit_name IS NULL
          AND onejob.lane(priority, queue, kind, lock_key IS NULL) = m.lane
          AND (run_at, id) <= (m.run_at, m.id)
          AND {portion}
          AND NOT coalesce(m.busy::jsonb ? lock_key, false)
        ORDER BY run_at, id
        LIMIT 1) t
UNION ALL
SELECT -1, '0001-01-01 UTC', (extract(epoch FROM clock_timestamp() - statement_timestamp()) * 1000000)::bigint`

// A portion ends at a time, or is one of a moment. The comparison of two rows does not end a walk
// through an index where their second column decides.
var (
	behindSQL = strings.Replace(behind, "{portion}", `(run_at, id) >= (coalesce(@from::timestamptz, '-infinity'), @from_id::bigint) AND run_at < coalesce(@to::timestamptz, 'infinity')`, 1)
	momentSQL = strings.Replace(behind, "{portion}", `run_at = @from AND id >= @from_id AND id < @to_id`, 1)
)

const (
	// lookFor is about how long one call of LookBehind looks. It is called every second.
	lookFor = 20 * time.Millisecond

	// A portion that takes longer than longPortion is split, or, where so many are not enough, than
	// longPart of all of them together. One that takes less than a third of that is joined with the one
	// before it.
	longPortion = 10 * time.Millisecond
	longPart    = maxPortions / 3

	// leastPortion is not split, unless a look at it takes longer than oneMoment: then rows of one
	// time may be in it, and it is split down to the microsecond, of which there are no parts, and
	// then by IDs. There are no more than maxPortions.
	leastPortion = 10 * time.Millisecond
	oneMoment    = 100 * time.Millisecond
	maxPortions  = 512

	// slowLooks is how often a portion is looked at that takes so long that it is split: the
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
// processor busy for long. Rows that one statement has inserted mostly have one time: many of them
// are divided by their IDs. Each call begins with the newest portion: most of what claims pass
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
		for ; err == nil && len(found) == 0 && p.took > p.long && p.looks < slowLooks; p.looks++ {
			found, took, err = s.lookBehind(ctx, p.marks, p.from, p.to)
			p.took = min(p.took, took)
		}
		if err != nil {
			if p.took > p.long { // or it would be too long again
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
	from, to place         // the portion; zero for none
	newest   bool          // out of turn
	long     time.Duration // one that takes longer is split

	took  time.Duration // the quickest look
	looks int
}

// lookBehind returns the first row of each lane, and how long Postgres took.
func (s *Store) lookBehind(ctx context.Context, marks map[int64]mark, from, to place) (found map[int64]mark, took time.Duration, err error) {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	type row struct {
		Lane  int64
		RunAt time.Time
		ID    int64
	}
	arguments := markArguments(marks)
	arguments["from"], arguments["from_id"] = moment(from.at), from.first()
	sql := behindSQL
	if to.ofAMoment() {
		sql, arguments["to_id"] = momentSQL, to.id
	} else {
		arguments["to"] = moment(to.at)
	}
	rows, err := query(ctx, s.pool, pgx.RowToStructByPos[row], sql, arguments)
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
	p.marks, p.long = maps.Clone(l.marks), l.behind.long()
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
		if p.took > l.behind.long() {
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

// place is one in the order of due rows: in front of the row of that time and ID, whether or not there
// is one.
type place struct {
	at time.Time
	id int64
}

// before returns the place in front of all rows of a time.
func before(at time.Time) place { return place{at.Truncate(time.Microsecond), math.MinInt64} }

// ofAMoment reports whether it is among rows of one time.
func (p place) ofAMoment() bool { return p.first() != math.MinInt64 }

// first returns the ID, and that of no row for the zero place.
func (p place) first() int64 {
	if p.at.IsZero() {
		return math.MinInt64
	}
	return p.id
}

// portions divide all rows so that to look at each takes about as long. One that ends among rows of one
// time has no others.
type portions struct {
	bounds []place       // between them, ascending
	at     int           // the next one
	spent  time.Duration // since the first
	total  time.Duration // what all took the last time
}

// long returns how long a portion may take.
func (p *portions) long() time.Duration { return max(longPortion, p.total/longPart) }

// next returns the next portion.
func (p *portions) next() (from, to place) { return p.bounded(p.at) }

// bounded returns a portion: from from on, before to. A zero place is no bound.
func (p *portions) bounded(at int) (from, to place) {
	if at > 0 {
		from = p.bounds[at-1]
	}
	if at < len(p.bounds) {
		to = p.bounds[at]
	}
	return from, to
}

// looked says how long that one took. Of the last one it returns how long all took, and
// begins anew.
func (p *portions) looked(took time.Duration, now time.Time) (total time.Duration, all bool) {
	p.spent += took
	parts := 0
	switch {
	case took > p.long():
		parts = p.split(p.at, took, now)
	case took < p.long()/3 && p.joins():
		p.bounds = slices.Delete(p.bounds, p.at-1, p.at)
		p.at--
	}
	p.at += 1 + parts
	if p.at <= len(p.bounds) {
		return 0, false
	}
	p.total = p.spent
	p.at, p.spent = 0, 0
	return p.total, true
}

// joins reports whether the next portion can be joined with the one before it.
func (p *portions) joins() bool {
	switch {
	case p.at == 0:
		return false
	case p.at == len(p.bounds) || !p.bounds[p.at].ofAMoment():
		return true
	}
	return p.at > 1 && p.bounds[p.at-2].at.Equal(p.bounds[p.at].at)
}

// split divides a portion that took so long, and returns how many there are more. Of one that
// has no beginning it divides the last hour, or as much as lies between its end and now, back to the
// first centuries.
func (p *portions) split(at int, took time.Duration, now time.Time) int {
	from, to := p.bounded(at)
	if at >= len(p.bounds) {
		to = before(now)
	}
	parts := min(int(took*2/p.long()), 64, maxPortions-len(p.bounds))
	if parts < 1 {
		return 0
	}
	var bounds []place
	if from.at.IsZero() {
		if to.at.Year() < 300 {
			return 0
		}
		from = before(to.at.Add(-max(time.Hour, now.Sub(to.at))))
		bounds = append(bounds, from)
	}
	least := leastPortion
	if took > oneMoment {
		least = time.Microsecond
	}
	bounds = append(bounds, divide(from, to, parts, least)...)
	p.bounds = slices.Insert(p.bounds, at, bounds...)
	return len(bounds)
}

// divide returns what divides the rows from from on and before to into so many parts, or fewer: by time
// if each part is as long as least, and by IDs if all have one time.
func divide(from, to place, parts int, least time.Duration) (bounds []place) {
	span := to.at.Sub(from.at)
	if n := min(parts, int(span/least)); n > 1 {
		for i := 1; i < n; i++ {
			bounds = append(bounds, before(from.at.Add(span/time.Duration(n)*time.Duration(i))))
		}
		return bounds
	}
	low := max(0, from.id)
	switch {
	case span == 0:
		n := min(int64(parts), (to.id-low)/leastIDs)
		for i := int64(1); i < n; i++ {
			bounds = append(bounds, place{from.at, low + (to.id-low)/n*i})
		}
		return bounds
	case span < 0 || span > time.Microsecond:
		return nil
	}
	// Up to which ID there are rows is not known: each part is a multiple of the one before it.
	for i := range parts {
		id := low + leastIDs<<(maxIDBits*i/parts)
		if id < low {
			break // more than there are
		}
		if n := len(bounds); n == 0 || bounds[n-1].id < id {
			bounds = append(bounds, place{from.at, id})
		}
	}
	return bounds
}

// Rows of one time whose IDs are within leastIDs are not divided.
const leastIDs int64 = 1000

// maxIDBits is for IDs as high as there can be: leastIDs<<maxIDBits is about 2^62.
const maxIDBits = 52
