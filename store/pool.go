package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Every statement of the store needs some things, whatever the defaults of the
// database and the role are, and whether or not a connection pooler is in the way:
//
//   - search_path is "pg_catalog, pg_temp". A role that may CREATE in a schema on
//     the path could otherwise plant a function or an operator that fits a call
//     better than the one in pg_catalog, and it would run as our user.
//   - The isolation level is read committed. Claims and completions wait for locks
//     and must see what was committed meanwhile.
//   - tcp_user_timeout bounds how long the server keeps the transaction, and with
//     it the row locks, of a client that the network has cut off.
//   - No named prepared statements through a transaction pooler: each transaction
//     may run on another connection of the server.
//   - client_encoding is UTF8, which is what Go's strings are.
//   - What is committed is durable: the lock of a task is released then, and the next
//     attempt begins. So synchronous_commit is not off. All other values keep what is
//     committed through a crash of the server; which standbys have it is the user's choice.
//   - Times and intervals are written as pgx reads them. It matters where results are
//     text, which they are when statements are not prepared.
//   - A backslash in a string is a backslash, as the migrations mean it.
//
// Startup parameters would be the simplest way, but a pooler refuses a connection
// that asks for parameters it does not know ("unsupported startup parameter"). Only
// client_encoding is one (Open): most drivers ask for it. SET after connecting would be
// the next, but through a transaction pooler it sets what strangers find in their
// connection. So:
//
//   - The store finds out for each connection whether a pooler is in the way: the
//     key for cancel requests, which comes with the greeting, holds the process ID
//     of the server's backend, and a pooler invents its own. A direct connection
//     gets the settings for its whole life.
//   - Through a pooler, each batch runs in an explicit transaction that sets the
//     isolation level in BEGIN and the rest with SET LOCAL.
//   - In both cases the first statement of a batch sets search_path for its
//     transaction (const fixed), so that it holds even if a proxy hides a pooler.
//     That alone would not do for direct connections: the names in a prepared
//     statement are resolved when it is prepared, which is before the batch runs.
//   - The same statement sets the rest, where it is not as it must be (const usable). So
//     a RESET ALL of the sql kind or a changed postgresql.conf changes nothing, and a
//     user's statement has the settings of its role (beginStatement). For prepared
//     statements that is too late for backslashes: they have none in plain strings.
const (
	safePath = `'search_path', 'pg_catalog, pg_temp'`

	// safe sets search_path for the transaction, and client_encoding, which a statement of
	// the sql kind may have changed. It runs before the path is safe, and so leaves nothing
	// to the path. That is true of usable, too.
	safe = `pg_catalog.set_config(` + safePath + `, true),
       CASE WHEN pg_catalog.current_setting('client_encoding') OPERATOR(pg_catalog.<>) 'UTF8' THEN pg_catalog.set_config('client_encoding', 'UTF8', true) END`

	// usable sets what else a transaction of ours needs. It leaves the order of day and
	// month (DateStyle) as it is: nothing of ours depends on it.
	usable = `CASE WHEN NOT pg_catalog.starts_with(pg_catalog.current_setting('DateStyle'), 'ISO') THEN pg_catalog.set_config('DateStyle', 'ISO', true) END,
       CASE WHEN pg_catalog.current_setting('IntervalStyle') OPERATOR(pg_catalog.<>) 'postgres' THEN pg_catalog.set_config('IntervalStyle', 'postgres', true) END,
       CASE WHEN pg_catalog.current_setting('standard_conforming_strings') OPERATOR(pg_catalog.<>) 'on' THEN pg_catalog.set_config('standard_conforming_strings', 'on', true) END,
       CASE WHEN pg_catalog.current_setting('synchronous_commit') OPERATOR(pg_catalog.=) 'off' THEN pg_catalog.set_config('synchronous_commit', 'on', true) END`

	// fixed precedes the statements that do not go by query.
	fixed = `SELECT ` + safe + `,
       ` + usable

	// cutOff is after how long of unacknowledged data a connection ends, on the
	// server's side and on ours. It must be longer than a short network outage, and
	// shorter than the leases whose completions wait for the rows.
	cutOff = 5 * time.Second
)

// beginSQL begins a transaction, setCutOff follows it through a pooler.
var (
	beginSQL  = `BEGIN ISOLATION LEVEL READ COMMITTED`
	setCutOff = fmt.Sprintf(`SET LOCAL tcp_user_timeout = %d`, cutOff.Milliseconds())
)

