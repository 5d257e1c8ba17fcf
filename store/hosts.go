package store

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"onejob/tasks"
)

// hosts decides in which order the hosts of a DSN are tried, and which servers will not
// do. A host that is gone costs connect_timeout; so the one that was good last is tried
// first. All connections of a store share one.
type hosts struct {
	random bool // load_balance_hosts

	mu    sync.Mutex
	names map[string]string // of hosts, by address
	good  string            // host and port that a connection led to last
	least tasks.Server      // servers of its system with a lower timeline will not do
}

// host is a way to one of those of a DSN. With sslmode=prefer there are two.
type host = pgconn.FallbackConfig

// ways are those to one host.
type ways []*host

func (w ways) address() string { return address(w[0].Host, w[0].Port) }

// byAddress returns the ways to each host of a configuration, in the order in which it has them.
func byAddress(c *pgconn.Config) (list []ways) {
	for _, way := range append(ways{{Host: c.Host, Port: c.Port, TLSConfig: c.TLSConfig}}, c.Fallbacks...) {
		i := slices.IndexFunc(list, func(w ways) bool { return w.address() == address(way.Host, way.Port) })
		if i < 0 {
			i, list = len(list), append(list, nil)
		}
		list[i] = append(list[i], way)
	}
	return list
}

func address(host string, port uint16) string { return net.JoinHostPort(host, strconv.Itoa(int(port))) }

// lead makes a configuration try these ways and no others.
func lead(c *pgconn.Config, w ways) {
	c.Host, c.Port, c.TLSConfig, c.Fallbacks = w[0].Host, w[0].Port, w[0].TLSConfig, w[1:]
}

// prepare makes a configuration try the good host first, and refuse old primaries.
func (h *hosts) prepare(c *pgconn.Config) {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := byAddress(c)
	if h.random {
		rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	} else if i := slices.IndexFunc(all, func(w ways) bool { return w.address() == h.good }); i > 0 {
		all = slices.Concat(all[i:i+1], all[:i], all[i+1:])
	}
	lead(c, slices.Concat(all...))

	lookUp := c.LookupFunc
	c.LookupFunc = func(ctx context.Context, host string) ([]string, error) {
		addrs, err := lookUp(ctx, host)
		h.mu.Lock()
		defer h.mu.Unlock()
		for _, a := range addrs {
			h.names[a] = host
		}
		return addrs, err
	}
	validate := c.ValidateConnect
	c.ValidateConnect = func(ctx context.Context, conn *pgconn.PgConn) error {
		if validate != nil {
			if err := validate(ctx, conn); err != nil {
				return err
			}
		}
		return h.validate(ctx, conn)
	}
}

// validate refuses a server that is an old primary, and notes where a good one is.
func (h *hosts) validate(ctx context.Context, conn *pgconn.PgConn) error {
	h.mu.Lock()
	least := h.least
	h.mu.Unlock()
	if least.Timeline > 1 {
		timeline, err := timelineOf(ctx, conn, least.System)
		switch {
		case err == nil && timeline > 0 && timeline < least.Timeline: // a standby has none
			return fmt.Errorf("it is an old primary: its timeline is %d, that of the database %d (%s)", timeline, least.Timeline, least.Address)
		case err != nil && !errors.Is(err, errOtherSystem):
			return fmt.Errorf("ask for its timeline: %w", err)
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if ip, port, err := net.SplitHostPort(conn.Conn().RemoteAddr().String()); err == nil {
		if name, known := h.names[ip]; known {
			ip = name
		}
		h.good = net.JoinHostPort(ip, port)
	}
	return nil
}

// others returns configurations of connections to each of the hosts that is not the good
// one.
func (h *hosts) others(c *pgconn.Config) (list []*pgconn.Config) {
	h.mu.Lock()
	good := h.good
	h.mu.Unlock()
	for _, w := range byAddress(c) {
		if w.address() != good {
			other := c.Copy()
			lead(other, w)
			list = append(list, other)
		}
	}
	return list
}

// prefer makes a host the good one.
func (h *hosts) prefer(host string, port uint16) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.good = address(host, port)
}

// refuse sets which servers will not do. It reports whether that has changed.
func (h *hosts) refuse(older tasks.Server) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	changed := h.least.System != older.System || h.least.Timeline != older.Timeline
	h.least = older
	return changed
}

// network is how dead connections are noticed, as libpq's parameters have it.
type network struct {
	keepalives            bool
	idle, interval, limit time.Duration // limit is tcp_user_timeout
	count                 int
}

// networkOf takes libpq's parameters of the network out of those that pgx would send to
// the server, which refuses or misunderstands them.
func networkOf(params map[string]string) (n network, random bool, err error) {
	n = network{keepalives: true, idle: cutOff / 2, interval: cutOff / 5, count: 3, limit: cutOff}
	number := func(name string, set func(int)) {
		text, given := params[name]
		delete(params, name)
		if !given || err != nil {
			return
		}
		v, e := strconv.Atoi(text)
		if e != nil || v < 0 {
			err = fmt.Errorf("%s: %q is not a whole number of at least zero", name, text)
			return
		}
		if v > 0 { // zero is the default, to libpq as well
			set(v)
		}
	}
	if params["keepalives"] == "0" {
		n.keepalives = false
	}
	number("keepalives", func(int) {})
	number("keepalives_idle", func(v int) { n.idle = time.Duration(v) * time.Second })
	number("keepalives_interval", func(v int) { n.interval = time.Duration(v) * time.Second })
	number("keepalives_count", func(v int) { n.count = v })
	number("tcp_user_timeout", func(v int) { n.limit = time.Duration(v) * time.Millisecond })
	switch how := params["load_balance_hosts"]; how {
	case "", "disable":
	case "random":
		random = true
	default:
		err = fmt.Errorf("load_balance_hosts: %q is neither disable nor random", how)
	}
	delete(params, "load_balance_hosts")
	return n, random, err
}

// dialer returns a dialer whose connections end soon after the network has cut
// them off: data that is not acknowledged for so long ends them, and so does a
// silence of about that long when there is nothing to send.
func (n network) dialer(timeout time.Duration) pgconn.DialFunc {
	d := &net.Dialer{
		Timeout:         timeout,
		KeepAliveConfig: net.KeepAliveConfig{Enable: n.keepalives, Idle: n.idle, Interval: n.interval, Count: n.count},
		Control: func(network, _ string, c syscall.RawConn) error {
			if !strings.HasPrefix(network, "tcp") {
				return nil
			}
			var err error
			if e := c.Control(func(fd uintptr) {
				err = limitUnacknowledged(int(fd), n.limit)
			}); e != nil {
				return e
			}
			return err
		},
	}
	if !n.keepalives {
		d.KeepAlive = -1
	}
	return d.DialContext
}
