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

// Messages to the holder of a slot are sent to its B queue. RabbitMQ does not tell
// whose an exclusive queue is, nor take it away from its owner; but everybody who knows
// its name may write to it, and onejob's holders read. Other clients let the messages
// expire.
const (
	messageWho   = "onejob.who"   // tell the queue in ReplyTo who you are
	messageLeave = "onejob.leave" // your slot is revoked
)

// answerTimeout is how long to wait for the holders' answers, once the messages are with the broker.
const answerTimeout = time.Second

// holderReply is how a holder answers.
type holderReply struct {
	Queue string    `json:"queue"` // its B
	Value []byte    `json:"value"`
	Since time.Time `json:"since"`
}

// answer introduces the holder. Best effort: errors are ignored.
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

// The wake-up queue of a semaphore is there while somebody waits for a slot. A holder
// that releases a slot publishes its number there, and one of the waiting processes
// receives it. Nothing relies on it: a holder that dies publishes nothing, and the
// receiver may be about to stop waiting. So waiters also look now and then; see lookout.
//
// The queue is deleted with its last consumer, or expires if it never had one.

// wakeupArguments are those of a wake-up queue. It keeps nothing either.
var wakeupArguments = amqp.Table{"x-queue-type": "classic", "x-max-length": 0, "x-expires": int(time.Minute / time.Millisecond)}

// listen returns the wake-ups that come until stop. There are none if there
// is an error, or the broker has not answered when ctx ends or after requestTimeout; the next look
// will meet it. Nor if the session listens to as many queues as it may: then it
// takes looks to notice a slot that comes free.
func (t *session) listen(ctx context.Context, wakeup string) (wakeups <-chan amqp.Delivery, stop func()) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	c, _ := await(ctx, t, func() wakeupConsumer { return t.consume(wakeup) }, wakeupConsumer.cancel)
	return c.wakeups, sync.OnceFunc(c.cancel)
}

// listener is the consumer on the channel of a wake-up queue.
const listener = "listener"

// A wakeupConsumer is a channel on which wake-ups come. None come to the zero value.
type wakeupConsumer struct {
	t       *session
	wakeup  string
	ch      *amqp.Channel
	wakeups <-chan amqp.Delivery
}

// consume declares a wake-up queue, and consumes from it.
func (t *session) consume(wakeup string) wakeupConsumer {
	if int(t.consumers.Add(1)) > t.mostConsumers {
		t.consumers.Add(-1)
		return wakeupConsumer{}
	}
	ch, err := t.wire.conn.Channel()
	if err != nil {
		t.consumers.Add(-1)
		return wakeupConsumer{}
	}
	c := wakeupConsumer{t: t, wakeup: wakeup, ch: ch}
	if _, err := ch.QueueDeclare(wakeup, true, true, false, false, wakeupArguments); err != nil {
		return c
	}
	if wakeups, err := ch.Consume(wakeup, listener, true, false, false, false, nil); err == nil {
		c.wakeups = wakeups
	}
	return c
}

// cancel ends listening. What came just before is for others: the end of the consumer leaves that
// to be read, the end of a channel does not.
func (c wakeupConsumer) cancel() {
	if c.ch == nil {
		return
	}
	c.t.later(func() {
		if c.wakeups != nil && c.ch.Cancel(listener, false) == nil {
			for message := range c.wakeups {
				c.t.s.probeSession.notify(c.wakeup, slotOf(message))
			}
		}
		_ = c.ch.Close()
		c.t.consumers.Add(-1)
	})
}

// notifications are the messages to a wake-up queue for slots from..to, both included.
func notifications(wakeup string, from, to int) []message {
	var messages []message
	for slot := from; slot <= to; slot++ {
		messages = append(messages, message{to: wakeup, message: amqp.Publishing{Expiration: "0", Body: []byte(strconv.Itoa(slot))}})
	}
	return messages
}

// slotOf returns the slot that a wake-up names, or 0 if it names none.
func slotOf(message amqp.Delivery) int {
	slot, _ := strconv.Atoi(string(message.Body))
	return slot
}

// notify sends one message to a wake-up queue, without waiting for the broker. It reports
// whether it could.
func (s *probeSession) notify(wakeup string, slot int) bool {
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
	_, err := s.probeChannel.ch.PublishWithDeferredConfirm("", wakeup, false, false, notifications(wakeup, slot, slot)[0].message)
	return err == nil
}
