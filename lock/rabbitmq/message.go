package rabbitmq

import (
	"context"
	"encoding/json"
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

// answerTimeout is how long to wait for the holders' answers.
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

// ask asks the holders of B queues who they are. Some may not answer.
func ask(ctx context.Context, w *wire, p *probeChannel, replyQueue string, queues []string) (map[string]holderReply, error) {
	answers := map[string]holderReply{}
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	ch, err := w.conn.Channel()
	if err != nil {
		return nil, err
	}
	replyQueue += uuid.NewString()
	// Answers wait here, so it keeps messages, other than all queues else.
	if _, err := ch.QueueDeclare(replyQueue, false, false, true, false, amqp.Table{"x-queue-type": "classic"}); err != nil {
		return nil, explain("declare queue "+replyQueue, err)
	}
	mail, err := ch.ConsumeWithContext(ctx, replyQueue, "", true, true, false, false, nil)
	if err != nil {
		return nil, explain("read queue "+replyQueue, err)
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
	for len(answers) < expected {
		select {
		case message, ok := <-mail:
			var a holderReply
			if !ok {
				return answers, nil
			}
			if json.Unmarshal(message.Body, &a) == nil {
				answers[a.Queue] = a
			}
		case <-ctx.Done():
			return answers, nil
		}
	}
	return answers, nil
}
