package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"onejob/internal/pgerror"
	"onejob/tasks"
	"onejob/tasks/schedule"
)

// DueSchedules returns the schedules whose next due time has come, or has yet
// to be worked out, or that were edited when due times had not been made, and what
// Postgres' clock says. Schedules that are disabled, or paused without an end, are there
// only for such due times. Left out are those in one of the zones that the caller does not
// know, and those that were put off, see MakeOccurrences and MarkSchedule.
//
// A person may have written anything into the times: -infinity, which no Go time is,
// counts as not worked out. A time that the clock has not reached is from before it
// was set back; nothing begins there. A line that was edited then begins now, and what the schedule
// was before is left out until AfterSetBack has brought the edit forward.
func (s *Store) DueSchedules(ctx context.Context, unknownZones []string) (now time.Time, due []schedule.Due, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	ids, versions, again := s.putOff.list()
	var edited []int64
	due, err = queryAfter(ctx, s.pool, func(row pgx.CollectableRow) (d schedule.Due, err error) {
		var former bool
		err = row.Scan(&now, &d.ID, &d.Name, &d.Cron, &d.Zone, &d.OnMissed, &d.MissedCap, &d.OnOverlap, &d.Next, &d.Begin, &d.Paused, &d.Changed, &d.Off, &former, &d.Busy,
			&d.Waiting, &d.QueueCap)
		if former {
			edited = append(edited, d.ID)
		}
		return d, err
	}, fixed, nil, `
WITH former AS (
    SELECT DISTINCT schedule_id
      FROM onejob.former_schedules
     WHERE time_zone <> ALL (coalesce($1, '{}'::text[]))
       AND until <= clock_timestamp()
)
SELECT now(), id, name, cron, time_zone, on_missed, missed_cap, on_overlap,
       CASE WHEN isfinite(next_at) THEN next_at END,
       CASE WHEN changed_at > clock_timestamp() AND isfinite(changed_at) THEN NULL
            ELSE nullif(greatest(CASE WHEN changed_at <= clock_timestamp() THEN changed_at END, CASE WHEN last_at <= clock_timestamp() THEN last_at END), '-infinity') END,
       CASE WHEN isfinite(paused_until) THEN paused_until END,
       CASE WHEN isfinite(changed_at) THEN changed_at END,
       NOT is_due,
       id IN (SELECT schedule_id FROM former),
       on_overlap = 'skip' AND EXISTS (SELECT
                                         FROM onejob.tasks t
                                        WHERE t.schedule_id = s.id
                                          AND t.status IN ('pending', 'running')),
       CASE WHEN on_overlap = 'queue'
            THEN (SELECT count(*)
                    FROM (SELECT
                            FROM onejob.tasks t
                           WHERE t.schedule_id = s.id
                             AND t.status IN ('pending', 'running')  -- as the index has it
                             AND t.status = 'pending'
                           LIMIT queue_cap) waiting)
            ELSE 0 END,
       queue_cap
  FROM onejob.schedules s
 CROSS JOIN LATERAL (
       SELECT enabled AND paused_until IS DISTINCT FROM 'infinity' AND (next_at IS NULL OR next_at <= now()) AND time_zone <> ALL (coalesce($1, '{}'::text[]))) AS x(is_due)
 WHERE (is_due OR id IN (SELECT schedule_id FROM former))
   AND `+notPutOff+`
 ORDER BY id = ANY (coalesce($4, '{}'::bigint[])), next_at NULLS FIRST, id  -- those that were locked a moment ago keep no others waiting
 LIMIT 1000`, unknownZones, ids, versions, again)
	if err == nil && len(edited) > 0 {
		err = s.addFormer(ctx, due, edited)
	}
	if err != nil {
		return now, nil, fmt.Errorf("look for due schedules: %w", err)
	}
	for i := range due {
		s.dueParts.bound(&due[i])
	}
	tried := s.putOff.tried()
	slices.SortStableFunc(due, func(a, b schedule.Due) int { return tried[a.ID].Compare(tried[b.ID]) })
	return now, due, nil
}