// pool is the only way to the database for statements of the store. Its methods
// are those of pgxpool.Pool, under the settings above.
type pool struct {
	inner    *pgxpool.Pool
	timeout  time.Duration // how long a call of the store may take
	explicit bool          // the DSN says how statements are executed

	// pooled is what the last new connection led through, and so the best guess
	// for the next one. A wrong guess costs a connection: it is closed unused.
	pooled atomic.Bool

	// hidden is set when statements fail as they do through a transaction pooler,
	// although the connections look direct. It stays set.
	hidden atomic.Bool

	renewed atomic.Int64 // when all connections were replaced last, in Unix ns
}

// link is what is known about a connection. It is kept in its CustomData.
type link struct {
	pooled   bool // through a pooler
	prepares bool // with named prepared statements
}

const linkKey = "onejob"

func linkOf(conn *pgx.Conn) link {
	l, _ := conn.PgConn().CustomData()[linkKey].(link)
	return l
}

func newPool(config *pgxpool.Config, hosts *hosts, timeout time.Duration) (*pool, error) {
	// A setting in a service file counts only if it is not pgx's default.
	p := &pool{timeout: timeout, explicit: strings.Contains(config.ConnString(), "default_query_exec_mode") ||
		config.ConnConfig.DefaultQueryExecMode != pgx.QueryExecModeCacheStatement}
	config.BeforeConnect = func(_ context.Context, c *pgx.ConnConfig) error {
		if !p.explicit && (p.pooled.Load() || p.hidden.Load()) {
			c.DefaultQueryExecMode = pgx.QueryExecModeExec
		}
		hosts.prepare(&c.Config)
		return nil
	}
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		registerColumns(conn.TypeMap())
		l, err := prepareConn(ctx, conn, p.hidden.Load())
		if err == nil {
			p.pooled.Store(l.pooled)
		}
		return err
	}
	config.PrepareConn = func(_ context.Context, conn *pgx.Conn) (bool, error) {
		l := linkOf(conn)
		return p.explicit || !l.prepares || !(l.pooled || p.hidden.Load()), nil
	}
	// A transaction pooler may hand us notifications that somebody else's LISTEN
	// asked for. pgx would keep them until somebody takes them.
	config.ConnConfig.OnNotification = func(*pgconn.PgConn, *pgconn.Notification) {}
	var err error
	p.inner, err = pgxpool.NewWithConfig(context.Background(), config)
	return p, err
}

// prepareConn makes a new connection ready: it finds out whether a pooler is in the
// way, and if there is none, fixes the settings for the connection's life. One
// statement does both, because the next one may reach another server connection.
func prepareConn(ctx context.Context, conn *pgx.Conn, hidden bool) (link, error) {
	l := link{pooled: hidden, prepares: conn.Config().DefaultQueryExecMode == pgx.QueryExecModeCacheStatement}
	local := "true" // for this transaction only
	if !hidden {
		local = fmt.Sprintf("pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.<>) %d", conn.PgConn().PID())
	}
	var pid uint32
	err := conn.QueryRow(ctx, fmt.Sprintf(`
SELECT pg_catalog.pg_backend_pid(),
       pg_catalog.set_config(`+safePath+`, %[1]s),
       pg_catalog.set_config('default_transaction_isolation', 'read committed', %[1]s),
       pg_catalog.set_config('tcp_user_timeout', '%[2]d', %[1]s)`, local, cutOff.Milliseconds()), pgx.QueryExecModeExec).Scan(&pid, nil, nil, nil)
	if err != nil {
		return l, fmt.Errorf("prepare the connection: %w", err)
	}
	l.pooled = l.pooled || pid != conn.PgConn().PID()
	conn.PgConn().CustomData()[linkKey] = l
	return l, nil
}

// release gives a connection back, which may be in a transaction that failed with
// err: the pool would close it, and a pooler the server's.
func (p *pool) release(conn *pgxpool.Conn, err error) {
	if pg := conn.Conn().PgConn(); !pg.IsClosed() && pg.TxStatus() != 'I' {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		_, _ = conn.Exec(ctx, `ROLLBACK`)
		cancel()
	}
	if conn.Conn().IsClosed() && !errors.Is(err, context.Canceled) { // no answer in time, or it broke
		p.renew()
	}
	p.heal(err)
	conn.Release()
}

