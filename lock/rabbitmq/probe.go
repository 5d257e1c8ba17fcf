package rabbitmq

import (
	"context"
	"fmt"
	"slices"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"onejob/lock"
)

// window is how many probes are on their way at once.
const window = 256

// requestTimeout bounds one look at any number of queues.
const requestTimeout = 15 * time.Second

// ErrUnconfirmed says that the broker has confirmed no message in time. Most often it has an
// alarm, of memory or of its disk, and takes no messages until that is over.
var ErrUnconfirmed = fmt.Errorf("the broker confirmed no probe within %v; it takes no messages while it has an alarm", requestTimeout)

// An observer sends messages, and tells for which of them there is a queue. The broker
// looks in their order.
type observer interface {
	send(ctx context.Context, messages []message) ([]bool, error)
}

// exist tells which queues exist.
func exist(ctx context.Context, o observer, queues []string) ([]bool, error) {
	messages := make([]message, len(queues))
	for i, queue := range queues {
		messages[i] = message{to: queue, message: amqp.Publishing{Expiration: "0"}}
	}
	found, err := o.send(ctx, messages)
	if err != nil {
		return nil, fmt.Errorf("look for queues: %w", err)
	}
	return found, nil
}

// A probeChannel finds out by publishing: a message that must be routed and cannot be
// comes back before it is confirmed. Unlike a passive declaration that does not
// close the channel when there is no such queue, nor when somebody else's
// connection has it, and hundreds of probes take one round trip.
//
// The message expires on arrival, and a queue of ours keeps none anyway.
type probeChannel struct {
	ch       *amqp.Channel
	returned chan amqp.Return
	closed   chan *amqp.Error
}

func newProbeChannel(w *wire) (*probeChannel, error) {
	ch, err := w.conn.Channel()
	if err != nil {
		return nil, err
	}
	if err := ch.Confirm(false); err != nil {
		return nil, err
	}
	return &probeChannel{
		ch: ch,
		// The library's reader waits for room here.
		returned: ch.NotifyReturn(make(chan amqp.Return, window)),
		closed:   ch.NotifyClose(make(chan *amqp.Error, 1)),
	}, nil
}

// A message is a message to a queue.
type message struct {
	to      string
	message amqp.Publishing
}

// send implements observer, for one caller at a time. After an error the channel is of no
// use any more.
func (p *probeChannel) send(ctx context.Context, messages []message) ([]bool, error) {
	arrived := make([]bool, 0, len(messages))
	for some := range slices.Chunk(messages, window) {
		missing, err := p.sendSome(ctx, some)
		if err != nil {
			return nil, err
		}
		for _, l := range some {
			arrived = append(arrived, !missing[l.to])
		}
	}
	return arrived, nil
}

// sendSome returns to which queues there was no way.
func (p *probeChannel) sendSome(ctx context.Context, messages []message) (missing map[string]bool, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, requestTimeout, ErrUnconfirmed)
	defer cancel()
	confirmations := make([]*amqp.DeferredConfirmation, len(messages))
	for i, l := range messages {
		confirmations[i], err = p.ch.PublishWithDeferredConfirm("", l.to, true, false, l.message)
		if err != nil {
			return nil, p.why(ctx, err)
		}
	}
	for i, confirmation := range confirmations {
		acked, err := confirmation.WaitContext(ctx)
		if err != nil {
			return nil, context.Cause(ctx)
		}
		if !acked {
			return nil, p.why(ctx, fmt.Errorf("the broker did not confirm a message to %s", messages[i].to))
		}
	}
	// What is returned comes before its confirmation, on the same goroutine.
	missing = map[string]bool{}
	for len(p.returned) > 0 {
		missing[(<-p.returned).RoutingKey] = true
	}
	return missing, nil
}

// why returns the broker's reason for closing the channel, if it has, else err.
func (p *probeChannel) why(ctx context.Context, err error) error {
	if !p.ch.IsClosed() {
		return err
	}
	select {
	case reason := <-p.closed: // it comes a little later than the end
		if reason != nil {
			return explain("probe", reason)
		}
	case <-ctx.Done():
	}
	return err
}

// A probeSession is an observer with a connection of its own, made when it is needed and
// again when it was lost. The connection publishes and holds nothing.
type probeSession struct {
	cfg  Config
	turn chan struct{} // holds a token while somebody uses it

	wire         *wire
	probeChannel *probeChannel
	closed       bool
}

func newProbeSession(cfg Config) *probeSession {
	return &probeSession{cfg: cfg, turn: make(chan struct{}, 1)}
}

// send implements observer, for any number of callers.
func (s *probeSession) send(ctx context.Context, messages []message) ([]bool, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, requestTimeout, ErrUnconfirmed)
	defer cancel()
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	if s.closed {
		return nil, lock.ErrLost
	}
	used := s.wire != nil
	for {
		arrived, err := s.try(ctx, messages)
		if err == nil {
			return arrived, nil
		}
		s.drop()
		if !used || ctx.Err() != nil {
			return nil, err
		}
		used = false // the connection may have been lost long ago
	}
}

func (s *probeSession) try(ctx context.Context, messages []message) ([]bool, error) {
	if s.wire == nil {
		w, err := dial(ctx, s.cfg, "probes")
		if err != nil {
			return nil, err
		}
		s.wire = w
	}
	// Whatever the library is doing, it does not outlast ctx.
	defer context.AfterFunc(ctx, s.wire.cut)()
	if s.probeChannel == nil {
		p, err := newProbeChannel(s.wire)
		if err != nil {
			return nil, err
		}
		s.probeChannel = p
	}
	return s.probeChannel.send(ctx, messages)
}

func (s *probeSession) drop() {
	if s.wire != nil {
		s.wire.cut()
	}
	s.wire, s.probeChannel = nil, nil
}

// close ends it for good. It waits for whoever uses it.
func (s *probeSession) close() {
	s.turn <- struct{}{}
	defer func() { <-s.turn }()
	s.drop()
	s.closed = true
}