// addFormer adds to schedules what they were before their edits. It may see an edit
// that the schedule is not read with; then changed_at is another, and MakeOccurrences
// does nothing.
func (s *Store) addFormer(ctx context.Context, due []schedule.Due, edited []int64) error {
	type row struct {
		schedule.Former
		ScheduleID int64
	}
	list, err := query(ctx, s.pool, func(r pgx.CollectableRow) (f row, err error) {
		err = r.Scan(&f.ScheduleID, &f.ID, &f.Cron, &f.Zone, &f.Next, &f.Begin, &f.Until)
		return f, err
	}, `
SELECT schedule_id, id, cron, time_zone, next_at, begun_at, until
  FROM onejob.former_schedules
 WHERE schedule_id = ANY ($1)
   AND until <= clock_timestamp()
 ORDER BY id`, edited)
	if err != nil {
		return err
	}
	former := map[int64][]schedule.Former{}
	for _, f := range list {
		former[f.ScheduleID] = append(former[f.ScheduleID], f.Former)
	}
	for i := range due {
		due[i].Former = former[due[i].ID]
	}
	return nil
}

// makeSQL writes occurrences, their tasks and the schedule's next due time, and
// deletes what the schedule was before its edits, all or nothing. Nothing happens if
// the schedule is not as it was when it was planned: somebody changed it, or another
// leader was here. An occurrence that is there already makes no second task.
//
// An edit waits for this statement. This statement does not wait for an edit, or for
// another transaction that has the row: that may be open for hours, and the other schedules
// wait behind this one. So what an edit notes as not made is not made, and a new edit makes
// the plan void: changed_at is another. The conditions are those of the row as it is when it
// is locked.
const makeSQL = `
WITH schedule AS (
    UPDATE onejob.schedules
       SET next_at = CASE WHEN @keep THEN next_at ELSE coalesce(@next, 'infinity'::timestamptz) END,
           last_at = coalesce(@last, last_at),
           error   = CASE WHEN (@keep OR '' <> ALL (@reasons::text[])) AND enabled THEN error END
     WHERE id = (SELECT id
                   FROM onejob.schedules
                  WHERE id        = @id
                    AND cron      = @cron
                    AND time_zone = @zone
                    AND CASE WHEN isfinite(changed_at) THEN changed_at END IS NOT DISTINCT FROM @changed
                    AND (@keep OR enabled AND nullif(next_at, '-infinity') IS NOT DISTINCT FROM @old)
                    FOR NO KEY UPDATE SKIP LOCKED)
 RETURNING *
), done AS (
    DELETE FROM onejob.former_schedules f
     USING schedule s
     WHERE f.schedule_id = s.id
       AND f.id = ANY (@done)
), cut AS (
    UPDATE onejob.former_schedules f
       SET next_at = @cut_next
      FROM schedule s
     WHERE f.schedule_id = s.id
       AND f.id = @cut
), occurrences AS (
    INSERT INTO onejob.occurrences (schedule_id, due_at, task_id, skipped)
    SELECT s.id, o.due_at,
           CASE WHEN o.skipped = '' THEN nextval(pg_get_serial_sequence('onejob.tasks', 'id')) END,
           nullif(o.skipped, '')
      FROM schedule s
     CROSS JOIN unnest(@dues::timestamptz[], @reasons::text[]) AS o(due_at, skipped)
        ON CONFLICT (schedule_id, due_at) DO NOTHING
 RETURNING schedule_id, due_at, task_id
), made AS (` + insertTasks + `
 RETURNING id
)
SELECT EXISTS (SELECT FROM schedule), (SELECT count(*) FROM made)
 WHERE ` + allMade

// allMade makes a statement fail in which a trigger of the user's, or a rule, has left out tasks: a due
// time would have one that is not there. Nothing in it is constant, or Postgres would look at it before.
const allMade = `
    (CASE WHEN (SELECT count(*) FROM made) < (SELECT count(*) FROM occurrences WHERE task_id IS NOT NULL)
          THEN (@left_out::text || (SELECT count(*) FROM made)::text)::int END) IS NULL`

// errLeftOut is what is said of it.
var errLeftOut = errors.New("a trigger or rule of yours on onejob.tasks leaves out the row")

// leftOut returns errLeftOut for an error that allMade has caused.
func leftOut(err error) error {
	if pg := (*pgconn.PgError)(nil); errors.As(err, &pg) && pg.Code == invalidText && strings.Contains(pg.Message, errLeftOut.Error()) {
		return errLeftOut
	}
	return err
}

