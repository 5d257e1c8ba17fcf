// Package store holds every statement of SQL that onejob runs, each next to
// the Go that calls it.
//
// It believes Postgres' clock and no other. What it promises: a claim gives a
// task to one session and a fence above all earlier ones; a completion is accepted
// only under the fence that is in the row; what was accepted stays. It promises
// nothing about who else is working: that is what package lock is for.
//
// Calls that come together are answered together (group commit), so that the
// callers can think of one task at a time.
package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"onejob/internal/batch"
	"onejob/tasks"
)

// What zero values of a [Config] stand for.
const (
	DefaultMaxConns = 8
	DefaultTimeout  = 10 * time.Second
)

// Config says how to reach Postgres.
type Config struct {
	// DSN is a URL or a list of key=value, as libpq takes it; libpq's PG...
	// environment variables fill what it leaves out. It may lead through a
	// transaction pooler, which is detected. A default_query_exec_mode in it wins
	// over what is detected.
	DSN string

	// ListenDSN leads to Postgres itself, for LISTEN, which a transaction pooler
	// cannot carry. Migrations take this way, too. Empty means DSN.
	ListenDSN string

	// MaxConns is the most connections the pool opens; zero means DefaultMaxConns. As many
	// more are opened for statements of tasks while they run (CompleteWith), one for LISTEN,
	// one for heartbeats, and one while somebody watches (Overview, Story, Find).
	MaxConns int

	// Measure is called with each round of completions that were written together: how many,
	// and how long that took; nil for none. It must not block.
	Measure func(completions int, took time.Duration)

	// Timeout bounds every statement of the store's own; zero means DefaultTimeout.
	Timeout time.Duration

	// Actor is for whom people's actions are done (Cancel, Retry, PauseQueue and so on),
	// such as alice@web-1. onejob.actions has it beside the user of the database.
	Actor string
}

// Store is a connection pool to the tables of onejob.
type Store struct {
	pool    *pool
	works   *pool // as many connections again, for the statements of tasks (CompleteWith), which take as long as they like
	list    *pool // one connection, for the list of replicas: no task may keep a heartbeat waiting
	glances *pool // one connection, opened when somebody looks: nobody who looks may keep a task waiting
	listen  *pgx.ConnConfig
	hosts   *hosts
	timeout time.Duration
	actor   string

	lookouts  lookouts
	turnStuck atomic.Bool                // the last claim waited for its turn in vain
	avoid     idSet                      // rows that claims cannot have, or that keep them waiting
	stuck     idSet                      // the same of takeovers: what kept a claim waiting may run elsewhere by now
	claims    patience                   // with the rows that are claimed
	writes    patience                   // with the others
	apart     apart                      // rows that are written one by one
	putOff    putOff                     // schedules to leave alone for a while
	dueParts  dueParts                   // schedules of which one statement makes few due times
	making    patience                   // for locks that the tasks of schedules need
	refusals  atomic.Int32               // rows that were refused since the last claim that took some
	remember  memory                     // where claims go on
	kept      kept                       // where retention goes on
	unknown   atomic.Value               // string: the name behind which the search for unknown limits goes on; no name is empty
	unsayable unsayable                  // names of limits that no row can have
	deafAt    atomic.Pointer[time.Time]  // when Listen found out that it hears nothing
	server    atomic.Pointer[serverTerm] // ends when connections are to lead to another one

	completions batch.Group[*completion]
	returns     batch.Group[*requeue]
	statements  statements

	// unended has the session, by fence, of each attempt whose statement was sent and whose end
	// nobody has heard: a request to cancel it may not have arrived.
	unended sync.Map
}

