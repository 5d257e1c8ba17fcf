package cli

import (
	"net"
	"net/http"
	"slices"
	"sync"
)

// clients bounds the connections of an HTTP server. At the bound a new one takes the place of
// the one that has been without a request for longest, so that nobody who only holds
// connections keeps the health checks out. If all have a request under way, the new one is
// closed.
type clients struct {
	most int

	mu    sync.Mutex
	open  map[net.Conn]bool
	quiet []net.Conn // those without a request, the longest first
}

// changed is a http.Server's ConnState.
func (c *clients) changed(conn net.Conn, state http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.quiet = slices.DeleteFunc(c.quiet, func(q net.Conn) bool { return q == conn })
	switch state {
	case http.StateNew:
		if len(c.open) >= c.most && !c.makeRoom() {
			_ = conn.Close()
			return
		}
		if c.open == nil {
			c.open = map[net.Conn]bool{}
		}
		c.open[conn] = true
		c.quiet = append(c.quiet, conn)
	case http.StateIdle:
		if c.open[conn] { // or it was closed when its request came
			c.quiet = append(c.quiet, conn)
		}
	case http.StateClosed, http.StateHijacked:
		delete(c.open, conn)
	}
}

// makeRoom closes a connection, and reports whether there was one to close.
func (c *clients) makeRoom() bool {
	if len(c.quiet) == 0 {
		return false
	}
	_ = c.quiet[0].Close()
	delete(c.open, c.quiet[0])
	c.quiet = slices.Delete(c.quiet, 0, 1)
	return true
}