// insertTasks makes the tasks of occurrences, as their schedule is now.
const insertTasks = `
    INSERT INTO onejob.tasks (id, kind, payload, queue, priority, run_at, lock_key, limit_name, max_attempts, timeout, keep_for, schedule_id)
    OVERRIDING SYSTEM VALUE
    SELECT o.task_id, s.kind, s.payload, s.queue, s.priority, o.due_at,
           CASE WHEN s.on_overlap = 'queue' THEN coalesce(s.lock_key, 'schedule ' || s.name) ELSE s.lock_key END,
           s.limit_name, s.max_attempts, s.timeout, s.keep_for, s.id
      FROM occurrences o
      JOIN schedule s ON s.id = o.schedule_id
     WHERE o.task_id IS NOT NULL`

// MakeOccurrences writes what was planned for a schedule, all or nothing, and clears its
// error if there is a task among it. It reports whether the schedule was still as d says, and how many tasks there are
// that were not there before. It returns tasks.ErrUnwritable if these tasks are refused, by Postgres
// or a trigger of the user's, whatever that raises.
//
// If another transaction has locked the row, nothing is written either, and the schedule
// counts as not current. DueSchedules leaves one that is not current out for half a second,
// so that the caller does not ask again without a pause.
//
// If the tasks need a lock that another transaction has, by a foreign key of the user's for
// example, that is an error after half a second: the other schedules wait behind this one.
// DueSchedules then leaves it out for half a second, and twice as long each time that
// follows, up to 8 s, and returns it behind the others. Where there are many such schedules, each
// wait is shorter, and those that have waited before get a quarter of the time: one that would need
// more counts as not current.
//
// If Postgres takes too long, the due times may be too many for one statement. That is an error as
// well, and puts the schedule off in the same way; DueSchedules then returns it with a lower Most.
// The tasks count as refused if a single due time takes too long.
func (s *Store) MakeOccurrences(ctx context.Context, d schedule.Due, p schedule.Plan) (current bool, made int, err error) {
	if !s.putOff.turn(d.ID) {
		return false, 0, nil
	}
	began := time.Now()
	current, made, err = s.makeOccurrences(ctx, d, p)
	took, slow := time.Since(began), tookTooLong(ctx, err)
	switch {
	case pgerror.Is(err, lockTimeout):
		s.making.inVain(1)
		s.putOff.waited(d.ID, took)
	case errors.Is(err, errLeftOut), (aboutARow(err) || slow) && s.canMakeOccurrences(ctx):
		if n := len(p.Occurrences); slow && n > 1 {
			s.dueParts.shrink(d.ID, n)
			s.putOff.waited(d.ID, took)
			err = fmt.Errorf("%d due times at once take longer than %v, fewer are tried next: %w", n, s.timeout, err)
			break
		}
		err = fmt.Errorf("%w: %w", tasks.ErrUnwritable, err)
	case err == nil && current:
		s.dueParts.made(d.ID, p, took < s.timeout/4)
		s.putOff.remove(d.ID)
	case err == nil:
		s.putOff.add(d.ID, anyVersion, lockedFor)
	}
	if err != nil {
		return false, 0, fmt.Errorf("make occurrences of schedule %s: %w", d.Name, err)
	}
	return current, made, nil
}

func (s *Store) makeOccurrences(ctx context.Context, d schedule.Due, p schedule.Plan) (current bool, made int, err error) {
	type answer struct {
		Current bool
		Made    int
	}
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	answers, err := queryAfter(ctx, s.pool, pgx.RowToStructByPos[answer], fixed+`, pg_catalog.set_config('lock_timeout', $1, true)`,
		s.making.bounds(1, s.timeout)[:1], makeSQL, makeArgs(d, p))
	if err != nil {
		return false, 0, leftOut(err)
	}
	return answers[0].Current, answers[0].Made, nil
}

func makeArgs(d schedule.Due, p schedule.Plan) namedArgs {
	dues, reasons := make([]time.Time, len(p.Occurrences)), make([]string, len(p.Occurrences))
	var next, last, cutNext *time.Time
	for i, o := range p.Occurrences {
		dues[i], reasons[i] = o.Due, string(o.Skipped)
		last = &dues[i]
	}
	if !p.Next.IsZero() {
		next = &p.Next
	}
	if p.Cut != 0 {
		cutNext = &p.CutNext
	}
	return namedArgs{
		"id": d.ID, "cron": d.Cron, "zone": d.Zone, "changed": d.Changed, "old": d.Next, "keep": p.Keep, "next": next, "last": last,
		"done": p.Done, "cut": p.Cut, "cut_next": cutNext, "dues": dues, "reasons": reasons, "left_out": errLeftOut.Error(),
	}
}

