package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/internal/pgerror"
)

// Lists of tasks, for people. A table may hold many millions of them, and is
// busy with other things, so no statement here reads more than some thousands of
// rows, whatever is asked for, and none runs for longer than listTimeout.
//
// What has an index is found by it: running and pending rows as long as there
// are no more than listFew, failed and cancelled ones always. Everything else is
// looked for among the newest tasks, listWindow at a time. No index serves these,
// because every task would pay for it on its way from INSERT to succeeded.
const (
	listTimeout = 5 * time.Second
	listWindow  = 2000
	listFew     = 5000
)

// DefaultScan is how many tasks List looks at, at most, if Filter.Scan is zero.
const DefaultScan = 200_000

// Filter chooses tasks; an empty field chooses all.
type Filter struct {
	Status string
	Kind   string
	Queue  string

	Limit  int   // how many are wanted; above zero
	Before int64 // only those with a lower id; zero means all
	Scan   int   // how many to look at, at most; zero means DefaultScan

	// Brief leaves out results, and of a payload of more than some 4,000 bytes all but what a
	// task of its kind is for, or its beginning: that is not always JSON.
	Brief bool
}

// Page is what List found.
type Page struct {
	Rows []Row

	// Next is the Filter.Before with which the list goes on; zero means that
	// there are no more tasks.
	Next int64

	// Now is what Postgres' clock showed when the rows were read, to tell how old
	// they are. It is zero if there are no rows.
	Now time.Time

	// Cut says that List stopped before the page was full, because it had looked
	// at Filter.Scan tasks. Rows holds all there are from Next on.
	Cut bool
}

// List returns tasks, the newest first.
func (s *Store) List(ctx context.Context, f Filter) (Page, error) {
	f.Scan, f.Before = cmp.Or(f.Scan, DefaultScan), cmp.Or(f.Before, math.MaxInt64)
	ids, next, cut, err := s.listIDs(ctx, f)
	if err != nil {
		return Page{}, listError(err)
	}
	rows, err := s.listRows(ctx, f, ids)
	if err != nil {
		return Page{}, listError(err)
	}
	page := Page{Next: next, Cut: cut}
	for _, r := range rows {
		r.makeReadable()
		page.Rows, page.Now = append(page.Rows, r.Row), r.Now
	}
	return page, nil
}

// listIDs returns the ids of one page, and what else Page says.
func (s *Store) listIDs(ctx context.Context, f Filter) (ids []int64, next int64, cut bool, err error) {
	page := func() ([]int64, int64, bool, error) {
		if len(ids) > f.Limit { // one more than was wanted, to know that there is one
			ids = ids[:f.Limit]
			return ids, ids[f.Limit-1], false, nil
		}
		return ids, 0, false, nil
	}
	if f.Status == "pending" || f.Status == "running" {
		var all bool
		if ids, all, err = s.listFewIDs(ctx, f); err != nil || all {
			if err != nil {
				return nil, 0, false, err
			}
			return page()
		}
	}
	before := f.Before
	for looked := 0; ; {
		size := listWindow
		if f.Kind == "" && f.Queue == "" && (f.Status == "" || hasIndex(f.Status)) {
			size = f.Limit + 1 // the filter chooses all of them
		}
		w, err := s.listWindowIDs(ctx, f, before, size, f.Limit+1-len(ids))
		if err != nil {
			return nil, 0, false, err
		}
		ids = append(ids, w.IDs...)
		looked += w.Looked
		switch {
		case len(ids) > f.Limit || w.Looked < size:
			return page()
		case looked >= f.Scan:
			return ids, w.Last, true, nil
		}
		before = w.Last
	}
}

