package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"
	"go.uber.org/zap"

	"onejob/boottime"
	"onejob/lock"
)

// A session is the life of one connection that holds slots.
type session struct {
	s        *Semaphores
	id       string // of the session, which is the connection
	queue    string // a queue that exists as long as the connection does
	wire     *wire
	requests *line // for all requests but the taking of slots

	ctx    context.Context // ends when the connection does, or is no longer believed in
	cancel context.CancelCauseFunc

	mu     sync.Mutex
	until  boottime.Instant // it is believed in until then
	slots  map[string]*slot // by B queue; one that is here reserves it
	over   bool             // no more slots
	clocks boottime.Jumps
	looked boottime.Instant // at them
	jumped boottime.Instant // when the wall clock was last seen to have jumped ahead; zero if never

	readers sync.WaitGroup // of B and delay queues, two for each slot
}

// begin connects.
func (s *Semaphores) begin(ctx context.Context) (*session, error) {
	id := uuid.NewString()
	w, err := dial(ctx, s.cfg, "holder "+id)
	if err != nil {
		return nil, err
	}
	// The broker may want a shorter heartbeat, and would then give up on us
	// earlier than we count on.
	if agreed := w.conn.Config.Heartbeat; agreed < s.cfg.Heartbeat {
		w.close()
		return nil, fmt.Errorf("the broker insists on a heartbeat of %v, shorter than the %v that leases are counted by: set heartbeat = %d, or more, in its rabbitmq.conf", agreed, s.cfg.Heartbeat, s.cfg.Heartbeat/time.Second)
	}
	t := &session{
		s: s, id: id, queue: s.cfg.Prefix + "/.session/" + id,
		wire: w, requests: &line{wire: w},
		slots: map[string]*slot{}, clocks: boottime.Jumps{Source: s.ahead},
	}
	t.clocks.Since()
	t.until = s.cfg.timing().Deadline(boottime.Now())
	stop := context.AfterFunc(ctx, w.cut)
	err = t.requests.do(func(ch *amqp.Channel) error { return declareOwn(ch, t.queue) })
	if stop() && err == nil {
		t.ctx, t.cancel = context.WithCancelCause(context.Background())
		return t, nil
	}
	w.close()
	return nil, errors.Join(ctx.Err(), explain("declare queue "+t.queue, err))
}

// live keeps the session going until it is lost or ctx ends.
func (t *session) live(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer context.AfterFunc(t.ctx, cancel)()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { t.fence(ctx) })
	wg.Go(func() { every(ctx, t.s.cfg.Verify, t.beat) })
	select {
	case reason := <-t.wire.closed:
		t.lose(fmt.Errorf("the connection was closed: %w", cause(reason)))
	case <-ctx.Done():
		// A request that is not answered must not keep us.
		defer time.AfterFunc(shutdownTimeout, t.wire.cut).Stop()
		cancel()
		wg.Wait()
	}
}

// every calls f now and then, until ctx ends.
func every(ctx context.Context, interval time.Duration, f func()) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			f()
		case <-ctx.Done():
			return
		}
	}
}

// fence ends the session when its time is over. It looks at the clock more often
// than needed, as the timers of Go stand still while the machine sleeps.
func (t *session) fence(ctx context.Context) {
	for {
		left := t.deadline().Until()
		if left <= 0 {
			t.lose(t.tooLate())
			return
		}
		pause(ctx, min(left, t.s.cfg.Verify, 500*time.Millisecond))
		if ctx.Err() != nil {
			return
		}
	}
}

// beat asks the broker for every queue that is ours. An answer shows that the
// connection lived when it was asked; that the queue is still ours, nobody
// else's, is shown by passive declaration alone.
func (t *session) beat() {
	if err := t.probe(t.queue); is(err, amqp.NotFound) {
		// Somebody deleted it. It only was there to be asked for.
		_ = t.requests.do(func(ch *amqp.Channel) error { return declareOwn(ch, t.queue) })
	}
	for _, s := range t.list() {
		switch s.state.Load() {
		case stateHeld:
			s.check()
		case stateLeftOver:
			if s.state.CompareAndSwap(stateLeftOver, stateLeaving) {
				_ = s.leave()
			}
		}
		if t.ctx.Err() != nil {
			return
		}
	}
}