// canMakeOccurrences reports whether Postgres accepts makeSQL for no schedule at all. If it
// does not, the cause concerns all schedules: onejob lacks a right, for example.
func (s *Store) canMakeOccurrences(ctx context.Context) bool {
	_, _, err := s.makeOccurrences(ctx, schedule.Due{}, schedule.Plan{Keep: true})
	return err == nil
}

// tookTooLong reports whether a statement was ended because it took longer than the store
// gives it, or than Postgres does (statement_timeout). ctx is the caller's.
func tookTooLong(ctx context.Context, err error) bool {
	return ctx.Err() == nil && (errors.Is(err, context.DeadlineExceeded) || pgerror.Is(err, queryCanceled))
}

// MarkSchedule notes on a schedule why it creates no tasks. DueSchedules then leaves it out
// for half a minute, and twice as long each time that follows, up to ten minutes, or until
// its row is changed in any way. MarkSchedule reports whether this is news: the schedule was
// not marked with the same message.
//
// It notes nothing if the schedule was edited since d was read, or if another transaction has
// locked its row. DueSchedules then leaves it out for half a second.
func (s *Store) MarkSchedule(ctx context.Context, d schedule.Due, message string) (news bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	var before, version string
	err = s.pool.QueryRow(ctx, `
WITH was AS (
    SELECT id, error, xmin::text AS version
      FROM onejob.schedules
     WHERE id        = $1
       AND cron      = $2
       AND time_zone = $3
       AND CASE WHEN isfinite(changed_at) THEN changed_at END IS NOT DISTINCT FROM $4
       FOR NO KEY UPDATE SKIP LOCKED
), marked AS (
    UPDATE onejob.schedules s
       SET error = $5
      FROM was
     WHERE s.id = was.id
       AND was.error IS DISTINCT FROM $5
 RETURNING s.xmin::text AS version
)
SELECT EXISTS (SELECT FROM marked), version, coalesce((SELECT version FROM marked), version) FROM was`,
		d.ID, d.Cron, d.Zone, d.Changed, tasks.Text(message)).Scan(&news, &before, &version)
	if errors.Is(err, pgx.ErrNoRows) {
		s.putOff.add(d.ID, anyVersion, lockedFor)
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("mark schedule %s: %w", d.Name, err)
	}
	s.putOff.mark(d.ID, before, version)
	return news, nil
}

const (
	// lockedFor is for how long a schedule is put off that is locked, or was changed since
	// it was read. It is also for how long tasks may wait for a lock while they are made.
	lockedFor = 500 * time.Millisecond

	// waitedFor is for how long a schedule is put off at most whose tasks wait for a lock.
	waitedFor = 8 * time.Second

	// markedFor is for how long a schedule is put off that creates no tasks for another
	// reason. It is shorter than schedule.OnTime: a due time that is refused once is not a
	// missed one. Each time that follows it is twice as long, since the due times of the
	// meantime are more and more.
	markedFor     = 30 * time.Second
	markedForLong = 10 * time.Minute

	anyVersion = ""

	// notPutOff leaves out rows of schedules that are put off. $2 has their ids, $3 their
	// versions.
	notPutOff = `NOT EXISTS (SELECT
                     FROM unnest($2::bigint[], $3::text[]) AS p(id, version)
                    WHERE p.id = s.id
                      AND p.version IN ('', s.xmin::text))`
)

// putOff has the schedules to leave alone for a while. A row that is not of the version
// (xmin) noted is another since: somebody has repaired the schedule, perhaps.
type putOff struct {
	mu   sync.Mutex
	rows map[int64]putOffRow

	vain time.Duration // which tries have waited in vain, less a quarter of the time since
	at   time.Time     // the last change of vain
}

type putOffRow struct {
	version string
	until   time.Time
	wait    time.Duration
	tried   time.Time // when its tasks waited for a lock in vain; zero if they did not
}

const (
	vainPart = 4                      // of the time; a schedule that is known to wait for a lock gets no more
	vainMost = 250 * time.Millisecond // at once: others may come due every second
)

func (p *putOff) add(id int64, version string, d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.put(id, version, d)
}

func (p *putOff) put(id int64, version string, d time.Duration) {
	if p.rows == nil {
		p.rows = map[int64]putOffRow{}
	}
	p.rows[id] = putOffRow{version: version, until: time.Now().Add(d), wait: d}
}

