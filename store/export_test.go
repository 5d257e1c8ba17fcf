package store

import (
	"context"
	"net"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sys/unix"

	"onejob/tasks"
)

// TurnStuck reports whether the next claim will wait for its turn for a moment only.
func (s *Store) TurnStuck() bool { return s.turnStuck.Load() }

// ErrLocked is what Complete gives up with while another transaction has the row.
var ErrLocked = errLocked

// Forget lets the next claim begin at the first row of each lane.
func (s *Store) Forget() { s.remember.forget() }

// TryAgain ends the time for which schedules are put off.
func TryAgain(s *Store) {
	s.putOff.mu.Lock()
	defer s.putOff.mu.Unlock()
	for id, r := range s.putOff.rows {
		s.putOff.rows[id] = putOffRow{version: r.version}
	}
}

// ForgetPutOff forgets which schedules are put off.
func ForgetPutOff(s *Store) {
	s.putOff.mu.Lock()
	defer s.putOff.mu.Unlock()
	clear(s.putOff.rows)
}

// Unended reports whether the statement of an attempt counts as one that may go on.
func Unended(s *Store, t *tasks.Task) bool {
	_, there := s.unended.Load(t.Fence)
	return there
}

// NoMorePutOff ends these times as if they were over.
func NoMorePutOff(s *Store) {
	s.putOff.mu.Lock()
	defer s.putOff.mu.Unlock()
	for id, r := range s.putOff.rows {
		r.until = time.Now().Add(-time.Millisecond)
		s.putOff.rows[id] = r
	}
}

// PutOffForLonger lets what is put off stay so for a minute.
func PutOffForLonger(s *Store) {
	s.putOff.mu.Lock()
	defer s.putOff.mu.Unlock()
	for id, r := range s.putOff.rows {
		r.until = time.Now().Add(time.Minute)
		s.putOff.rows[id] = r
	}
}

// KeepMarks makes the next claims of this sort go on from their marks.
func KeepMarks(s *Store, c tasks.Claim) {
	l := s.lanesOf(c)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.since, l.cost, l.earlier = time.Now(), time.Hour, time.Hour
}

// Idle makes the next claim of this sort begin with a plain look.
func Idle(s *Store, c tasks.Claim) {
	l := s.lanesOf(c)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.marks, l.since, l.empty, l.expensive, l.idle = nil, time.Time{}, false, false, true
}

// Expensive makes LookBehind look.
func (s *Store) Expensive() {
	for _, l := range s.remember.sort {
		l.expensive, l.cost, l.lookedAt = true, 0, time.Now()
	}
}

// Remember notes that a claim goes on where the one before it has ended.
func Remember(s *Store, c tasks.Claim) { s.lanesOf(c) }

// Remembered returns for how many sorts of claims it is remembered where they go on, and whether c's is
// among them.
func Remembered(s *Store, c tasks.Claim) (n int, is bool) {
	_, is = s.remember.sort[sortOf(c)]
	return len(s.remember.sort), is
}

// FirstBehind returns the first row of a lane in front of which LookBehind looks among those of one
// time whose IDs are at least from and below to; 0 if there is none.
func FirstBehind(ctx context.Context, s *Store, lane int64, at time.Time, from, to int64) (id int64, err error) {
	found, _, err := s.lookBehind(ctx, map[int64]mark{lane: {runAt: at.Add(time.Hour)}}, place{at, from}, place{at, to})
	if m, is := found[lane]; is {
		return m.id + 1, err
	}
	return 0, err
}

// Portions returns in how many portions LookBehind looks, of all sorts of claims.
func Portions(s *Store) (n int) {
	for _, l := range s.remember.sort {
		n += len(l.behind.bounds) + 1
	}
	return n
}

// Glances returns the pool of Overview, Story and Find.
func Glances(s *Store) *pgxpool.Pool { return s.glances.inner }

// Works returns the pool of CompleteWith.
func Works(s *Store) *pgxpool.Pool { return s.works.inner }