// probe asks for one queue, and moves the deadline for any answer.
func (t *session) probe(queue string) error {
	sent := boottime.Now()
	err := t.requests.do(func(ch *amqp.Channel) error {
		_, err := ch.QueueDeclarePassive(queue, false, false, true, false, arguments)
		return err
	})
	if err == nil || is(err, amqp.NotFound, amqp.ResourceLocked) {
		t.extend(sent)
	}
	return err
}

// delete deletes a queue of ours and waits for the broker to say so. It is no
// error if the queue is gone already.
func (t *session) delete(queue string) error {
	return t.requests.do(func(ch *amqp.Channel) error {
		_, err := ch.QueueDelete(queue, false, false, false)
		return err
	})
}

// extend moves the deadline after a request that was sent then was answered. A
// deadline that has passed does not return, and what was sent before a jump of the wall
// clock may have been sent before a pause.
func (t *session) extend(sent boottime.Instant) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.look()
	if !t.until.Passed() && sent > t.jumped {
		t.until = max(t.until, t.s.cfg.timing().Deadline(sent))
	}
}

func (t *session) deadline() boottime.Instant {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.look()
	return t.until
}

// lookEvery is how long it may take until a jump of the wall clock is noticed, by those
// who ask for the deadline.
const lookEvery = 50 * time.Millisecond

// look makes the deadline come sooner by as much as the wall clock has jumped ahead: the
// machine may have been paused for as long, and the broker's clock has gone on. t.mu is
// held.
func (t *session) look() {
	now := boottime.Now()
	if now.Sub(t.looked) < lookEvery || t.over {
		return
	}
	t.looked = now
	jump := t.clocks.Since()
	if jump == 0 {
		return
	}
	t.until, t.jumped = t.until.Add(-jump), now
	t.s.log.Warn("clock_jumped", zap.String("session", t.id), zap.Duration("jump", jump), zap.Int("leases", len(t.slots)))
}

// tooLate is why a session ends whose deadline has passed.
func (t *session) tooLate() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.jumped != 0 && boottime.Now().Sub(t.jumped) < 2*time.Second {
		return errors.New("the wall clock has jumped ahead: this machine was paused, or its clock was set")
	}
	return errors.New("the broker has not answered for too long")
}

// lose ends the session, and the connection: nobody is to wait for its last answer.
func (t *session) lose(why error) {
	t.close(why)
	t.wire.cut()
}

// end ends the session in good order: the broker deletes our queues before it says
// good-bye.
func (t *session) end() {
	t.close(errors.New("we are stopping"))
	t.wire.close()
	t.readers.Wait()
}

// close ends all leases.
func (t *session) close(why error) {
	t.mu.Lock()
	t.until = min(t.until, boottime.Now())
	t.over = true
	t.mu.Unlock()
	t.cancel(fmt.Errorf("%w: %w", lock.ErrLost, why))
}

// gone returns lock.ErrLost, with the reason, when the connection is. It may be
// known here earlier than to live.
func (t *session) gone() error {
	if t.ctx.Err() == nil && t.wire.conn.IsClosed() {
		return fmt.Errorf("%w: the connection was closed", lock.ErrLost)
	}
	return context.Cause(t.ctx)
}

// reserve enters a slot in the table and counts its reader, or reports that it
// is there already.
func (t *session) reserve(s *slot) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over || t.slots[s.queue] != nil {
		return false
	}
	t.readers.Add(1)
	t.slots[s.queue] = s
	return true
}

// more counts another reader of a slot in the table, unless the session is over.
func (t *session) more() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over {
		return false
	}
	t.readers.Add(1)
	return true
}

// remove takes a slot off the table.
func (t *session) remove(s *slot) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.slots[s.queue] == s {
		delete(t.slots, s.queue)
	}
}

func (t *session) list() []*slot {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Collect(maps.Values(t.slots))
}

// cause is why a connection was closed.
func cause(reason *amqp.Error) error {
	if reason == nil {
		return amqp.ErrClosed
	}
	return reason
}

// logFields tell one session from another.
func (t *session) logFields() []zap.Field {
	return []zap.Field{zap.String("session", t.id), zap.Int("leases", len(t.list()))}
}