// Open prepares a store. It parses the configuration, and fails if that cannot
// be used; it does not connect, see Ping.
func Open(cfg Config) (*Store, error) {
	pc, err := pgxpool.ParseConfig(cfg.DSN)
	if err != nil {
		return nil, fmt.Errorf("postgres.dsn: %w", sanitized(err))
	}
	lc, err := pgxpool.ParseConfig(cmp.Or(cfg.ListenDSN, cfg.DSN)) // the pool_... settings of a DSN are understood, and left out
	if err != nil {
		return nil, fmt.Errorf("postgres.listen_dsn: %w", sanitized(err))
	}
	pc.MaxConns = int32(cmp.Or(max(cfg.MaxConns, 0), DefaultMaxConns))
	near := &hosts{names: map[string]string{}}
	for _, c := range []*pgx.ConnConfig{pc.ConnConfig, lc.ConnConfig} {
		network, random, err := networkOf(c.RuntimeParams)
		if err != nil {
			return nil, fmt.Errorf("postgres.dsn: %w", err)
		}
		near.random = near.random || random
		if c.ConnectTimeout == 0 {
			if c.ConnectTimeout = 5 * time.Second; len(byAddress(&c.Config)) > 1 {
				c.ConnectTimeout = 2 * time.Second // others may be there
			}
		}
		if c.RuntimeParams["application_name"] == "" {
			c.RuntimeParams["application_name"] = "onejob"
		}
		for name := range c.RuntimeParams {
			if strings.EqualFold(name, "client_encoding") { // no other will do
				delete(c.RuntimeParams, name)
			}
		}
		c.RuntimeParams["client_encoding"] = "UTF8"
		c.DialFunc = network.dialer(c.ConnectTimeout)
	}
	// Few statements, and perhaps another way than the pool's: not worth finding
	// out whether they could be prepared.
	lc.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	timeout := cmp.Or(max(cfg.Timeout, 0), DefaultTimeout)
	open := func(c *pgxpool.Config) (p *pool) {
		if err == nil {
			p, err = newPool(c, near, timeout)
		}
		return p
	}
	common := open(pc)
	wc := pc.Copy()
	wc.MinConns, wc.MinIdleConns, wc.MaxConnIdleTime = 0, 0, time.Minute
	wc.AfterRelease = forget
	works := open(wc)
	oc := pc.Copy()
	oc.MaxConns, oc.MinConns, oc.MinIdleConns = 1, 0, 0
	list := open(oc)
	gc := oc.Copy()
	gc.MaxConnIdleTime = time.Minute
	glances := open(gc)
	if err != nil {
		return nil, fmt.Errorf("postgres.dsn: %w", sanitized(err))
	}
	s := &Store{pool: common, works: works, list: list, glances: glances, listen: lc.ConnConfig, hosts: near, timeout: timeout, actor: cfg.Actor}
	s.server.Store(newServerTerm())
	s.completions = batch.Group[*completion]{Commit: func(list []*completion) {
		began := time.Now()
		s.commitAll(list)
		if cfg.Measure != nil {
			cfg.Measure(len(list), time.Since(began))
		}
	}, Max: maxCompletions}
	s.returns = batch.Group[*requeue]{Commit: s.commitReturns, Max: 128}
	s.statements.slots = make(chan struct{}, wc.MaxConns)
	return s, nil
}

// Close ends all connections. It waits for those in use, and for the server to take
// notice, for a second at most: behind a network that drops everything it would take 15.
func (s *Store) Close() {
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		for _, p := range []*pool{s.pool, s.works, s.list, s.glances} {
			p.inner.Close()
		}
		s.lookouts.close()
	}()
	select {
	case <-closed:
	case <-time.After(time.Second):
	}
}

// Refuse makes connections fail that lead to a copy of the given server with an older
// timeline, and ends those that there are.
func (s *Store) Refuse(older tasks.Server) {
	if !s.hosts.refuse(older) {
		return
	}
	s.remember.forget() // another server's rows may be behind where claims from that one go on
	if older.Timeline > 1 {
		s.leaveServer()
	}
}

// leaveServer ends all connections, those in use as soon as they are given back. New ones
// lead to whichever server is the right one now.
func (s *Store) leaveServer() {
	for _, p := range []*pool{s.pool, s.works, s.list, s.glances} {
		p.inner.Reset()
	}
	s.deafAt.Store(nil) // the way to another server may be another one
	s.server.Swap(newServerTerm()).end()
}

// Pool returns the pool, for statements of the caller's own. The search_path of
// its connections is pg_catalog unless a pooler is in the way: write the schema of
// every name.
func (s *Store) Pool() *pgxpool.Pool { return s.pool.inner }

// Ping returns nil if Postgres answers.
func (s *Store) Ping(ctx context.Context) error { return sanitized(s.pool.inner.Ping(ctx)) }

// Pooled reports whether a connection pooler is between this store and Postgres, as
// far as the connections opened so far show.
func (s *Store) Pooled() bool { return s.pool.pooled.Load() || s.pool.hidden.Load() }

// CheckPool tries statements of the hot path on several connections at once. Through
// a transaction pooler they fail if they are prepared.
func (s *Store) CheckPool(ctx context.Context) error {
	const clients, rounds = 4, 5
	errs := make(chan error, clients)
	for range clients {
		go func() {
			var err error
			for range rounds {
				_, e := query(ctx, s.pool, pgx.RowTo[string], `SELECT current_setting('search_path')`)
				err = cmp.Or(err, e)
			}
			errs <- err
		}()
	}
	var err error
	for range clients {
		err = cmp.Or(err, <-errs) // one of them is enough
	}
	return err
}

