package rabbitmq

import (
	"context"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// The bell of a semaphore is a queue that is there while somebody waits for a
// slot. Who gives a slot back rings it, and one of those who wait hears it: not
// all of them. It is a courtesy and never relied on, for a holder who dies rings
// no bell, and who hears it may be about to leave. So those who wait look now and
// then besides.
//
// The queue goes with the last who listens, and one that nobody ever listened to
// after a while.

// bellArguments are those of a bell. It keeps nothing either.
var bellArguments = amqp.Table{"x-queue-type": "classic", "x-max-length": 0, "x-expires": int(time.Minute / time.Millisecond)}

// listen returns where one hears the bell until stop. It hears nothing if there
// is an error; the next look will meet it.
func (t *term) listen(bell string) (rung <-chan amqp.Delivery, stop func()) {
	ch, err := t.wire.conn.Channel()
	if err != nil {
		return nil, func() {}
	}
	stop = func() { _ = ch.Close() }
	if _, err := ch.QueueDeclare(bell, true, true, false, false, bellArguments); err != nil {
		return nil, stop
	}
	rung, err = ch.Consume(bell, "", true, false, false, false, nil)
	if err != nil {
		return nil, stop
	}
	return rung, stop
}

// rings are letters that ring a bell so many times.
func rings(bell string, times int) []letter {
	letters := make([]letter, times)
	for i := range letters {
		letters[i] = letter{to: bell, message: amqp.Publishing{Expiration: "0"}}
	}
	return letters
}

// ring rings a bell once, without waiting for the broker.
func (s *scout) ring(bell string) {
	ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
	defer cancel()
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	case <-ctx.Done():
		return
	}
	if s.prober == nil {
		return
	}
	defer context.AfterFunc(ctx, s.wire.cut)()
	_, _ = s.prober.ch.PublishWithDeferredConfirm("", bell, false, false, rings(bell, 1)[0].message)
}
