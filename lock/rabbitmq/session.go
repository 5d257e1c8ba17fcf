package rabbitmq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"
	"go.uber.org/zap"

	"onejob/boottime"
	"onejob/internal/retry"
	"onejob/lock"
	"onejob/lock/internal/hold"
)

// A session is the life of one connection that holds slots.
type session struct {
	*hold.Session // ends when the connection does, or is no longer believed in

	s        *Semaphores
	id       string // of the session, which is the connection
	queue    string // a queue that exists as long as the connection does
	wire     *wire
	beats    *line // for the session's queue alone: a request that the broker cannot finish must not end leases
	checks   *line // for B queues, of which one may be stuck
	requests *line // for all other requests but the taking of slots

	unmarked atomic.Bool // somebody deleted the session's queue

	mu    sync.Mutex
	slots map[string]*slot // by B queue; one that is here reserves it
	over  bool             // no more slots

	readers sync.WaitGroup // of B and delay queues, two for each slot, and requests that may outlast their callers

	consumers     atomic.Int32 // of wake-up queues
	mostConsumers int
	mostSlots     int
}

// sharesOf divides the channels of a connection: a slot takes two, and a wake-up queue one.
// Some remain for requests, without which no lease is renewed.
func sharesOf(channels int) (consumers, slots int) {
	const requests = 32 // the session's three lines and slots that are just taken included
	consumers = min(256, channels/8)
	return consumers, max(1, (channels-consumers-requests)/2)
}

// channels returns about how many channels the session has.
func (t *session) channels() int { return 3 + int(t.consumers.Load()) + 2*len(t.list()) }

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
	// A request that takes longer ends the session: the broker then deletes the queues with the connection.
	newLine := func() *line { return &line{wire: w, limit: max(requestTimeout, s.cfg.Heartbeat)} }
	t := &session{
		s: s, id: id, queue: s.cfg.Prefix + "/.session/" + id,
		wire: w, slots: map[string]*slot{},
		beats: newLine(), checks: newLine(), requests: newLine(),
	}
	t.mostConsumers, t.mostSlots = sharesOf(min(int(w.conn.Config.ChannelMax), s.channels))
	t.Session = hold.NewSession(s.ahead, func(jump time.Duration) {
		s.log.Warn("clock_jumped", zap.String("session", id), zap.Duration("jump", jump), zap.Int("leases", len(t.list())))
	})
	t.Begin(hold.TTL, s.cfg.timing(), boottime.Now())
	stop := context.AfterFunc(ctx, w.cut)
	err = t.requests.own(t.queue)
	if stop() && err == nil {
		return t, nil
	}
	w.close()
	return nil, errors.Join(ctx.Err(), explain("declare queue "+t.queue, err))
}

// live keeps the session going until it is lost or ctx ends.
func (t *session) live(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer context.AfterFunc(t.Context(), cancel)()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { t.fence(ctx) })
	wg.Go(func() { every(ctx, t.s.cfg.Verify, t.beat) })
	wg.Go(func() { every(ctx, t.s.cfg.Verify, t.check) })
	select {
	case reason := <-t.wire.closed:
		if tooManyChannels(cause(reason)) {
			t.s.channels = max(1, t.channels()-1)
		}
		t.lose(explain("the connection was closed", cause(reason)))
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
	for ctx.Err() == nil {
		left, why := t.Left()
		if left <= 0 {
			t.lose(cmp.Or(why, errors.New("the broker has not answered for too long")))
			return
		}
		retry.Pause(ctx, min(left, t.s.cfg.Verify, 500*time.Millisecond))
	}
}

// beat asks the broker for the session's queue. An answer shows that the connection lived when
// it was asked. Nothing else is done here that could take long: leases end when beats do not come.
func (t *session) beat() {
	if err := t.probe(t.beats, t.queue); is(err, amqp.NotFound) {
		t.unmarked.Store(true)
	}
}

// check looks after the queues that are ours. That a B queue is still ours, nobody else's, is
// shown by passive declaration alone.
func (t *session) check() {
	if t.unmarked.Swap(false) { // it only was there to be asked for
		_ = t.requests.own(t.queue)
	}
	for _, s := range t.list() {
		if s.check(); s.Retry() {
			_ = s.leave()
		}
		if t.Lost() != nil {
			return
		}
	}
}

// probe asks for one queue, and moves the deadline for any answer.
func (t *session) probe(l *line, queue string) error {
	sent := boottime.Now()
	err := l.do(func(ch *amqp.Channel) error {
		_, err := ch.QueueDeclarePassive(queue, false, false, true, false, arguments)
		return err
	})
	if err == nil || is(err, amqp.NotFound, amqp.ResourceLocked) {
		t.Extend(hold.TTL, t.s.cfg.timing(), sent)
	}
	return err
}

// lose ends the session, and the connection: nobody is to wait for its last answer.
func (t *session) lose(why error) {
	t.close(why)
	t.wire.cut()
}

// end closes the connection cleanly: the broker deletes our queues before it confirms.
func (t *session) end() {
	t.close(errors.New("we are stopping"))
	t.wire.close()
	t.readers.Wait()
}

// close ends all leases.
func (t *session) close(why error) {
	t.mu.Lock()
	t.over = true
	t.mu.Unlock()
	t.Lose(fmt.Errorf("%w: %w", lock.ErrLost, why))
}

// gone returns lock.ErrLost, with the reason, when the connection is. It may be
// known here earlier than to live.
func (t *session) gone() error {
	if t.Lost() == nil && t.wire.conn.IsClosed() {
		return fmt.Errorf("%w: the connection was closed", lock.ErrLost)
	}
	return t.Lost()
}

// reserve enters a slot in the table and counts its reader. It returns errRace if it
// is there already.
func (t *session) reserve(s *slot) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.over || t.slots[s.queue] != nil:
		return errRace
	case len(t.slots) >= t.mostSlots:
		return fmt.Errorf("take queue %s: this process holds %d slots, as many as its connection has channels for: raise channel_max in rabbitmq.conf or max-channels of the user, or run more replicas", s.queue, len(t.slots))
	}
	t.readers.Add(1)
	t.slots[s.queue] = s
	return nil
}

// more counts another reader, unless the session is over.
func (t *session) more() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over {
		return false
	}
	t.readers.Add(1)
	return true
}

// patience is how long await waits after the end of its context: an answer that is about to come
// leaves less behind.
const patience = 2 * time.Second

// await returns what work returns, which waits for the broker's answers without a context. When ctx has
// ended and patience is over, await returns the cause, and late gets what work returns then. The connection
// is left alone, as others have leases on it; the session's end waits for both.
func await[T any](ctx context.Context, t *session, work func() T, late func(T)) (result T, err error) {
	if !t.more() {
		return result, cmp.Or(t.gone(), lock.ErrLost)
	}
	done, over := make(chan T), make(chan struct{})
	go func() {
		defer t.readers.Done()
		result := work()
		select {
		case done <- result:
		case <-over:
			late(result)
		}
	}()
	select {
	case result = <-done:
		return result, nil
	case <-ctx.Done():
	}
	select {
	case result = <-done:
		return result, nil
	case <-time.After(patience):
		close(over)
		return result, context.Cause(ctx)
	}
}

// later does work that waits for the broker, and does not wait for it for long.
func (t *session) later(work func()) {
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	_, _ = await(ended, t, func() struct{} { // at the session's end its channels end as well
		work()
		return struct{}{}
	}, func(struct{}) {})
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