// Version returns what Postgres says its version is.
func (s *Store) Version(ctx context.Context) (string, error) {
	var v string
	err := s.pool.QueryRow(ctx, `SHOW server_version`).Scan(&v)
	return v, sanitized(err)
}

// query runs a statement of the hot path and collects its rows, in one round
// trip and one transaction with a few settings that last as long.
//
// No sequential scans: Postgres keeps the plan of a prepared statement for later
// calls, and a plan made while the tables were small, or empty, would read all of
// them when a million rows have been inserted, until somebody analyzes them. And
// use that plan from the first call on: Postgres would plan each of the first five
// calls again to compare, which takes longer than running them. The settings do not
// outlive the transaction, so that nobody who shares a pooler sees them.
//
// No compilation either: where only a sequential scan is possible, forbidding it makes
// the plan look so expensive that Postgres compiles it, for seconds.
//
// They only forbid; the statements are written so that an index remains, see
// docs/decisions/claim.md.
func query[T any](ctx context.Context, db DB, scan pgx.RowToFunc[T], sql string, args ...any) ([]T, error) {
	return queryAfter(ctx, db, scan, indexesOnly, nil, sql, args...)
}

// fetch is query within the time that a call of the store has. doing begins its error.
func fetch[T any](ctx context.Context, p *pool, doing string, scan pgx.RowToFunc[T], sql string, args ...any) ([]T, error) {
	return fetchAfter(ctx, p, doing, scan, indexesOnly, nil, sql, args...)
}

// fetchFreely is fetch for a statement that may read whole tables.
func fetchFreely[T any](ctx context.Context, p *pool, doing string, scan pgx.RowToFunc[T], sql string, args ...any) ([]T, error) {
	return fetchAfter(ctx, p, doing, scan, fixed, nil, sql, args...)
}

func fetchAfter[T any](ctx context.Context, p *pool, doing string, scan pgx.RowToFunc[T], first string, firstArgs []any, sql string, args ...any) ([]T, error) {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	list, err := queryAfter(ctx, p, scan, first, firstArgs, sql, args...)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", doing, err)
	}
	return list, nil
}

// one returns the row of a statement that returns one.
func one[T any](rows []T, err error) (row T, _ error) {
	if err != nil {
		return row, err
	}
	return rows[0], nil
}

// The first statement also sets what every statement needs (see pool). search_path is
// not in force yet while it runs, and so it leaves no name to the path.
const (
	indexesOnly = `SELECT ` + settings
	settings    = safe + `,
       pg_catalog.set_config('enable_seqscan', 'off', true), pg_catalog.set_config('plan_cache_mode', 'force_generic_plan', true), pg_catalog.set_config('jit', 'off', true),
       ` + usable
)

// queryAfter is query after another statement than indexesOnly.
func queryAfter[T any](ctx context.Context, db DB, scan pgx.RowToFunc[T], first string, firstArgs []any, sql string, args ...any) (list []T, err error) {
	var b pgx.Batch
	b.Queue(first, firstArgs...)
	b.Queue(sql, args...)
	results := db.SendBatch(ctx, &b)
	defer func() {
		// It is Close that hears whether the transaction was committed.
		if e := results.Close(); err == nil && e != nil {
			list, err = nil, e
		}
	}()
	if _, err := results.Exec(); err != nil {
		return nil, err
	}
	rows, err := results.Query()
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scan)
}

// SQLSTATEs
const (
	deadlock           = "40P01"
	lockTimeout        = "55P03"
	noSuchStatement    = "26000"
	duplicateStatement = "42P05"
	cachedPlanChanged  = "0A000"
	protocolViolation  = "08P01"
	invalidText        = "22P02"
)

// unfit reports whether Postgres refuses the data of a statement, so that asking
// again is no use: a data exception, an integrity constraint, a limit of Postgres
// itself, or an error that a trigger of the user's raises.
func unfit(err error) bool {
	pg, ok := errors.AsType[*pgconn.PgError](err)
	return ok && len(pg.Code) == 5 && slices.Contains([]string{"22", "23", "54", "P0"}, pg.Code[:2])
}

// aboutARow reports whether one row alone may be why Postgres refuses a statement: its data
// (see unfit), or whatever else a trigger of the user's raises, a missing table or a missing right
// for example. The same may be wrong for all rows. So the others are tried without it, and
// the statement without any row, before that row is to blame.
func aboutARow(err error) bool {
	pg, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || len(pg.Code) != 5 {
		return false
	}
	switch pg.Code[:2] {
	case "08", "0A", "25", "26", "28", "3D", "40", "53", "57", "58": // connections, transactions, the server
		return relayed(err)
	}
	return pg.Code != duplicateStatement
}