// mark puts off a schedule that was marked. before is the version that the row had.
func (p *putOff) mark(id int64, before, version string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	wait := markedFor
	if last, known := p.rows[id]; known && last.version == before {
		wait = min(2*last.wait, markedForLong)
	}
	p.put(id, version, wait)
}

// waited puts off a schedule whose tasks waited for a lock in vain. All other schedules
// waited, too, so it comes less and less often, and often enough to be in time once the lock is free.
func (p *putOff) waited(id int64, took time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	wait := lockedFor
	if last, known := p.rows[id]; known && last.version == anyVersion {
		wait = min(2*last.wait, waitedFor)
	}
	p.put(id, anyVersion, wait)
	row := p.rows[id]
	row.tried = time.Now()
	p.rows[id] = row
	p.vain = p.spent() + took
}

func (p *putOff) spent() time.Duration {
	now := time.Now()
	p.vain = max(0, p.vain-now.Sub(p.at)/vainPart)
	p.at = now
	return p.vain
}

// turn reports whether a schedule may be tried now. One that has waited in vain before is put off
// again while such schedules have had their part of the time.
func (p *putOff) turn(id int64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	row := p.rows[id]
	if row.tried.IsZero() || p.spent() < vainMost {
		return true
	}
	row.until = time.Now().Add(lockedFor)
	p.rows[id] = row
	return false
}

// tried returns when schedules have waited in vain.
func (p *putOff) tried() map[int64]time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	at := map[int64]time.Time{}
	for id, r := range p.rows {
		if !r.tried.IsZero() {
			at[id] = r.tried
		}
	}
	return at
}

func (p *putOff) remove(id int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.rows, id)
}

// list returns what is put off, and again what lately was.
func (p *putOff) list() (ids []int64, versions []string, again []int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for id, r := range p.rows {
		if now := time.Now(); now.After(r.until) {
			if now.After(r.until.Add(max(r.wait, markedFor))) { // until then the next wait is longer
				delete(p.rows, id)
			}
			again = append(again, id)
			continue
		}
		ids, versions = append(ids, id), append(versions, r.version)
	}
	return ids, versions, again
}

// dueParts knows the schedules whose due times take too long to be made in one statement. All other
// schedules wait for it, so a size is not approached slowly: it comes down to an eighth each time, and
// doubles where that takes a quarter of the time.
type dueParts struct {
	mu   sync.Mutex
	rows map[int64]duePart
}

type duePart struct {
	most int           // due times in the next statement
	part schedule.Part // for the plan that begins with next
	next time.Time
}

// bound sets how many due times of a schedule are planned. Another leader may have been here since the
// last plan: then the next one begins elsewhere, and is no part of the same.
func (p *dueParts) bound(d *schedule.Due) {
	p.mu.Lock()
	defer p.mu.Unlock()
	row := p.rows[d.ID]
	follows := func(next *time.Time) bool { return next != nil && next.Equal(row.next) }
	d.Most = row.most
	if follows(d.Next) || slices.ContainsFunc(d.Former, func(f schedule.Former) bool { return follows(f.Next) }) {
		d.Part = row.part
	}
}

// shrink notes that n due times took too long.
func (p *dueParts) shrink(id int64, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.rows == nil {
		p.rows = map[int64]duePart{}
	}
	row := p.rows[id]
	row.most = max(n/8, 1)
	p.rows[id] = row
}

// made notes what was written of a schedule, and whether it was quick.
func (p *dueParts) made(id int64, plan schedule.Plan, quick bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	row, known := p.rows[id]
	switch {
	case !known:
		return
	case !plan.More:
		delete(p.rows, id)
		return
	case quick:
		row.most = max(row.most, 2*len(plan.Occurrences))
	}
	if row.part, row.next = plan.Part, plan.Next; plan.Cut != 0 {
		row.next = plan.CutNext
	}
	p.rows[id] = row
}

// UntilNextSchedule returns how long it is, by Postgres' clock, until a
// schedule comes due, and at most d. Schedules in the zones given are left out, and those
// that DueSchedules leaves out.
func (s *Store) UntilNextSchedule(ctx context.Context, d time.Duration, unknownZones []string) (time.Duration, error) {
	ids, versions, _ := s.putOff.list()
	micros, err := one(fetchFreely(ctx, s.pool, "look for the next schedule", pgx.RowTo[int64], `
SELECT least((extract(epoch FROM min(next_at) FILTER (WHERE isfinite(next_at)) - clock_timestamp()) * 1000000)::bigint, $4)
  FROM onejob.schedules s
 WHERE enabled
   AND paused_until IS DISTINCT FROM 'infinity'
   AND time_zone <> ALL (coalesce($1, '{}'::text[]))
   AND `+notPutOff, unknownZones, ids, versions, d.Microseconds()))
	if err != nil {
		return 0, err
	}
	return max(0, time.Duration(micros)*time.Microsecond), nil
}