// listFewIDs returns the ids of the first f.Limit+1 pending or running tasks, if
// there are few enough of that status to look at all of them.
//
// The rows are chosen by nothing that an index other than those of pending and
// running rows could serve; the rest of the filter comes after.
func (s *Store) listFewIDs(ctx context.Context, f Filter) (ids []int64, all bool, err error) {
	few := `
    (SELECT id, kind, queue FROM onejob.tasks WHERE status = 'running' LIMIT @few)`
	if f.Status == "pending" {
		few = `
    (SELECT id, kind, queue FROM onejob.tasks WHERE status = 'pending' AND limit_name IS NULL     LIMIT @few)
 UNION ALL
    (SELECT id, kind, queue FROM onejob.tasks WHERE status = 'pending' AND limit_name IS NOT NULL LIMIT @few)`
	}
	type answer struct {
		All bool
		IDs []int64
	}
	answers, err := list(ctx, s, pgx.RowToStructByPos[answer], `
WITH few AS MATERIALIZED (`+few+`
)
SELECT (SELECT count(*) FROM few) < @few,
       ARRAY(SELECT id FROM few`+listWhere+` AND id < @before ORDER BY id DESC LIMIT @wanted)`,
		namedArgs{"few": listFew, "kind": f.Kind, "queue": f.Queue, "before": f.Before, "wanted": f.Limit + 1})
	if err != nil {
		return nil, false, err
	}
	return answers[0].IDs, answers[0].All, nil
}

// listWhere is the part of a filter that no index serves.
const listWhere = `
        WHERE (@kind  = '' OR kind  = @kind)
          AND (@queue = '' OR queue = @queue)`

// window is what was found among the next tasks.
type window struct {
	IDs    []int64
	Looked int   // how many there were; fewer than was asked for if they are the last
	Last   int64 // the lowest id of these
}

// hasIndex reports whether all tasks of a status can be found in order of their
// ids.
func hasIndex(status string) bool { return status == "failed" || status == "cancelled" }

// listWindowIDs looks at the newest size tasks before one, or at as many failed
// or cancelled ones if these are wanted, and returns the first of those that the
// filter chooses.
func (s *Store) listWindowIDs(ctx context.Context, f Filter, before int64, size, wanted int) (window, error) {
	next := `
    SELECT id, kind, queue, status
      FROM onejob.tasks
     WHERE id < @before
     ORDER BY id DESC
     LIMIT @window`
	where := listWhere + ` AND (@status = '' OR status = @status)`
	if hasIndex(f.Status) {
		// The status is written out, or a plan that Postgres keeps could not use the
		// index. About -id see the migration.
		next = `
    SELECT id, kind, queue, status
      FROM onejob.tasks
     WHERE status = '` + f.Status + `'
       AND -id > -@before::bigint
     ORDER BY -id
     LIMIT @window`
	}
	return one(list(ctx, s, pgx.RowToStructByPos[window], `
WITH next AS MATERIALIZED (`+next+`
)
SELECT ARRAY(SELECT id FROM next`+where+` ORDER BY id DESC LIMIT @wanted),
       (SELECT count(*) FROM next),
       (SELECT coalesce(min(id), 0) FROM next)`,
		namedArgs{"window": size, "status": f.Status, "kind": f.Kind, "queue": f.Queue, "before": before, "wanted": wanted}))
}

// listed is a row, and when it was read.
type listed struct {
	Row
	Now time.Time `db:"now"`
}

// listRows returns the rows with these ids. Those that the filter no longer
// chooses, because they have gone on since, are left out.
func (s *Store) listRows(ctx context.Context, f Filter, ids []int64) ([]listed, error) {
	columns, tables, args := rowColumns, "onejob.tasks", namedArgs{"ids": ids, "status": f.Status}
	if f.Brief {
		columns, tables = briefColumns, briefTables
		args["text"], args["read"] = briefText, briefRead
	}
	return list(ctx, s, pgx.RowToStructByName[listed], `
SELECT `+columns+`, statement_timestamp() AS now
  FROM `+tables+`
 WHERE id = ANY (@ids::bigint[])
   AND (@status = '' OR status = @status)
 ORDER BY id DESC`, args)
}