// relayed reports whether an error that is about a connection, a transaction or a server most likely
// is about another server than the one that gives it: a trigger of the user's may write there
// (postgres_fdw, dblink), and says what that server says, or that there is none. What is about ours
// most often ends the session, or concerns a statement without any row as well. Such an error
// may last for as long as the other server is unavailable.
//
// A full disk and the like (class 53) are no such case: a statement without any row needs no room. Nor
// is a deadlock, which is ours, or what a pooler says of its own (protocol_violation).
func relayed(err error) bool {
	pg, ok := errors.AsType[*pgconn.PgError](err)
	return ok && len(pg.Code) == 5 && pg.SeverityUnlocalized == "ERROR" && pg.Routine != replanned &&
		!slices.Contains([]string{deadlock, queryCanceled, protocolViolation}, pg.Code) &&
		slices.Contains([]string{"08", "0A", "25", "28", "3D", "40", "57", "58"}, pg.Code[:2])
}

// replanned is the function of Postgres that refuses the plan of a prepared statement whose table has
// changed (cachedPlanChanged).
const replanned = "RevalidateCachedQuery"

// avoidFor is for how long a row is left alone that Postgres refuses to change. Its trigger may
// be repaired by then. One for which it waited in vain is left alone for avoidFirst, and for twice as
// long each time after that, up to avoidFor: a lock may be free soon.
const (
	avoidFor   = 5 * time.Minute
	avoidFirst = 15 * time.Second
	maxAvoided = 4096

	// avoidTogether is for how long, about, rows are avoided of which one kept a claim waiting, for each
	// row that is avoided.
	avoidTogether = 50 * time.Millisecond
)

// idSet is a set of up to maxAvoided rows to avoid for a while. The zero value is ready.
type idSet struct {
	mu   sync.Mutex
	rows map[int64]avoided
}

type avoided struct {
	wait  time.Duration
	until time.Time
}

// add avoids a row for the given time or, if it was avoided a short while ago, for twice as long as
// then; avoidFor at most.
func (s *idSet) add(id int64, wait time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	wait = min(max(wait, 2*s.rows[id].wait), avoidFor)
	s.set(id, avoided{wait, time.Now().Add(wait)})
}

// pass avoids a row for the given time, which says nothing about that row.
func (s *idSet) pass(id int64, wait time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.set(id, avoided{s.rows[id].wait, time.Now().Add(wait)})
}

// set notes a row. Of too many any one is forgotten: if it were the one that would be tried first, a claim that
// goes through them in order would find the first ones of them forgotten each time that it begins.
func (s *idSet) set(id int64, a avoided) {
	_, known := s.rows[id]
	if !known && len(s.rows) == maxAvoided {
		s.forget()
	}
	if !known && len(s.rows) == maxAvoided {
		for some := range s.rows { // in no order
			delete(s.rows, some)
			break
		}
	}
	if s.rows == nil {
		s.rows = map[int64]avoided{}
	}
	s.rows[id] = a
}

// forget drops rows that have not been added for long.
func (s *idSet) forget() {
	now := time.Now()
	maps.DeleteFunc(s.rows, func(_ int64, a avoided) bool { return now.Sub(a.until) > avoidFor })
}

// list returns the rows to avoid now.
func (s *idSet) list() []int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget()
	now, ids := time.Now(), []int64{}
	for id, a := range s.rows {
		if now.Before(a.until) {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// sanitized returns an error that a person understands and that holds no
// password: pgx repeats the DSN in the error of one that it cannot parse.
func sanitized(err error) error {
	if _, ok := errors.AsType[*pgconn.ParseConfigError](err); ok {
		const form = "write it as postgres://USER:PASSWORD@HOST:PORT/DATABASE or as host=HOST dbname=DATABASE"
		cause := errors.Unwrap(err)
		if cause == nil {
			return fmt.Errorf("the DSN cannot be parsed; %s", form)
		}
		return fmt.Errorf("the DSN cannot be parsed (%s); %s", redact(cause.Error()), form)
	}
	return err
}

// redact removes what a cause repeats in quotes: it may be part of a password.
func redact(s string) string {
	out := make([]byte, 0, len(s))
	var quote byte
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case quote != 0:
			if c == quote {
				out = append(out, "..."...)
				out = append(out, c)
				quote = 0
			}
		case c == '"' || c == '`':
			quote = c
			out = append(out, c)
		default:
			out = append(out, c)
		}
	}
	return string(out)
}