// Purge deletes up to n tasks that finished with the status longer than keep
// ago, or longer than their row says; their attempts go with them. It returns how many, and
// whether there may be more. A statement deletes few rows, so that no snapshot is
// held for long; if they take long, Purge returns after some seconds with what is done.
//
// A row that Postgres refuses to delete, because another table references it for
// example, keeps no others: it is returned, and passed over for an hour, or for up to a day where
// there are many. So are those that a trigger leaves where they are, of which one is returned, and
// one whose deletion takes longer than a statement may. Next to such a row Purge deletes fewer at
// once, and more again where there are none. So a table of the user's that references all tasks
// costs a few statements for each of them.
func (s *Store) Purge(ctx context.Context, status tasks.Status, keep time.Duration, n int) (deleted int, more bool, refused []tasks.RowError, err error) {
	for began, handled := time.Now(), 0; handled < n && time.Since(began) < s.timeout; {
		most := min(s.kept.most(status, n), n-handled)
		statement := time.Now()
		p, err := s.purge(ctx, status, keep, most)
		slow := tookTooLong(ctx, err)
		switch {
		case err == nil:
			deleted, handled = deleted+p.Deleted, handled+p.Chosen
			if p.Left != nil {
				refused = append(refused, tasks.RowError{ID: *p.Left, Err: fmt.Errorf("it cannot be deleted: %w", errUnchanged)})
			}
			if p.Chosen < most {
				return deleted, false, refused, nil
			}
			if time.Since(statement) < s.timeout/4 {
				s.kept.grow(status, 2*most)
			}
			continue
		case !aboutARow(err) && !slow:
			return deleted, false, refused, fmt.Errorf("delete old tasks: %w", err)
		}
		s.kept.shrink(status, max(most/2, 1))
		if most == 1 {
			if _, err := s.purge(ctx, status, keep, 0); err != nil { // it is about no row
				return deleted, false, refused, fmt.Errorf("delete old tasks: %w", err)
			}
			id, e := s.passOver(ctx, status, keep)
			if e != nil || id == 0 {
				return deleted, false, refused, e
			}
			reason := fmt.Sprintf("it takes longer than %v", s.timeout)
			if pg := (*pgconn.PgError)(nil); !slow && errors.As(err, &pg) {
				reason = words(pg)
			}
			handled, refused = handled+1, append(refused, tasks.RowError{ID: id, Err: fmt.Errorf("it cannot be deleted: %s", reason)})
		}
		s.kept.wasted(time.Since(statement))
	}
	return deleted, true, refused, nil
}

// oldSQL chooses what purge deletes, in the order of the times until which rows are kept,
// in microseconds since 1970. What a row says itself has the expression of the index
// tasks_finished_kept_until; see there. So no more is read than is due.
//
// A join with what is old could be planned, while the table is small, as one that reads
// all of it.
const (
	sinceEpoch = `- timestamptz '1970-01-01 UTC'`
	keptUntil  = `(date_part('epoch', finished_at ` + sinceEpoch + ` + least(keep_for, interval '1000 years')) * 1000000)::bigint`

	oldSQL = `
WITH usual AS (
    SELECT id, (extract(epoch FROM finished_at ` + sinceEpoch + `) * 1000000)::bigint + $2 AS until
      FROM onejob.tasks
     WHERE status = $1
       AND finished_at IS NOT NULL
       AND keep_for IS NULL
       AND finished_at < now() - $2 * interval '1 microsecond'
       AND finished_at > timestamptz '1970-01-01 UTC' + ($4 - $2) * interval '1 microsecond'
       AND id <> ALL ($5)
     ORDER BY finished_at
     LIMIT $3
       FOR UPDATE SKIP LOCKED
), special AS (
    SELECT id, ` + keptUntil + ` AS until
      FROM onejob.tasks
     WHERE status = $1
       AND finished_at IS NOT NULL
       AND keep_for IS NOT NULL
       AND ` + keptUntil + ` < (extract(epoch FROM now() ` + sinceEpoch + `) * 1000000)::bigint
       AND ` + keptUntil + ` > $4
       AND id <> ALL ($5)
     ORDER BY ` + keptUntil + `
     LIMIT $3
       FOR UPDATE SKIP LOCKED
), old AS (
    SELECT id, until FROM usual
 UNION ALL
    SELECT id, until FROM special
     ORDER BY until
     LIMIT $3
)`
)