// What is read of a brief payload. A page of them is some hundred kilobytes, where whole ones
// could be gigabytes. Fields are shortened one by one, so that what is left of those of the
// built-in kinds can be read as JSON: a URL is shown without its secrets.
//
// Postgres has to unpack all of a payload (whole) for one of its fields, and does it once. Of
// other kinds, which have no such fields, it unpacks none that is larger than briefRead.
const (
	briefText = 4 << 10   // bytes of a payload that is kept as it is; characters of a field
	briefRead = 256 << 10 // bytes as they are stored

	briefTables = `onejob.tasks
 CROSS JOIN LATERAL (SELECT CASE WHEN kind IN ('exec', 'http', 'sql') OR pg_column_size(tasks.payload) <= @read THEN tasks.payload #> '{}' END AS whole
                     OFFSET 0) unpacked`

	briefPayload = `
       CASE WHEN whole IS NULL                           THEN '[...] ' || pg_size_pretty(pg_column_size(payload)::bigint)
            WHEN pg_column_size(whole) <= @text          THEN whole::text
            WHEN kind = 'exec' AND whole ? 'command'     THEN jsonb_build_object('command', left(whole ->> 'command', @text),
                                                                                 'args', CASE WHEN pg_column_size(whole -> 'args') > @text THEN '["[...]"]' ELSE whole -> 'args' END)::text
            WHEN kind = 'http' AND whole ? 'url'         THEN jsonb_build_object('method', left(whole ->> 'method', @text), 'url', left(whole ->> 'url', @text))::text
            WHEN kind = 'sql'  AND whole ? 'statement'   THEN jsonb_build_object('statement', left(whole ->> 'statement', @text))::text
            ELSE left(whole::text, @text) || ' [...]'
        END`
)

var briefColumns = strings.NewReplacer("payload::text AS", briefPayload+" AS", "result::text AS", "NULL AS").Replace(rowColumns)

// Names are names that are in use.
type Names struct {
	Queues []string
	Kinds  []string
}

// Names returns the queues and kinds of the newest 1,000 tasks, of schedules and of
// the replicas that have not ended, each in order.
func (s *Store) Names(ctx context.Context) (Names, error) {
	found, err := list(ctx, s, pgx.RowToStructByPos[Names], `
WITH newest AS MATERIALIZED (
    SELECT queue, kind
      FROM onejob.tasks
     ORDER BY id DESC
     LIMIT @newest
)
SELECT ARRAY(SELECT queue FROM newest
              UNION
             SELECT queue FROM onejob.schedules
              UNION
             SELECT unnest(queues) FROM onejob.replicas WHERE ended_at IS NULL
              ORDER BY 1),
       ARRAY(SELECT kind FROM newest
              UNION
             SELECT kind FROM onejob.schedules
              UNION
             SELECT unnest(kinds) FROM onejob.replicas WHERE ended_at IS NULL
              ORDER BY 1)`, namedArgs{"newest": 1000})
	if err != nil {
		return Names{}, fmt.Errorf("list queues and kinds: %w", err)
	}
	return found[0], nil
}

// list runs one of the statements here. Postgres ends it by statement_timeout;
// the context ends what waits before that setting counts: a connection, or a lock
// on the table while the statement is prepared.
func list[T any](ctx context.Context, s *Store, scan pgx.RowToFunc[T], sql string, args namedArgs) ([]T, error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout+time.Second)
	defer cancel()
	return queryAfter(ctx, s.pool, scan, indexesOnly+`, pg_catalog.set_config('statement_timeout', $1, true)`,
		[]any{fmt.Sprint(listTimeout.Milliseconds())}, sql, args)
}

func listError(err error) error { return fmt.Errorf("list tasks: %w", listReason(err)) }

// ErrNoAnswer is in the error of List, and of other questions that people ask, if Postgres did not
// answer in time.
var ErrNoAnswer = fmt.Errorf("no answer from Postgres within %v", listTimeout)

// listReason says in words that a statement took too long.
func listReason(err error) error {
	if pgerror.Is(err, queryCanceled) || errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("%w; it may be overloaded, try again", ErrNoAnswer)
	}
	return err
}

const queryCanceled = "57014"
