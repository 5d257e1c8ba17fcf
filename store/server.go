package store

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/internal/pgerror"
	"onejob/tasks"
)

// These say which server answers. pg_control_checkpoint() would tell the timeline of
// the last checkpoint, which after a promotion is the old one for a while; the name of the
// WAL file that is being written is right at once.
//
// A provider may keep these functions to itself. Then all that is known of a server is
// when it was started: fences rise as elsewhere, and no old primary is recognised.
const (
	fullIdentity = `
SELECT (SELECT system_identifier::text FROM pg_control_system()),
       CASE WHEN pg_is_in_recovery() THEN '0' ELSE substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8) END`
	noIdentity = `
SELECT '` + tasks.UnknownSystem + `', '0'`
	restOfServer = `,
       pg_postmaster_start_time(),
       coalesce(host(inet_server_addr()) || ':' || inet_server_port(), 'a socket of its host'),
       pg_is_in_recovery(),
       extract(epoch FROM clock_timestamp())::bigint`
)

// Which returns the server that answers.
func (s *Store) Which(ctx context.Context) (tasks.Server, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	r, err := which(ctx, s.pool, restOfServer)
	return r.Server, err
}

// A Host is one of those that the DSN names.
type Host struct {
	Name   string // host and port
	Server tasks.Server
	Err    error // why it is not known which server answers there
}

// Hosts asks every host of the DSN which server answers there, whether or not it would
// do for the database.
func (s *Store) Hosts(ctx context.Context) []Host {
	c := s.pool.inner.Config().ConnConfig
	all := byAddress(&c.Config)
	list := make([]Host, len(all))
	var asking sync.WaitGroup
	for i, w := range all {
		h := &list[i]
		h.Name = w.address()
		asking.Go(func() {
			one := c.Copy()
			lead(&one.Config, w)
			one.ValidateConnect, one.DefaultQueryExecMode = nil, pgx.QueryExecModeExec
			h.Server, h.Err = s.whichAt(ctx, one)
		})
	}
	asking.Wait()
	return list
}

func (s *Store) whichAt(ctx context.Context, c *pgx.ConnConfig) (tasks.Server, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	conn, err := pgx.ConnectConfig(ctx, c)
	if err != nil {
		return tasks.Server{}, sanitized(err)
	}
	defer closeConn(conn)
	r, err := which(ctx, conn, restOfServer)
	return r.Server, err
}

// Server returns the server that answers, and what it knows of its fences.
func (s *Store) Server(ctx context.Context) (tasks.ServerReport, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	return which(ctx, s.pool, restOfServer+`,
       coalesce(pg_sequence_last_value('onejob.fences'::regclass), 0),
       (SELECT oid::text FROM pg_database WHERE datname = current_database()) || '.' || 'onejob.fences'::regclass::oid,
       coalesce((SELECT fences_from FROM onejob.cluster), -1)`)
}

func which(ctx context.Context, db DB, rest string) (tasks.ServerReport, error) {
	r, err := identify(ctx, db, fullIdentity+rest)
	if pgerror.Is(err, insufficientPrivilege, undefinedFunction, notSupported) {
		return identify(ctx, db, noIdentity+rest)
	}
	return r, err
}

// SQLSTATEs of a function that cannot be had.
const (
	insufficientPrivilege = "42501"
	undefinedFunction     = "42883"
	notSupported          = "0A000"
)

func identify(ctx context.Context, db DB, sql string) (tasks.ServerReport, error) {
	list, err := query(ctx, db, func(row pgx.CollectableRow) (r tasks.ServerReport, err error) {
		var timeline string
		var seconds int64
		to := []any{&r.System, &timeline, &r.Started, &r.Address, &r.Standby, &seconds}
		if len(row.FieldDescriptions()) > len(to) {
			to = append(to, &r.LastFence, &r.Sequence, &r.FencesFrom)
		}
		if err := row.Scan(to...); err != nil {
			return r, err
		}
		n, err := strconv.ParseInt(timeline, 16, 64)
		r.Timeline, r.Now = int(n), time.Unix(seconds, 0)
		return r, err
	}, sql)
	switch {
	case err != nil:
		return tasks.ServerReport{}, fmt.Errorf("ask which server this is: %w", err)
	case len(list) != 1:
		return tasks.ServerReport{}, errors.New("ask which server this is: no answer")
	}
	return list[0], nil
}

// Recorded notes what is added to the numbers of onejob.fences from now on, unless more is
// noted already.
func (s *Store) Recorded(ctx context.Context, fencesFrom int64) error {
	_, err := fetch(ctx, s.pool, "note where fences begin", pgx.RowTo[bool], `
UPDATE onejob.cluster
   SET fences_from = $1
 WHERE coalesce(fences_from < $1, true)
RETURNING true`, fencesFrom)
	return err
}
