package observer

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"onejob/boottime"
)

// ledger is what the observer has seen. One lock guards it all: stamps are given
// under it, and so are in the order of what is written.
type ledger struct {
	epoch time.Time

	mu      sync.Mutex
	seen    Seen
	inside  map[*guest]bool
	highest map[string]int64 // fence, by lock key
	marks   map[int]int      // where in seen.Marks
}

// guest is somebody who is inside.
type guest struct {
	stay Stay
	last Time // when it was heard last
	fd   int  // of its connection, which is open while the guest is on the list
}

func newLedger() *ledger {
	return &ledger{epoch: time.Now(), inside: map[*guest]bool{}, highest: map[string]int64{}, marks: map[int]int{}}
}

// now is monotonic: a step of the wall clock while the observer runs is not seen.
func (l *ledger) now() Time { return At(l.epoch).Add(time.Since(l.epoch)) }

// errGone is for those who had gone when their turn came.
var errGone = errors.New("the connection was closed before anybody listened")

// begin lets somebody in, unless one with a higher fence for the same key was
// let in before.
func (l *ledger) begin(c Claim, conn net.Conn) (*guest, error) {
	fd, err := descriptor(conn)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if closed([]int{fd})[0] {
		return nil, errGone
	}
	if c.Outsider == "" {
		if c.Fence < l.highest[c.Key] {
			l.seen.Stale = append(l.seen.Stale, Stale{Claim: c, At: l.now()})
			return nil, ErrStale
		}
		l.highest[c.Key] = c.Fence
	}
	l.sweep()
	now := l.now()
	g := &guest{stay: Stay{Claim: c, Begin: now}, last: now, fd: fd}
	l.inside[g] = true
	return g, nil
}

// sweep stamps those whose other end has closed the connection, even if what
// they sent before has not been read yet.
func (l *ledger) sweep() {
	var guests []*guest
	var fds []int
	for g := range l.inside {
		guests, fds = append(guests, g), append(fds, g.fd)
	}
	for i, gone := range closed(fds) {
		if gone {
			l.stamp(guests[i], Gone)
		}
	}
}

// closed reports of each connection whether its other end has closed it.
func closed(fds []int) []bool {
	gone := make([]bool, len(fds))
	if len(fds) == 0 {
		return gone
	}
	polled := make([]unix.PollFd, len(fds))
	for i, fd := range fds {
		polled[i] = unix.PollFd{Fd: int32(fd), Events: unix.POLLRDHUP}
	}
	for {
		_, err := unix.Poll(polled, 0)
		if err == nil {
			break
		}
		if err != unix.EINTR {
			panic(fmt.Sprintf("poll: %v", err)) // there is no answer to go on with
		}
	}
	for i, p := range polled {
		gone[i] = p.Revents&(unix.POLLRDHUP|unix.POLLHUP|unix.POLLERR) != 0
	}
	return gone
}

// beat notes that g is alive.
func (l *ledger) beat(g *guest) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.inside[g] {
		l.heard(g)
		g.stay.Beats++
	}
}

func (l *ledger) heard(g *guest) {
	now := l.now()
	g.stay.Silence = max(g.stay.Silence, now.Sub(g.last))
	g.last = now
}

// end notes how g left, unless that is known already. It must be called before
// the connection is closed.
func (l *ledger) end(g *guest, how string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stamp(g, how)
}

func (l *ledger) stamp(g *guest, how string) {
	if !l.inside[g] {
		return
	}
	delete(l.inside, g)
	l.heard(g)
	g.stay.End, g.stay.How = g.last, how
	l.seen.Stays = append(l.seen.Stays, g.stay)
}

// lease notes what is said of the lease of an attempt. The deadline is a moment on the
// boot-time clock, which is the same for all processes of this machine.
func (l *ledger) lease(fence int64, deadline boottime.Instant) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.seen.Leases == nil {
		l.seen.Leases = map[int64]Lease{}
	}
	now := l.now()
	l.seen.Leases[fence] = Lease{Deadline: now.Add(min(deadline.Until(), 1000*time.Hour)), Told: now}
}

// leases returns what was said of leases.
func (l *ledger) leases() map[int64]Lease {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.seen.Leases)
}

// mark notes the beginning of something that is done to the cluster, or its end.
func (l *ledger) mark(m Mark, begins bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if begins {
		m.Begin, m.End = l.now(), 0
		l.marks[m.ID] = len(l.seen.Marks)
		l.seen.Marks = append(l.seen.Marks, m)
	} else if i, ok := l.marks[m.ID]; ok {
		l.seen.Marks[i].End = l.now()
	}
}

// guests returns who is inside now.
func (l *ledger) guests() []Stay {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sweep()
	stays := []Stay{}
	for g := range l.inside {
		stays = append(stays, g.stay)
	}
	return stays
}

// close ends the ledger: who is inside now stays so.
func (l *ledger) close() Seen {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sweep()
	for g := range l.inside {
		l.stamp(g, Open)
	}
	return l.seen
}

// descriptor returns the number of a connection's file, which is good for as
// long as the connection is open.
func descriptor(conn net.Conn) (fd int, err error) {
	raw, err := conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	err = raw.Control(func(n uintptr) { fd = int(n) })
	return fd, err
}
