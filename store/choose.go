package store

import (
	"encoding/json"
	"maps"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/tasks"
)

// chooseSQL returns the statement that locks the rows to take, leaves their ids in
// the setting onejob.claimed, and says how far it looked.
//
// The order is (priority DESC, run_at, id) over all lanes; see onejob.lane for what
// a lane is. A loose index scan finds the lanes in the order of their priority, with
// the first row of each, one probe a lane, and ends below the priority at which
// there are enough. The lanes whose first rows are most urgent show some of their
// rows: the first two show @show each, the third two thirds, the fourth a half. That
// is some ten times what one lane alone would show, however many lanes there are, and
// no row is passed over: what is claimed ends where a lane that has more to show
// stops, or where one begins that shows nothing because as many as are wanted come
// before it (bound). Their first rows may not be had.
// Where nothing could be had, the next look lets more lanes show some than are wanted
// (@heads), for there may be one for each priority.
//
// Rows are then locked in order until there are @max. What others have locked is
// skipped. A lock_key is reserved before a row with it is taken, see
// onejob.reserve_lock_key, and of each key only the first row counts. A row without
// one shares its key, its id, only with a lock_key that happens to be the same
// number, whose reservation locks that row (onejob.reserve_task); if the key becomes
// busy just now, or both are picked, the unique index on running lock keys refuses,
// and Claim asks again for fewer.
//
// A reservation takes a place in Postgres' table of locks, which all sessions share, until
// the claim ends. So a key is reserved only when its row is locked: there may be tens of
// thousands of rows that others have locked. OFFSET 0 keeps the reservation above the
// lock. A row that Postgres has refused (@avoid), or whose queue is paused, is not the first of its
// key. And a row whose key is running is not locked at all: the statement's snapshot shows
// all that have been running for a moment.
//
// Nothing is picked on another server than @server, and nothing of a queue that is paused
// when the statement begins (paused). Lanes of paused queues are passed over like those of
// kinds that this replica does not know, so they are in nobody's way.
//
// What could not be had does not hide what is behind it. The statement reports, for
// each lane, up to where all rows are dealt with, and the lock keys of those that it
// left (ends); as marks they tell the next one where to go on. The first row of
// each key that was left is asked for by name (freed).
//
// now() is when the transaction began, which is before it had its turn. So rows are
// due by statement_timestamp().
//
// What was picked of what was shown is found by grouping. Of both Postgres expects one
// row, and would join them by comparing each with each.
//
// A row that was shown is found again by its place in the table (ctid): that reads one page,
// and an index three or four. If it has a new version by now, that one is somewhere else: some
// releases of Postgres pass it over, others lock the new version. What is picked has the place
// of the version that is locked. Nobody can change or remove that one, so takeSQL finds it
// there; without index scans, or it would read a whole index as long as the table is small
// when its plan is made.
//
// The subqueries with LIMIT 1, where NOT EXISTS would do, keep the planner from
// a join: it would read all that is running, or by a bad guess the whole table.
// And the CASE hides from it that tasks_pending could find a row by its id, which
// looks right only while the table is empty. See docs/decisions/claim.md.
//
// A plain look has no marks and reports none. Its statement is half as long, without the
// lines that end in "-- marks": for a claim of one row, most of the cost is that Postgres
// prepares the nodes of the plan.
func chooseSQL(limit string, plain bool) string {
	switch {
	case limit == "" && plain:
		return chooseUnlimitedPlain
	case limit == "":
		return chooseUnlimited
	case plain:
		return chooseLimitedPlain
	}
	return chooseLimited
}

var (
	chooseUnlimited      = strings.ReplaceAll(choose, "{limit}", "limit_name IS NULL")
	chooseLimited        = strings.ReplaceAll(choose, "{limit}", "limit_name = @limit")
	chooseUnlimitedPlain = withoutMarks.ReplaceAllString(chooseUnlimited, "")
	chooseLimitedPlain   = withoutMarks.ReplaceAllString(chooseLimited, "")
)