// purged is what a statement of purge did.
type purged struct {
	Deleted, Chosen int
	Until           *int64 // of the last one that was chosen
	Left            *int64 // one that was chosen and not deleted
}

// purge deletes what is next, and remembers how far that was. An old snapshot keeps the
// index entries of all that was deleted; without a mark each statement would read them.
func (s *Store) purge(ctx context.Context, status tasks.Status, keep time.Duration, n int) (purged, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	// Postgres ends a statement that takes too long before the context does: its rows must not
	// be locked any more when a statement for fewer of them follows.
	until, skip := s.kept.until(status)
	list, err := queryAfter(ctx, s.pool, pgx.RowToStructByPos[purged], indexesOnly+`, pg_catalog.set_config('statement_timeout', $1, true)`,
		[]any{strconv.FormatInt((s.timeout - s.timeout/10).Milliseconds(), 10)}, oldSQL+`, gone AS (
    DELETE FROM onejob.tasks
     WHERE id = ANY (ARRAY(SELECT id FROM old))
 RETURNING id
)
SELECT (SELECT count(*) FROM gone), (SELECT count(*) FROM old), (SELECT max(until) FROM old),
       (SELECT min(id) FROM old WHERE id NOT IN (SELECT id FROM gone))`, string(status), keep.Microseconds(), n, until, skip)
	if err != nil {
		return purged{}, err
	}
	p := list[0]
	switch {
	case p.Chosen == 0:
	case p.Deleted == 0: // a trigger leaves all of them where they are
		s.kept.passed(status, *p.Until)
	default:
		s.kept.passed(status, *p.Until-1) // others may have the same time
	}
	return p, nil
}

// passOver makes purge go on behind the row that it would delete next, and returns
// that row's id.
func (s *Store) passOver(ctx context.Context, status tasks.Status, keep time.Duration) (int64, error) {
	type row struct{ ID, Until int64 }
	until, skip := s.kept.until(status)
	rows, err := fetch(ctx, s.pool, "delete old tasks", pgx.RowToStructByPos[row], oldSQL+`
SELECT id, until FROM old`, string(status), keep.Microseconds(), 1, until, skip)
	if err != nil || len(rows) == 0 {
		return 0, err
	}
	s.kept.passedOver(status, rows[0].ID, rows[0].Until)
	return rows[0].ID, nil
}

// kept knows up to where finished tasks were deleted, or cannot be, by status: the time
// until which the last of them was kept, in microseconds since 1970. It knows the same of
// occurrences: when the last of them was made. And it knows how many tasks one statement
// can delete.
type kept struct {
	mu    sync.Mutex
	ends  map[tasks.Status]end
	made  time.Time
	from  time.Time            // when all of ends began again
	since time.Time            // when made did
	size  map[tasks.Status]int // 0: as many as are asked for
	waste time.Duration        // since from, on rows that cannot be deleted
}

// end is how far purge has come: all that were kept until then are done with. Of those of skipAt, some
// are: all tasks whose outcomes one statement has written have one time.
type end struct {
	until  int64
	skipAt int64
	skip   []int64 // their IDs
}

// maxSkipped is how many rows of one time are passed over one by one. If there are more, the whole
// time is.
const maxSkipped = 1000

// most returns how many rows the next statement is to delete, n at most.
func (k *kept) most(status tasks.Status, n int) int {
	k.mu.Lock()
	defer k.mu.Unlock()
	if size := k.size[status]; size > 0 {
		return min(size, n)
	}
	return n
}

// shrink notes that the next statement can delete n rows at the most.
func (k *kept) shrink(status tasks.Status, n int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.size == nil {
		k.size = map[tasks.Status]int{}
	}
	k.size[status] = n
}

// grow notes that n rows are worth a try.
func (k *kept) grow(status tasks.Status, n int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if size := k.size[status]; size > 0 {
		k.size[status] = max(size, n)
	}
}

// wasted notes time that rows took which cannot be deleted.
func (k *kept) wasted(d time.Duration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.waste += d
}

