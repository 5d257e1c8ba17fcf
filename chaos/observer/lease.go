package observer

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"sync"

	"onejob/boottime"
)

// Teller is a replica's connection to the observer, on which it says what it knows of the
// lease of one attempt.
type Teller struct {
	fence int64

	mu   sync.Mutex
	conn net.Conn // nil once it is closed
	last boottime.Instant
}

// Tell connects to the observer at addr.
func Tell(ctx context.Context, addr string, fence int64) (*Teller, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("reach the observer: %w", err)
	}
	return &Teller{fence: fence, conn: conn}, nil
}

// Deadline wraps the func that says when the lease ends. A caller that gets a deadline from the
// wrapped one can be sure that it is on its way to the observer: so nobody is thought to be
// late who was given more time.
func (t *Teller) Deadline(deadline func() boottime.Instant) func() boottime.Instant {
	return func() boottime.Instant {
		d := deadline()
		t.say(d)
		return d
	}
}

func (t *Teller) say(d boottime.Instant) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.conn == nil || d == t.last {
		return
	}
	t.last = d
	b, err := json.Marshal(message{Say: sayLease, Fence: t.fence, Deadline: d})
	if err != nil {
		panic(err) // two numbers
	}
	_, _ = t.conn.Write(append(b, '\n')) // without the observer there is nothing to check
}

// Close ends the connection. Deadlines are still passed on after that, and not told.
func (t *Teller) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.conn == nil {
		return nil
	}
	err := t.conn.Close()
	t.conn = nil
	return err
}