// withoutMarks finds the lines of choose about marks.
var withoutMarks = regexp.MustCompile(`(?m)^.*  -- marks$\n?`)

const choose = claimComment + `
WITH RECURSIVE
paused AS MATERIALIZED (
    SELECT coalesce(array_agg(name), '{}') AS queues FROM onejob.queues WHERE paused_until > statement_timestamp()
),
marks AS MATERIALIZED (  -- marks
    SELECT lane, busy::jsonb AS busy,  -- marks
           least(run_at, statement_timestamp() - @margin * interval '1 microsecond') AS run_at,  -- marks
           CASE WHEN run_at <= statement_timestamp() - @margin * interval '1 microsecond' THEN id ELSE 0 END AS id  -- marks
      FROM unnest(@lanes::bigint[], @run_ats::timestamptz[], @ids::bigint[], @busy::text[]) AS m(lane, run_at, id, busy)  -- marks
),  -- marks
lanes AS (
    SELECT (-1)::bigint AS lane, NULL::timestamptz AS run_at, NULL::bigint AS id, NULL::jsonb AS busy, false AS marked, false AS served, 0 AS due, 0 AS above
 UNION ALL
    SELECT next.lane, next.run_at, next.id, next.busy, next.marked, s.served, l.due + s.served::int,
           CASE WHEN next.lane >> 52 > l.lane >> 52 THEN l.due ELSE l.above END
      FROM lanes l
      LEFT JOIN LATERAL (SELECT * FROM marks WHERE lane > l.lane ORDER BY lane LIMIT 1) m ON true  -- marks
     CROSS JOIN LATERAL (
          (SELECT onejob.lane(priority, queue, kind, lock_key IS NULL), kind, queue, run_at, id, NULL::jsonb, false
             FROM onejob.tasks
            WHERE status = 'pending'
              AND {limit}
              AND onejob.lane(priority, queue, kind, lock_key IS NULL) > l.lane
              AND onejob.lane(priority, queue, kind, lock_key IS NULL) < coalesce(m.lane, 9223372036854775807)  -- marks
            ORDER BY onejob.lane(priority, queue, kind, lock_key IS NULL), run_at, id
            LIMIT 1)
       UNION ALL  -- marks
          (SELECT m.lane, t.kind, t.queue, t.run_at, t.id, m.busy, true  -- marks
             FROM (SELECT WHERE m.lane IS NOT NULL) marked  -- marks
             LEFT JOIN LATERAL (  -- marks
                  SELECT kind, queue, run_at, id  -- marks
                    FROM onejob.tasks  -- marks
                   WHERE status = 'pending'  -- marks
                     AND {limit}  -- marks
                     AND onejob.lane(priority, queue, kind, lock_key IS NULL) = m.lane  -- marks
                     AND (run_at, id) > (m.run_at, m.id)  -- marks
                   ORDER BY run_at, id  -- marks
                   LIMIT 1) t ON true)  -- marks
            LIMIT 1  -- marks
               ) next(lane, kind, queue, run_at, id, busy, marked)
     CROSS JOIN LATERAL (
          SELECT coalesce(next.run_at <= statement_timestamp()
                      AND next.kind = ANY (@kinds)
                      AND (cardinality(@queues::text[]) = 0 OR next.queue = ANY (@queues))
                      AND next.queue <> ALL ((SELECT queues FROM paused)::text[]), false) AS served) s
     WHERE l.above < @heads
), heads AS MATERIALIZED (
    SELECT *, row_number() OVER urgency AS rank,
           CASE WHEN marked THEN @walk::bigint ELSE @show::bigint END * 2 / greatest(row_number() OVER urgency, 2) AS allotted
      FROM lanes
     WHERE served
    WINDOW urgency AS (ORDER BY lane >> 52, run_at, id)
     ORDER BY lane >> 52, run_at, id
     LIMIT @heads::bigint + 1
), shown AS MATERIALIZED (
    SELECT h.lane, h.lane >> 52 AS urgency, t.run_at, t.id, t.tuple, t.lock_key, t.place = h.allotted AS last, coalesce(h.busy ? t.lock_key, false) AS known
      FROM heads h
     CROSS JOIN LATERAL (
           SELECT run_at, id, ctid AS tuple, lock_key, row_number() OVER (ORDER BY run_at, id) AS place
             FROM onejob.tasks
            WHERE status = 'pending'
              AND {limit}
              AND onejob.lane(priority, queue, kind, lock_key IS NULL) = h.lane
              AND (run_at, id) >= (h.run_at, h.id)
              AND run_at <= statement_timestamp()
            ORDER BY run_at, id
            LIMIT h.allotted) t
     WHERE h.rank <= @heads
), bound AS MATERIALIZED (
    SELECT urgency, run_at, id
      FROM (SELECT urgency, run_at, id FROM shown WHERE last
         UNION ALL
            SELECT lane >> 52, run_at, greatest(id, -9223372036854775807) - 1 FROM heads WHERE rank > @heads) ends_of_what_is_shown
     ORDER BY urgency, run_at, id
     LIMIT 1
), freed AS (  -- marks
    SELECT m.lane >> 52 AS urgency, t.run_at, t.id, t.tuple, k.lock_key  -- marks
      FROM marks m  -- marks
     CROSS JOIN LATERAL jsonb_object_keys(m.busy) AS k(lock_key)  -- marks
     CROSS JOIN LATERAL (  -- marks
           SELECT run_at, id, ctid AS tuple, queue  -- marks
             FROM onejob.tasks  -- marks
            WHERE status = 'pending'  -- marks
              AND {limit}  -- marks
              AND onejob.lane(priority, queue, kind, lock_key IS NULL) = m.lane  -- marks
              AND lock_key = k.lock_key  -- marks
              AND id <> ALL (@avoid)  -- marks
            ORDER BY run_at, id  -- marks
            LIMIT 1) t  -- marks
     WHERE t.run_at <= statement_timestamp()  -- marks
       AND t.queue <> ALL ((SELECT queues FROM paused)::text[])  -- marks
       AND (SELECT true FROM onejob.tasks r  -- marks
             WHERE r.status = 'running' AND coalesce(r.lock_key, r.id::text) = k.lock_key LIMIT 1) IS NULL  -- marks
), candidates AS (
    SELECT urgency, run_at, id, tuple FROM shown WHERE lock_key IS NULL
 UNION ALL
    SELECT urgency, run_at, id, tuple
      FROM (SELECT DISTINCT ON (lock_key) urgency, run_at, id, tuple
              FROM (SELECT urgency, run_at, id, tuple, lock_key FROM shown WHERE lock_key IS NOT NULL AND NOT known AND id <> ALL (@avoid)
                 UNION ALL  -- marks
                    SELECT urgency, run_at, id, tuple, lock_key FROM freed  -- marks
                   ) keyed
             ORDER BY lock_key, urgency, run_at, id) first_of_its_key
), picked AS MATERIALIZED (
    SELECT c.urgency, c.run_at, c.id, t.tuple
      FROM (SELECT c.*
              FROM candidates c
              LEFT JOIN bound b ON true
             WHERE coalesce(pg_postmaster_start_time() = @server::timestamptz, true)
               AND (NOT @strictly OR b.id IS NULL OR (c.urgency, c.run_at, c.id) <= (b.urgency, b.run_at, b.id))
             ORDER BY c.urgency, c.run_at, c.id) c
     CROSS JOIN LATERAL (
           SELECT ctid AS tuple, lock_key
             FROM onejob.tasks p
            WHERE ctid = c.tuple
              AND id = c.id
              AND CASE WHEN status <> 'pending' OR run_at > statement_timestamp() OR id = ANY (@avoid)
                         OR ({limit}) IS NOT TRUE OR kind <> ALL (@kinds) OR cardinality(@queues) > 0 AND queue <> ALL (@queues)
                         OR queue = ANY ((SELECT queues FROM paused)::text[]) THEN false
                       ELSE (SELECT true FROM onejob.tasks r
                              WHERE r.status = 'running' AND coalesce(r.lock_key, r.id::text) = coalesce(p.lock_key, p.id::text) LIMIT 1) IS NULL END
           OFFSET 0
              FOR NO KEY UPDATE SKIP LOCKED) t
     WHERE CASE WHEN t.lock_key IS NULL THEN true ELSE onejob.reserve_lock_key(t.lock_key) END
     LIMIT @max
), reached AS MATERIALIZED (  -- marks
    SELECT urgency, run_at, id  -- marks
      FROM (SELECT * FROM bound WHERE @strictly  -- marks
         UNION ALL  -- marks
           (SELECT urgency, run_at, id FROM picked WHERE (SELECT count(*) FROM picked) = @max ORDER BY urgency DESC, run_at DESC, id DESC LIMIT 1)) both_ends  -- marks
     ORDER BY urgency, run_at, id  -- marks
     LIMIT 1  -- marks
), dealt_with AS MATERIALIZED (  -- marks
    SELECT s.lane, s.run_at, s.id, CASE WHEN NOT s.picked AND NOT s.known THEN s.lock_key END AS busy  -- marks
      FROM (SELECT max(lane) AS lane, max(urgency) AS urgency, max(run_at) AS run_at, id, max(lock_key) AS lock_key, bool_or(known) AS known, bool_or(picked) AS picked  -- marks
              FROM (SELECT lane, urgency, run_at, id, lock_key, known, false AS picked FROM shown  -- marks
                 UNION ALL  -- marks
                    SELECT NULL, NULL, NULL, id, NULL, NULL, true FROM picked) shown_or_picked  -- marks
             GROUP BY id) s  -- marks
      LEFT JOIN reached r ON true  -- marks
     WHERE s.lane IS NOT NULL  -- marks
       AND (r.id IS NULL OR (s.urgency, s.run_at, s.id) <= (r.urgency, r.run_at, r.id))  -- marks
), ends AS (  -- marks
    SELECT DISTINCT ON (lane) lane, run_at, id  -- marks
      FROM dealt_with  -- marks
     ORDER BY lane, run_at DESC, id DESC  -- marks
     LIMIT 128  -- marks
), busy AS (  -- marks
    SELECT lane, array_agg(busy) AS keys  -- marks
      FROM (SELECT DISTINCT lane, busy FROM dealt_with WHERE busy IS NOT NULL LIMIT 64) few  -- marks
     GROUP BY lane  -- marks
)
SELECT set_config('onejob.claimed', p.ids::text, false),
       set_config('onejob.tuples', p.tuples::text, true),
       set_config('enable_indexscan', 'off', true),
       set_config('lock_timeout', @lock_patience, true),
       set_config('statement_timeout', @patience, true),
       cardinality(p.ids),
       EXISTS (SELECT FROM bound) OR (SELECT count(*) FROM heads) >= @heads OR cardinality(p.ids) >= @max,
       coalesce(pg_postmaster_start_time() <> @server::timestamptz, false),
       (extract(epoch FROM clock_timestamp() - statement_timestamp()) * 1000000)::bigint,
       (SELECT count(*) FROM shown) > cardinality(p.ids)
       , e.lanes, e.run_ats, e.ids, e.keys  -- marks
  FROM (SELECT coalesce(array_agg(id), '{}') AS ids, coalesce(array_agg(tuple), '{}') AS tuples FROM picked) p
 CROSS JOIN (  -- marks
       SELECT array_agg(lane) AS lanes, array_agg(greatest(run_at, '0001-01-01 UTC')) AS run_ats, array_agg(id) AS ids, array_agg(to_jsonb(keys)) AS keys  -- marks
         FROM ends LEFT JOIN busy USING (lane)) e  -- marks`

