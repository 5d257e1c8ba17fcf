package store

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"onejob/internal/mutant"
	"onejob/tasks"
)

// lookAtHost is how long one look at a host may take that is not the database's.
const lookAtHost = 2 * time.Second

// lookouts are connections to the hosts of the DSN that are not the database's. They are
// kept: a standby that is promoted keeps its clients.
type lookouts struct {
	mu    sync.Mutex // held while somebody looks
	conns map[string]*pgconn.PgConn
}

// Follow looks at the other hosts of the DSN for a copy of the given server that is a
// primary with a later timeline. If there is one, connections lead there from now on, as
// long as it answers; those that there are end. Without this, a replica whose old primary
// lives on would work there until that ends, and what it writes would be lost.
//
// A look takes [lookAtHost] at most. With load_balance_hosts=random the next connection
// may as well lead to the old primary.
func (s *Store) Follow(ctx context.Context, server tasks.Server) bool {
	if server.System == tasks.UnknownSystem || mutant.Successor {
		return false
	}
	s.lookouts.mu.Lock()
	defer s.lookouts.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, lookAtHost)
	defer cancel()
	others := s.hosts.others(&s.pool.inner.Config().ConnConfig.Config)
	timelines := make([]int, len(others))
	conns := make([]*pgconn.PgConn, len(others))
	var looks sync.WaitGroup
	for i, c := range others {
		kept := s.lookouts.conns[address(c.Host, c.Port)]
		delete(s.lookouts.conns, address(c.Host, c.Port))
		looks.Go(func() { conns[i], timelines[i] = lookAt(ctx, c, kept, server.System) })
	}
	looks.Wait()
	s.lookouts.close() // of a host that is the database's now
	s.lookouts.conns = map[string]*pgconn.PgConn{}
	newest := -1
	for i, c := range others {
		if conns[i] != nil {
			s.lookouts.conns[address(c.Host, c.Port)] = conns[i]
		}
		if timelines[i] > server.Timeline && (newest < 0 || timelines[i] > timelines[newest]) {
			newest = i
		}
	}
	if newest < 0 {
		return false
	}
	s.hosts.prefer(others[newest].Host, others[newest].Port)
	s.pool.inner.Reset()
	s.list.inner.Reset()
	return true
}

// lookAt returns a connection to a host, which may be kept, and the timeline of the primary
// there: zero if that is a standby, no copy of the system, or does not answer.
func lookAt(ctx context.Context, c *pgconn.Config, kept *pgconn.PgConn, system string) (*pgconn.PgConn, int) {
	conn := kept
	if conn == nil {
		var err error
		c.ValidateConnect = nil // a standby will do
		if conn, err = pgconn.ConnectConfig(ctx, c); err != nil {
			return nil, 0
		}
	}
	timeline, err := timelineOf(ctx, conn, system)
	if err != nil {
		closeLookout(conn)
		return nil, 0
	}
	return conn, timeline
}

func timelineOf(ctx context.Context, conn *pgconn.PgConn, system string) (int, error) {
	results, err := conn.Exec(ctx, `
SELECT system_identifier,
       CASE WHEN pg_catalog.pg_is_in_recovery() THEN '0' ELSE pg_catalog.substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 1, 8) END
  FROM pg_catalog.pg_control_system()`).ReadAll()
	switch {
	case err != nil:
		return 0, err
	case len(results) != 1 || len(results[0].Rows) != 1 || string(results[0].Rows[0][0]) != system:
		return 0, errors.New("it is another system")
	}
	timeline, err := strconv.ParseInt(string(results[0].Rows[0][1]), 16, 64)
	return int(timeline), err
}

// close ends all connections. l.mu is held.
func (l *lookouts) close() {
	for _, c := range l.conns {
		closeLookout(c)
	}
	l.conns = nil
}

func closeLookout(conn *pgconn.PgConn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = conn.Close(ctx)
}