// until returns where purge begins, and what it leaves out. Every hour that is the beginning again,
// or, where there are many rows that cannot be deleted, after 20 times as long as it took to find that
// out, a day at most.
func (k *kept) until(status tasks.Status) (until int64, skip []int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if time.Since(k.from) > min(max(time.Hour, 20*k.waste), 24*time.Hour) {
		k.ends, k.from, k.waste = map[tasks.Status]end{}, time.Now(), 0
	}
	if e, passed := k.ends[status]; passed {
		return e.until, append([]int64{}, e.skip...)
	}
	return time.Time{}.UnixMicro(), []int64{} // the year 1, before which no task finished
}

// madeAt returns behind which time PurgeOccurrences begins. Every hour that is the beginning
// again.
func (k *kept) madeAt() time.Time {
	k.mu.Lock()
	defer k.mu.Unlock()
	if time.Since(k.since) > time.Hour {
		k.made, k.since = time.Time{}, time.Now()
	}
	return k.made
}

func (k *kept) passedMadeAt(made time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.made = made
}

func (k *kept) passed(status tasks.Status, until int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	e := k.ends[status]
	if e.until = until; until >= e.skipAt {
		e.skip = nil
	}
	k.ends[status] = e
}

// passedOver notes that a row that is kept until then cannot be deleted. Others may have the same time.
func (k *kept) passedOver(status tasks.Status, id, until int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	e := k.ends[status]
	if e.skipAt != until {
		e.skip = nil
	}
	e.until, e.skipAt, e.skip = until-1, until, append(e.skip, id)
	if len(e.skip) > maxSkipped {
		e.until, e.skip = until, nil
	}
	k.ends[status] = e
}

// PurgeOccurrences deletes up to n occurrences that were made longer than keep
// ago and whose task is gone, or never was. It returns how many. They are named
// by their place in the table: one that a backfill has just given a task has
// another place, and stays. Releases of Postgres that follow the row to that place find it no longer
// old.
//
// A statement looks at a bounded number of them. Those whose tasks are still there are looked
// at again after an hour.
func (s *Store) PurgeOccurrences(ctx context.Context, keep time.Duration, n int) (int, error) {
	type portion struct {
		Deleted int
		Full    bool       // there may be more like these
		To      *time.Time // nil if it found none
	}
	purge := func(n int) (portion, error) {
		ctx, cancel := context.WithTimeout(ctx, s.timeout)
		defer cancel()
		return one(query(ctx, s.pool, pgx.RowToStructByPos[portion], purgeOccurrencesSQL, keep.Microseconds(), n, s.kept.madeAt()))
	}
	for deleted := 0; ; {
		p, err := purge(n - deleted)
		if err != nil {
			return deleted, fmt.Errorf("delete old occurrences: %w", err)
		}
		deleted += p.Deleted
		if p.To != nil {
			s.kept.passedMadeAt(*p.To)
		}
		if p.To == nil || p.Full {
			return deleted, nil
		}
	}
}

// purgeOccurrencesSQL looks at all that were made at the time of the last one: one statement
// makes many at one time, and the next one goes on behind that time.
const purgeOccurrencesSQL = `
WITH old AS MATERIALIZED (
    SELECT ctid AS place, made_at, task_id
      FROM onejob.occurrences
     WHERE made_at < now() - $1 * interval '1 microsecond'
       AND made_at > $3
     ORDER BY made_at
     FETCH FIRST 10000 ROWS WITH TIES
), gone AS MATERIALIZED (
    SELECT place, made_at
      FROM old
     WHERE (SELECT t.id FROM onejob.tasks t WHERE t.id = old.task_id) IS NULL  -- looked up one by one
     LIMIT $2
), deleted AS (
    DELETE FROM onejob.occurrences
     WHERE ctid = ANY (ARRAY(SELECT ctid
                               FROM onejob.occurrences
                              WHERE ctid = ANY (ARRAY(SELECT place FROM gone))
                                FOR UPDATE SKIP LOCKED))
       AND made_at < now() - $1 * interval '1 microsecond'
 RETURNING true
)
SELECT (SELECT count(*) FROM deleted), enough,
       CASE WHEN enough THEN (SELECT max(made_at) FROM gone) - interval '1 microsecond' ELSE (SELECT max(made_at) FROM old) END
  FROM (SELECT count(*) >= $2 FROM gone) AS x(enough)`