// chosen is the answer to chooseSQL.
type chosen struct {
	claimed string // the ids, as Postgres writes an array
	picked  int
	more    bool           // than what was looked at
	other   bool           // it was another server
	took    time.Duration  // by Postgres' clock
	left    bool           // rows that were looked at, and could not be had
	ends    map[int64]mark // empty after a plain look
}

// A mark is a place in a lane. All rows up to it were taken, or could not be had:
// those whose lock key was busy by its key, the others because somebody had locked
// them.
type mark struct {
	runAt time.Time
	id    int64
	busy  map[string]bool
	found uint64 // the number of the look behind that has moved it back; 0 if none has
}

// ids returns the ids of the rows that were picked.
func (c chosen) ids() []int64 {
	var ids []int64
	for _, text := range strings.Split(strings.Trim(c.claimed, "{}"), ",") {
		if id, err := strconv.ParseInt(text, 10, 64); err == nil {
			ids = append(ids, id)
		}
	}
	return ids
}

func readChosen(row pgx.Row, plain bool) (c chosen, err error) {
	var lanes, ids []int64
	var runAts []time.Time
	var keys [][]string
	var setting string
	var micros int64
	into := []any{&c.claimed, &setting, &setting, &setting, &setting, &c.picked, &c.more, &c.other, &micros, &c.left, &lanes, &runAts, &ids, &keys}
	if plain {
		into = into[:10]
	}
	if err := row.Scan(into...); err != nil {
		return c, err
	}
	c.took = time.Duration(micros) * time.Microsecond
	c.ends = make(map[int64]mark, len(lanes))
	for i, lane := range lanes {
		m := mark{runAt: runAts[i], id: ids[i], busy: map[string]bool{}}
		for _, k := range keys[i] {
			m.busy[k] = true
		}
		c.ends[lane] = m
	}
	return c, nil
}

