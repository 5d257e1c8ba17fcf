package rabbitmq

import (
	"context"
	"encoding/json"
	"strconv"
	"sync"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"onejob/lock/internal/hold"
)

// Letters are messages to the holder of a slot, sent to its B queue. RabbitMQ
// does not tell whose an exclusive queue is, nor take it away from its owner; but
// everybody who knows its name may write to it, and a holder of ours reads. Those of
// other makes let the letters expire.
const (
	messageWho   = "onejob.who"   // tell the queue in ReplyTo who you are
	messageLeave = "onejob.leave" // your slot is revoked
)

// answerTimeout is how long to wait for the holders' answers, once the letters are with the broker.
const answerTimeout = time.Second

// holderReply is how a holder answers.
type holderReply struct {
	Queue string    `json:"queue"` // its B
	Value []byte    `json:"value"`
	Since time.Time `json:"since"`
}

// answer introduces the holder. It is a courtesy, so it has no errors.
func (s *slot) answer(to string) {
	if s.State() == hold.Acquiring {
		return
	}
	text, err := json.Marshal(holderReply{s.queue, s.value, s.since})
	if err != nil {
		panic(err) // bytes and a time
	}
	ctx, cancel := context.WithTimeout(s.t.Context(), answerTimeout)
	defer cancel()
	_, _ = s.t.s.probeSession.send(ctx, []message{{to: to, message: amqp.Publishing{Body: text}}})
}

// ask asks the holders of B queues who they are. Some may not answer. How long the broker takes for
// everything else counts for nothing, as the way to it may be slow.
func ask(ctx context.Context, w *wire, p *probeChannel, replyQueue string, queues []string) (map[string]holderReply, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // or the consumer goes on
	replyQueue += uuid.NewString()
	var mail <-chan amqp.Delivery
	err := w.bound(requestTimeout, func() error {
		ch, err := w.conn.Channel()
		if err != nil {
			return err
		}
		// Answers wait here, so it keeps messages, other than all queues else.
		if _, err := ch.QueueDeclare(replyQueue, false, false, true, false, amqp.Table{"x-queue-type": "classic"}); err != nil {
			return err
		}
		mail, err = ch.ConsumeWithContext(ctx, replyQueue, "", true, true, false, false, nil)
		return err
	})
	if err != nil {
		return nil, explain("declare and read queue "+replyQueue, err)
	}
	var messages []message
	for _, queue := range queues {
		messages = append(messages, message{to: queue, message: amqp.Publishing{Type: messageWho, ReplyTo: replyQueue, Expiration: "0"}})
	}
	delivered, err := p.send(ctx, messages)
	if err != nil {
		return nil, err
	}
	expected := 0
	for _, ok := range delivered {
		if ok {
			expected++
		}
	}
	answers, late := map[string]holderReply{}, time.After(answerTimeout)
	for len(answers) < expected {
		select {
		case message, ok := <-mail:
			var a holderReply
			if !ok {
				return answers, context.Cause(ctx)
			}
			if json.Unmarshal(message.Body, &a) == nil {
				answers[a.Queue] = a
			}
		case <-late:
			return answers, nil
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	return answers, nil
}

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
// is an error, or the broker has not answered when ctx ends or after requestTimeout; the next look
// will meet it. Nor if the session listens to as many as it may: then it
// takes looks to notice a slot that comes free.
func (t *session) listen(ctx context.Context, wakeup string) (rung <-chan amqp.Delivery, stop func()) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	b, _ := await(ctx, t, func() bell { return t.hang(wakeup) }, bell.takeDown)
	return b.rung, sync.OnceFunc(b.takeDown)
}

// listener is the consumer on a bell's channel.
const listener = "listener"

// A bell is a channel on which one hears a bell. The zero value hears nothing.
type bell struct {
	t      *session
	wakeup string
	ch     *amqp.Channel
	rung   <-chan amqp.Delivery
}

// hang makes a bell ready to be heard.
func (t *session) hang(wakeup string) bell {
	if int(t.bells.Add(1)) > t.mostBells {
		t.bells.Add(-1)
		return bell{}
	}
	ch, err := t.wire.conn.Channel()
	if err != nil {
		t.bells.Add(-1)
		return bell{}
	}
	b := bell{t: t, wakeup: wakeup, ch: ch}
	if _, err := ch.QueueDeclare(wakeup, true, true, false, false, wakeupArguments); err != nil {
		return b
	}
	if rung, err := ch.Consume(wakeup, listener, true, false, false, false, nil); err == nil {
		b.rung = rung
	}
	return b
}

// takeDown ends listening. What came just before is for others: the end of the consumer leaves that
// to be read, the end of a channel does not.
func (b bell) takeDown() {
	if b.ch == nil {
		return
	}
	b.t.later(func() {
		if b.rung != nil && b.ch.Cancel(listener, false) == nil {
			for message := range b.rung {
				b.t.s.probeSession.ring(b.wakeup, slotOf(message))
			}
		}
		_ = b.ch.Close()
		b.t.bells.Add(-1)
	})
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
