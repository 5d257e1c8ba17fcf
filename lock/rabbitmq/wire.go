package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"onejob/internal/retry"
)

const (
	// dialTimeout bounds the making of a connection.
	dialTimeout = 10 * time.Second

	// shutdownTimeout bounds the orderly end of one.
	shutdownTimeout = 2 * time.Second
)

// A wire is one connection to the broker, and the socket below it: only closing
// that ends a request which the broker does not answer.
type wire struct {
	conn   *amqp.Connection
	socket net.Conn
	closed chan *amqp.Error // why the connection ended; nil if we closed it
}

// dial connects. The role is added to the name that management shows.
func dial(ctx context.Context, cfg Config, role string) (*wire, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, dialTimeout, fmt.Errorf("the broker did not answer within %v: %w", dialTimeout, os.ErrDeadlineExceeded))
	defer cancel()
	w := &wire{closed: make(chan *amqp.Error, 1)}
	properties := amqp.NewConnectionProperties()
	properties.SetClientConnectionName(cfg.Name + " " + role)
	var stop func() bool
	conn, err := amqp.DialConfig(cfg.URL, amqp.Config{
		Heartbeat:       cfg.Heartbeat,
		TLSClientConfig: cfg.TLS,
		Properties:      properties,
		// Recovery stays nil: see the package's comment.
		Dial: func(network, address string) (net.Conn, error) {
			var err error
			w.socket, err = new(net.Dialer).DialContext(ctx, network, address)
			if err == nil {
				stop = context.AfterFunc(ctx, func() { w.socket.Close() })
			}
			return w.socket, err
		},
	})
	if stop != nil && !stop() && err == nil {
		conn.Close()
		err = context.Cause(ctx)
	}
	if err != nil {
		if w.socket != nil {
			w.socket.Close()
		}
		reply, guess := errors.AsType[*amqp.Error](err) // of the library, at why a connection ended that we have cut
		guess = guess && !reply.Server
		switch {
		case ctx.Err() != nil && guess:
			err = context.Cause(ctx)
		case ctx.Err() != nil:
			err = fmt.Errorf("%w: %w", context.Cause(ctx), err)
		case is(err, amqp.FrameError):
			err = fmt.Errorf("%w: if TLS is spoken at that port, the URL must begin with amqps://", err)
		}
		return nil, explain("connect to RabbitMQ", err)
	}
	w.conn = conn
	conn.NotifyClose(w.closed)
	return w, nil
}

// close ends the connection in good order if the broker answers. When it returns
// the broker has deleted the connection's exclusive queues, if it answered.
//
// The deadline is not enough. Beside an alarm the broker does not read what is sent to it, and
// sends heartbeats, each of which makes the client forget the deadline.
func (w *wire) close() {
	defer time.AfterFunc(shutdownTimeout, w.cut).Stop()
	_ = w.conn.CloseDeadline(time.Now().Add(shutdownTimeout))
	w.cut()
}

// cut ends the connection without asking.
func (w *wire) cut() { w.socket.Close() }

// ErrUnanswered says that a request was given up. Heartbeats come from another part of the broker than
// answers, and go on while that part, or the queue that the request is about, is stuck.
var ErrUnanswered = errors.New("the broker sends heartbeats, and does not answer a request")

// bound returns what request returns, which waits for the broker's answers without a context. It cuts
// the connection if they do not come in time.
func (w *wire) bound(limit time.Duration, request func() error) error {
	late := time.AfterFunc(limit, w.cut)
	err := request()
	if !late.Stop() && err != nil {
		return fmt.Errorf("%w: %w", unanswered(limit), err)
	}
	return err
}

// unanswered is the error about a request that was given up.
func unanswered(limit time.Duration) error { return fmt.Errorf("%w within %v", ErrUnanswered, limit) }

// A line is a channel on a wire, for one request at a time, that is opened anew
// after a request has failed, as that has closed it.
type line struct {
	wire  *wire
	limit time.Duration // of a request; one that takes longer ends the wire
	mu    sync.Mutex
	ch    *amqp.Channel
}