// memory is what is remembered of the lanes, for each sort of claim.
type memory struct {
	mu   sync.Mutex
	sort map[string]*lanes
	uses uint64 // of all sorts
}

// forget lets the next claim of each sort begin at the first row of each lane.
func (r *memory) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sort = nil
}

// costly returns the marks behind which looking is expensive, as arguments of a statement:
// LookBehind does that.
func (r *memory) costly() namedArgs {
	r.mu.Lock()
	defer r.mu.Unlock()
	marks := map[int64]mark{}
	for _, l := range r.sort {
		l.mu.Lock()
		if l.expensive && l.watched() {
			for lane, m := range l.marks {
				if old, known := marks[lane]; !known || m.before(old) {
					marks[lane] = m
				}
			}
		}
		l.mu.Unlock()
	}
	return markArguments(marks)
}

// sortOf names the sort of a claim.
func sortOf(c tasks.Claim) string {
	return strings.Join([]string{c.Limit, strings.Join(c.Kinds, "\x1f"), strings.Join(c.Queues, "\x1f")}, "\x1e")
}

func (s *Store) lanesOf(c tasks.Claim) *lanes {
	name := sortOf(c)
	s.remember.mu.Lock()
	defer s.remember.mu.Unlock()
	l := s.remember.sort[name]
	if l == nil {
		if s.remember.sort == nil {
			s.remember.sort = map[string]*lanes{}
		}
		if len(s.remember.sort) == maxSorts {
			s.remember.drop()
		}
		l = &lanes{limited: c.Limit != ""}
		s.remember.sort[name] = l
	}
	s.remember.uses++
	l.use = s.remember.uses
	return l
}

