package store

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"onejob/tasks"
)

const (
	// lookAtHost is how long one look at a host may take that is not the database's.
	lookAtHost = 2 * time.Second

	// connectAgain is how long a host is left alone that does not answer, or is no copy of
	// the database: each connection that it refuses is a line in its log.
	connectAgain = 5 * time.Second
)

// lookouts look at the hosts of the DSN that are not the database's.
type lookouts struct {
	mu    sync.Mutex // held while somebody looks
	hosts map[string]*lookout
}

// lookout is what is known of one. Its connection is kept: a standby that is promoted
// keeps its clients.
type lookout struct {
	conn     *pgconn.PgConn // nil if there is none
	failed   time.Time      // the last time that there was none to be had
	timeline int            // of the primary there; zero if that is a standby or no copy of the system, or does not answer
}

// Follow looks at the other hosts of the DSN for a copy of the given server that is a
// primary with a later timeline. If there is one, connections lead there from now on, as
// long as it answers; those that there are end. Without this, a replica whose old primary
// lives on would work there until that ends, and what it writes would be lost.
//
// A look takes [lookAtHost] at most. With load_balance_hosts=random the next connection
// may as well lead to the old primary.
func (s *Store) Follow(ctx context.Context, server tasks.Server) bool {
	if server.System == tasks.UnknownSystem {
		return false
	}
	s.lookouts.mu.Lock()
	defer s.lookouts.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, lookAtHost)
	defer cancel()
	others := s.hosts.others(&s.pool.inner.Config().ConnConfig.Config)
	known := s.lookouts.hosts
	s.lookouts.hosts = map[string]*lookout{}
	var looks sync.WaitGroup
	for _, c := range others {
		name := address(c.Host, c.Port)
		l := known[name]
		delete(known, name)
		if l == nil {
			l = new(lookout)
		}
		s.lookouts.hosts[name] = l
		looks.Go(func() { l.look(ctx, c, server.System) })
	}
	looks.Wait()
	for _, l := range known { // it is the database's host now
		l.close()
	}
	var newest *pgconn.Config
	least := server.Timeline
	for _, c := range others {
		if l := s.lookouts.hosts[address(c.Host, c.Port)]; l.timeline > least {
			newest, least = c, l.timeline
		}
	}
	if newest == nil {
		return false
	}
	s.hosts.prefer(newest.Host, newest.Port)
	s.leaveServer()
	return true
}

// look asks for the timeline, over a connection to be had with c.
func (l *lookout) look(ctx context.Context, c *pgconn.Config, system string) {
	l.timeline = 0
	if l.conn == nil && time.Since(l.failed) < connectAgain {
		return
	}
	var err error
	if l.conn == nil {
		c.ValidateConnect = nil // a standby will do
		l.conn, err = pgconn.ConnectConfig(ctx, c)
	}
	if err == nil {
		l.timeline, err = timelineOf(ctx, l.conn, system)
	}
	if err != nil {
		l.close()
		l.failed = time.Now()
	}
}

func (l *lookout) close() {
	if l.conn != nil {
		closeConn(l.conn)
		l.conn = nil
	}
}

// close ends all connections.
func (l *lookouts) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, h := range l.hosts {
		h.close()
	}
	l.hosts = nil
}

var errOtherSystem = errors.New("it is another system")

// timelineOf returns the timeline of a primary of a system, and 0 for a standby of it.
func timelineOf(ctx context.Context, conn *pgconn.PgConn, system string) (int, error) {
	results, err := conn.Exec(ctx, `
SELECT system_identifier,
       CASE WHEN pg_catalog.pg_is_in_recovery() THEN '0' ELSE pg_catalog.substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 1, 8) END
  FROM pg_catalog.pg_control_system()`).ReadAll()
	switch {
	case err != nil:
		return 0, err
	case len(results) != 1 || len(results[0].Rows) != 1 || string(results[0].Rows[0][0]) != system:
		return 0, errOtherSystem
	}
	timeline, err := strconv.ParseInt(string(results[0].Rows[0][1]), 16, 64)
	return int(timeline), err
}
