package rabbitmq

import (
	"context"
	"strconv"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// The bell of a semaphore is a queue that is there while somebody waits for a
// slot. Who gives a slot back rings it and says which, and one of the processes that
// wait hears it, not all of them. It is a courtesy and never relied on, for a holder
// who dies rings no bell, and who hears it may be about to leave. So those who wait
// look now and then besides; see lookout.
//
// The queue goes with the last who listens, and one that nobody ever listened to
// after a while.

// wakeupArguments are those of a bell. It keeps nothing either.
var wakeupArguments = amqp.Table{"x-queue-type": "classic", "x-max-length": 0, "x-expires": int(time.Minute / time.Millisecond)}

// listen returns where one hears the bell until stop. It hears nothing if there
// is an error; the next look will meet it.
func (t *session) listen(wakeup string) (rung <-chan amqp.Delivery, stop func()) {
	ch, err := t.wire.conn.Channel()
	if err != nil {
		return nil, func() {}
	}
	stop = func() { _ = ch.Close() }
	if _, err := ch.QueueDeclare(wakeup, true, true, false, false, wakeupArguments); err != nil {
		return nil, stop
	}
	rung, err = ch.Consume(wakeup, "", true, false, false, false, nil)
	if err != nil {
		return nil, stop
	}
	return rung, stop
}

// rings are letters that ring a bell for slots from..to, both included.
func rings(wakeup string, from, to int) []message {
	var messages []message
	for slot := from; slot <= to; slot++ {
		messages = append(messages, message{to: wakeup, message: amqp.Publishing{Expiration: "0", Body: []byte(strconv.Itoa(slot))}})
	}
	return messages
}

// slotOf returns the slot for which a bell was rung, or 0 if it does not say.
func slotOf(message amqp.Delivery) int {
	slot, _ := strconv.Atoi(string(message.Body))
	return slot
}

// ring rings a bell once, without waiting for the broker. It reports whether it
// could.
func (s *probeSession) ring(wakeup string, slot int) bool {
	ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
	defer cancel()
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	case <-ctx.Done():
		return false
	}
	if s.probeChannel == nil {
		return false
	}
	defer context.AfterFunc(ctx, s.wire.cut)()
	_, err := s.probeChannel.ch.PublishWithDeferredConfirm("", wakeup, false, false, rings(wakeup, slot, slot)[0].message)
	return err == nil
}