// drop forgets the sort that was used longest ago: one with a limit, if there is any, as what claims
// without one have passed may be the most. r.mu is held.
func (r *memory) drop() {
	first := ""
	for name, l := range r.sort {
		if old := r.sort[first]; old == nil || l.limited && !old.limited || l.limited == old.limited && l.use < old.use {
			first = name
		}
	}
	delete(r.sort, first)
}

// lanes remembers where claims of one sort go on. To forget is always right: the
// next claim begins at the first row of each lane and finds what there is.
type lanes struct {
	limited bool   // claims of this sort are under a limit
	use     uint64 // the number of its last use; under the mutex of memory

	mu        sync.Mutex
	marks     map[int64]mark
	since     time.Time     // when a claim last began without marks
	cost      time.Duration // of looking in vain: of that one, and of those after it that found nothing
	earlier   time.Duration // the most that it was the times before, of which each one counts a quarter less than the next
	walk      int           // what it was in the last look
	empty     bool          // the last claim found nothing, and there is more to look at
	expensive bool          // beginning without marks costs much
	idle      bool          // the last look began without marks, took few rows and left none
	looking   int           // calls of LookBehind for them that have not returned
	lookedAt  time.Time     // when the last one returned
	behind    portions      // in which it looks
	finds     uint64        // how many of its looks have found rows
}

