package observer

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"time"

	"onejob/boottime"
)

// Interval is how often a task beats.
const Interval = 50 * time.Millisecond

// ErrStale is returned by Enter when somebody with a higher fence was there
// before.
var ErrStale = errors.New("somebody with a higher fence has been here")

// message is what a task says, or the replica that runs it, one a line. The observer answers
// a begin and an end with a line of its own.
type message struct {
	Say   string `json:"say"` // begin, beat, end or lease
	Claim *Claim `json:"claim,omitempty"`
	How   string `json:"how,omitempty"`

	Fence    int64            `json:"fence,omitempty"`    // of a lease
	Deadline boottime.Instant `json:"deadline,omitempty"` // of a lease
}

const (
	sayBegin = "begin"
	sayBeat  = "beat"
	sayEnd   = "end"
	sayLease = "lease"

	answerYes   = "yes"
	answerStale = "stale"
)

// Visit is one task's connection to the observer.
type Visit struct {
	conn    net.Conn
	answers *bufio.Scanner
}

// Enter tells the observer at addr that c begins. When it returns without an
// error, the task is inside.
func Enter(ctx context.Context, addr string, c Claim) (*Visit, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("reach the observer: %w", err)
	}
	v := &Visit{conn: conn, answers: bufio.NewScanner(conn)}
	answer, err := v.ask(message{Say: sayBegin, Claim: &c})
	if err == nil && answer != answerYes {
		err = ErrStale
	}
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return v, nil
}

// Stay beats for as long as d, or until ctx ends; it returns ctx's error then.
func (v *Visit) Stay(ctx context.Context, d time.Duration) error {
	done := time.NewTimer(d)
	defer done.Stop()
	tick := time.NewTicker(Interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-done.C:
			return ctx.Err()
		case <-tick.C:
			if err := v.say(message{Say: sayBeat}); err != nil {
				return err
			}
		}
	}
}

// Leave says how it ends, and returns when the observer has heard it.
func (v *Visit) Leave(how string) error {
	defer v.conn.Close()
	_, err := v.ask(message{Say: sayEnd, How: how})
	return err
}

func (v *Visit) ask(m message) (string, error) {
	if err := v.say(m); err != nil {
		return "", err
	}
	if !v.answers.Scan() {
		return "", fmt.Errorf("the observer did not answer: %w", errors.Join(v.answers.Err(), net.ErrClosed))
	}
	return v.answers.Text(), nil
}

func (v *Visit) say(m message) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	_, err = v.conn.Write(append(b, '\n'))
	return err
}