// MakeRoom is what an attempt does that is not the only one of its lock key.
func MakeRoom(ctx context.Context, s *Store, t *tasks.Task) error { return s.makeRoom(ctx, t) }

// Duration is what a row's timeout is for Go.
var Duration = duration

// SettingsOf returns the value of a setting in each way that statements go.
func SettingsOf(ctx context.Context, s *Store, name string) (map[string]string, error) {
	const sql = `SELECT current_setting($1)`
	values := map[string]string{}
	list, err := query(ctx, s.pool, pgx.RowTo[string], sql, name)
	if err != nil {
		return nil, err
	}
	values["query"] = list[0]
	var v string
	if err := s.pool.QueryRow(ctx, sql, name).Scan(&v); err != nil {
		return nil, err
	}
	values["QueryRow"] = v
	if err := s.works.QueryRow(ctx, sql, name).Scan(&v); err != nil {
		return nil, err
	}
	values["QueryRow after a statement"] = v
	conn, err := s.connect(ctx, nil)
	if err != nil {
		return nil, err
	}
	defer closeConn(conn)
	if err := inTransaction(ctx, conn, func(tx pgx.Tx) error { return tx.QueryRow(ctx, sql, name).Scan(&v) }); err != nil {
		return nil, err
	}
	values["inTransaction"] = v
	return values, nil
}

// OurTimeouts returns the TCP_USER_TIMEOUT of a connection of the pool and of one
// past it, in milliseconds.
func OurTimeouts(ctx context.Context, s *Store) (ms []int, err error) {
	pooled, err := s.pool.inner.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	defer pooled.Release()
	past, err := s.connect(ctx, nil)
	if err != nil {
		return nil, err
	}
	defer closeConn(past)
	for _, conn := range []*pgx.Conn{pooled.Conn(), past} {
		raw, err := conn.PgConn().Conn().(*net.TCPConn).SyscallConn()
		if err != nil {
			return nil, err
		}
		const userTimeout = 18 // TCP_USER_TIMEOUT, which unix has on Linux only
		var n int
		if e := raw.Control(func(fd uintptr) { n, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, userTimeout) }); e != nil || err != nil {
			return nil, e
		}
		ms = append(ms, n)
	}
	return ms, nil
}

// Prepared returns how many named statements the next connection of the pool has
// prepared.
func Prepared(ctx context.Context, s *Store) (n int, err error) {
	err = s.pool.inner.QueryRow(ctx, `SELECT pg_catalog.count(*) FROM pg_catalog.pg_prepared_statements WHERE name <> ''`, pgx.QueryExecModeExec).Scan(&n)
	return n, err
}

// WriteAtAGlance tries to write where Overview, Story and Find read.
func WriteAtAGlance(ctx context.Context, s *Store) error {
	return s.glance(ctx, func(g glance) error {
		_, err := read(g, pgx.RowTo[int64], `INSERT INTO onejob.tasks (kind) VALUES ('noop') RETURNING id`)
		return err
	})
}

// CompleteTogether writes completions by one statement, in this order.
func CompleteTogether(ctx context.Context, s *Store, all ...tasks.Completion) (errs []error) {
	var list []*completion
	for _, e := range all {
		list = append(list, &completion{Completion: e, ctx: ctx})
	}
	s.writeCompletions(list)
	for _, e := range list {
		errs = append(errs, e.err)
	}
	return errs
}

// RequeueTogether requeues two holds of one task by one statement, with these delays.
func RequeueTogether(ctx context.Context, s *Store, a, b *tasks.Task, delayA, delayB time.Duration) (errs []error) {
	list := []*requeue{{id: a.ID, fence: a.Fence, session: a.Session, delay: delayA, ctx: ctx}, {id: b.ID, fence: b.Fence, session: b.Session, delay: delayB, ctx: ctx}}
	s.commitReturns(list)
	return []error{list[0].err, list[1].err}
}