// again notes that a look begins.
func (l *lanes) again(now time.Time) {
	l.since, l.cost, l.earlier = now, 0, max(l.cost, l.earlier*3/4)
}

// rest is for how long nobody looks again. A look that took long may have waited for a
// processor, or for a disk; two of a few have looked at much.
func (l *lanes) rest() time.Duration { return restFactor * min(l.cost, l.earlier) }

// watched reports whether LookBehind looks after them, so that claims need not begin without
// marks. Nobody calls it for claims under a limit, for one.
func (l *lanes) watched() bool { return l.looking > 0 || time.Since(l.lookedAt) < watchFor }

const (
	// From a claim that began without marks to the next one so many times its cost
	// passes, if one of the few before it cost as much. So looking at rows that cannot be
	// had, or at what is left in the index of those that are gone, takes hardly more than
	// a twentieth.
	restFactor = 20

	// A claim that takes longer than this is not repeated for the sake of looking
	// from the beginning. LookBehind does that, beside the claims.
	expensiveCost = 5 * time.Millisecond

	// LookBehind is called every second. Claims go on without it when it was not for so long.
	watchFor = 10 * time.Second

	// A look that takes longer than this has most likely waited for somebody who had locked
	// the table, which is no reason to rest for many times as long.
	maxCharge = time.Second

	// rowCost is what a row costs, at the most, that is chosen. That cost is not of
	// looking in vain.
	rowCost = 20 * time.Microsecond

	// maxWalk is how many rows of a lane a look passes over that cannot be had. When
	// it has come to that, it takes what other lanes have, although that may be less
	// urgent than what it has not yet seen.
	maxWalk = 4096

	// Of so many rows that it passes over, a lane more shows some. There may be one for
	// each priority.
	maxWalkHeads = 32

	// A look from the beginning is plain after one that took no more rows than this and
	// left none: there will hardly be marks worth having.
	plainRows = 32

	// A transaction that inserts rows may commit after others whose rows are younger.
	// So the claim looks again at what came due within the last second.
	margin = time.Second

	maxSorts    = 256 // of claims: limits, that is
	maxMarks    = 1024
	maxBusyKeys = 256  // in one lane; of more, those that become free are found when a claim begins anew otherwise
	maxKeys     = 4096 // in all; the same
)

// A look is one use of what is remembered.
type look struct {
	max      int
	heads    int // lanes that show rows
	show     int // rows of the first lane
	walk     int // the same, for a lane in which it goes on
	strictly bool
	plain    bool // without marks, and reports none
	margin   time.Duration
	marks    map[int64]mark
	finds    uint64 // of LookBehind, until it began
}