// SendBatch is that of pgxpool.Pool. The first statement of b must be fixed, indexesOnly,
// or begin with one of them.
func (p *pool) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	conn, err := p.inner.Acquire(ctx)
	if err != nil {
		return pgx.FailedBatchResults(b, err)
	}
	r := &results{pool: p, conn: conn}
	if !linkOf(conn.Conn()).pooled {
		r.BatchResults = conn.SendBatch(ctx, b)
		return r
	}
	begin := []*pgx.QueuedQuery{{SQL: beginSQL}, {SQL: setCutOff}}
	b.QueuedQueries = slices.Concat(begin, b.QueuedQueries)
	b.Queue(`COMMIT`) // its result is read by Close
	r.BatchResults = conn.SendBatch(ctx, b)
	for range begin {
		if _, err := r.BatchResults.Exec(); err != nil {
			break // the next call returns it
		}
	}
	return r
}

// results are those of a batch. Close gives the connection back.
type results struct {
	pgx.BatchResults
	pool   *pool
	conn   *pgxpool.Conn
	closed bool
	err    error
}

func (r *results) Close() error {
	if r.closed {
		return r.err
	}
	r.closed = true
	r.err = r.BatchResults.Close()
	r.pool.release(r.conn, r.err)
	return r.err
}

// statementPrefix begins the names of the statements that pgx prepares and keeps.
const statementPrefix = "stmtcache_"

// heal takes note of errors that prepared statements cause through a transaction
// pooler. All connections are replaced, and each new one is looked at. A statement
// that is there already means a pooler that passes the server's key on, if it is one of pgx's: a
// function of the user's may prepare another. One that is gone may as well have been removed by a
// statement of the sql kind.
func (p *pool) heal(err error) {
	pg, ok := errors.AsType[*pgconn.PgError](err)
	if p.explicit || !ok {
		return
	}
	switch pg.Code {
	case duplicateStatement:
		if strings.Contains(pg.Message, statementPrefix) && p.hidden.CompareAndSwap(false, true) {
			p.inner.Reset()
		}
	case noSuchStatement:
		p.inner.Reset()
	}
}

// renew replaces all connections, at most once a second. When one leads to a server that
// does not answer any more, or is not the right one, the others most likely do, too, and
// each would be believed for as long as a statement may take.
func (p *pool) renew() {
	now, last := time.Now().UnixNano(), p.renewed.Load()
	if now-last > int64(time.Second) && p.renewed.CompareAndSwap(last, now) {
		p.inner.Reset()
	}
}

// Query is that of pgxpool.Pool. It returns either rows or an error.
func (p *pool) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	var b pgx.Batch
	b.Queue(fixed)
	b.Queue(sql, args...)
	r := p.SendBatch(ctx, &b)
	_, err := r.Exec()
	if err == nil {
		var rows pgx.Rows
		if rows, err = r.Query(); err == nil {
			return &batchRows{Rows: rows, results: r}, nil
		}
	}
	_ = r.Close()
	return nil, err
}

// batchRows are the rows of the last statement of a batch, and end the batch.
type batchRows struct {
	pgx.Rows
	results pgx.BatchResults
	err     error
}

func (r *batchRows) Next() bool {
	if r.Rows.Next() {
		return true
	}
	r.Close()
	return false
}

func (r *batchRows) Close() {
	r.Rows.Close()
	r.err = r.results.Close()
}

// Err also returns what Close heard, which is whether the transaction was
// committed.
func (r *batchRows) Err() error {
	if err := r.Rows.Err(); err != nil {
		return err
	}
	return r.err
}

// QueryRow is that of pgxpool.Pool.
func (p *pool) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	rows, err := p.Query(ctx, sql, args...)
	return oneRow{rows, err}
}

type oneRow struct {
	rows pgx.Rows
	err  error
}

func (r oneRow) Scan(dest ...any) error {
	if r.err != nil {
		return r.err
	}
	defer r.rows.Close()
	if !r.rows.Next() {
		if err := r.rows.Err(); err != nil {
			return err
		}
		return pgx.ErrNoRows
	}
	if err := r.rows.Scan(dest...); err != nil {
		return err
	}
	r.rows.Close()
	return r.rows.Err()
}

// Exec is that of pgxpool.Pool, for a single statement.
func (p *pool) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return commandTag(p.Query(ctx, sql, args...))
}

// commandTag ends a statement whose rows nobody wants.
func commandTag(rows pgx.Rows, err error) (pgconn.CommandTag, error) {
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	rows.Close()
	return rows.CommandTag(), rows.Err()
}

// Begin is that of pgxpool.Pool. The first statement of the transaction must be the
// same as that of a batch. Until then search_path is safe on direct connections only.
func (p *pool) Begin(ctx context.Context) (pgx.Tx, error) {
	return p.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
}

// BeginTx is Begin with another isolation level.
func (p *pool) BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) {
	tx, err := p.inner.BeginTx(ctx, options)
	p.heal(err)
	return tx, err
}