func (l *line) do(request func(*amqp.Channel) error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	err := l.wire.bound(l.limit, func() (err error) {
		if l.ch == nil {
			if l.ch, err = l.wire.conn.Channel(); err != nil {
				return err
			}
		}
		return request(l.ch)
	})
	if err != nil && l.ch != nil {
		_ = l.ch.Close()
		l.ch = nil
	}
	return err
}

// own declares a queue that belongs to the connection.
func (l *line) own(queue string) error {
	return l.do(func(ch *amqp.Channel) error { return declareOwn(ch, queue) })
}

// delete deletes a queue and waits for the broker to say so. It is no error if
// the queue is gone already.
func (l *line) delete(queue string, ifUnused bool) error {
	return l.do(func(ch *amqp.Channel) error {
		_, err := ch.QueueDelete(queue, ifUnused, false, false)
		return err
	})
}

// shared reports whether there is a queue of that name that is not exclusive.
func (l *line) shared(queue string) bool {
	return l.do(func(ch *amqp.Channel) error {
		_, err := ch.QueueDeclarePassive(queue, false, false, false, false, nil)
		return err
	}) == nil
}

// tooMany reports whether the broker refused a queue because there are too many, with
// the code that it also has for a queue of another kind.
func tooMany(err error) bool {
	return is(err, amqp.PreconditionFailed) && strings.Contains(err.Error(), "queue limit")
}

// is reports whether the broker refused a request with one of these codes.
func is(err error, codes ...int) bool {
	refusal, ok := errors.AsType[*amqp.Error](err)
	return ok && slices.Contains(codes, refusal.Code)
}

// tooManyChannels reports whether a connection was closed because its user, or the node, may have no
// more channels. Unlike the limit of a connection, which both sides know, that does not refuse the
// channel alone.
func tooManyChannels(err error) bool {
	return is(err, amqp.NotAllowed) && strings.Contains(err.Error(), "number of channels opened")
}

// Unavailable reports whether an error of this package says that the broker, a node of its cluster or
// the way to it is unavailable, so that the same request may succeed later. A missing right and a limit
// of the broker that is reached are no such errors.
func Unavailable(err error) bool {
	switch {
	case errors.Is(err, ErrUnconfirmed), errors.Is(err, ErrUnanswered), nodeDown(err):
		return true
	case errors.Is(err, amqp.ErrChannelMax): // which is a ChannelError, too
		return false
	case errors.As(err, new(*amqp.Error)): // a FrameError is what the library makes of a connection that broke off
		return is(err, amqp.ConnectionForced, amqp.FrameError, amqp.ChannelError, amqp.InternalError)
	}
	return retry.Network(err)
}

// explain says what was attempted, and, for mistakes that an operator can fix, what to
// look at.
func explain(what string, err error) error {
	switch {
	case err == nil:
		return nil
	case tooManyChannels(err):
		return fmt.Errorf("%s: %w: raise max-channels of the user, or channel_max_per_node in rabbitmq.conf; until it is restarted this process takes fewer slots at once", what, err)
	case is(err, amqp.NotAllowed) && strings.Contains(err.Error(), "connection limit"):
		return fmt.Errorf("%s: %w: raise max-connections of the user or of the virtual host; each process has two connections, and three while it changes limits", what, err)
	case errors.Is(err, amqp.ErrVhost) || is(err, amqp.NotAllowed):
		return fmt.Errorf("%s: %w: does the virtual host exist, and may the user enter it?", what, err)
	case errors.Is(err, amqp.ErrCredentials):
		return fmt.Errorf("%s: %w: look at the user and the password in the URL", what, err)
	case is(err, amqp.AccessRefused):
		return fmt.Errorf("%s: %w: the user must be allowed to configure and to read queues below the prefix, and to write to amq.default", what, err)
	case errors.Is(err, amqp.ErrChannelMax):
		return fmt.Errorf("%s: %w: raise channel_max in rabbitmq.conf, or run more replicas", what, err)
	case tooMany(err):
		return fmt.Errorf("%s: %w: each slot that is held has two queues: raise max-queues of the virtual host", what, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}