// look returns what the next claim of up to most tasks begins with.
func (l *lanes) look(most int) look {
	l.mu.Lock()
	defer l.mu.Unlock()
	base := max(16, most)
	now := time.Now()
	rested := !l.empty && !(l.expensive && l.watched()) && now.Sub(l.since) > l.rest()
	if rested || len(l.marks) == 0 {
		l.again(now)
		l.marks, l.expensive, l.empty = nil, false, false
	}
	k := look{max: most, heads: most, show: base, walk: base, marks: maps.Clone(l.marks), margin: margin, finds: l.finds}
	if l.empty { // it goes on where the last one ended
		k.margin = 0
		k.walk = min(maxWalk, max(base, l.walk*8))
		k.heads = max(most, k.walk/maxWalkHeads)
	}
	k.strictly = k.walk < maxWalk
	k.plain = rested && l.idle
	return k
}

// looked remembers what came of a look. It reports false if it found nothing in more lanes than can
// be remembered: the next look would begin where this one did.
func (l *lanes) looked(k look, c chosen) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(k.marks) == 0 || l.empty {
		l.cost += min(maxCharge, max(0, c.took-time.Duration(c.picked)*rowCost))
		l.expensive = l.cost >= expensiveCost
	}
	l.empty = c.picked == 0 && c.more
	l.idle = c.picked <= plainRows && !c.more && !c.left && len(k.marks) == 0
	l.walk = k.walk
	if l.marks == nil {
		l.marks = map[int64]mark{}
	}
	keys := 0
	for _, m := range l.marks {
		keys += len(m.busy)
	}
	for lane, m := range c.ends {
		old := l.marks[lane]
		keys += len(m.busy)
		maps.Copy(m.busy, old.busy)
		if m.before(old) || old.found > k.finds { // two claims at once, or LookBehind has found a row since this one began
			m.runAt, m.id, m.found = old.runAt, old.id, old.found
		}
		if len(m.busy) > maxBusyKeys { // the place is kept: the next look would come to the same keys
			m.busy = map[string]bool{}
		}
		l.marks[lane] = m
	}
	switch {
	case len(l.marks) > maxMarks:
		l.marks, l.empty = nil, false
		return c.picked > 0
	case keys > maxKeys: // each of which a claim asks for
		for lane, m := range l.marks { // looks read the old ones
			m.busy = map[string]bool{}
			l.marks[lane] = m
		}
	}
	return true
}

// restart lets the next look begin at the first row of each lane.
func (l *lanes) restart() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.marks, l.empty = nil, false
}

func (m mark) before(o mark) bool {
	return m.runAt.Before(o.runAt) || m.runAt.Equal(o.runAt) && m.id < o.id
}

// arguments are those of chooseSQL. bounds are for the statement that makes the rows running.
func (k look) arguments(c tasks.Claim, avoid []int64, bounds []any) namedArgs {
	arguments := markArguments(k.marks)
	maps.Copy(arguments, namedArgs{
		"limit": c.Limit, "kinds": c.Kinds, "queues": notNil(c.Queues), "max": k.max, "heads": k.heads, "show": k.show, "walk": k.walk, "strictly": k.strictly,
		"margin": k.margin.Microseconds(), "avoid": avoid, "lock_patience": bounds[0], "patience": bounds[1], "server": moment(c.Server),
	})
	return arguments
}

func markArguments(marks map[int64]mark) namedArgs {
	n := len(marks)
	lanes, runAts, ids, busy := make([]int64, 0, n), make([]time.Time, 0, n), make([]int64, 0, n), make([]string, 0, n)
	for lane, m := range marks {
		keys, _ := json.Marshal(m.busy) // a map of this type always can be
		lanes, runAts, ids, busy = append(lanes, lane), append(runAts, m.runAt), append(ids, m.id), append(busy, string(keys))
	}
	return namedArgs{"lanes": lanes, "run_ats": runAts, "ids": ids, "busy": busy}
}

// moment is t, or NULL if it is zero.
func moment(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}
