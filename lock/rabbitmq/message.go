package rabbitmq

import (
	"context"
	"encoding/json"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"
)

// Letters are messages to the holder of a slot, sent to its B queue. RabbitMQ
// does not tell whose an exclusive queue is, nor take it away from its owner; but
// everybody who knows its name may write to it, and a holder of ours reads. Those of
// other makes let the letters expire.
const (
	letterWho   = "onejob.who"   // tell the queue in ReplyTo who you are
	letterLeave = "onejob.leave" // your slot is revoked
)

// answerTimeout is how long to wait for the holders' answers.
const answerTimeout = time.Second

// introduction is how a holder answers.
type introduction struct {
	Queue string    `json:"queue"` // its B
	Value []byte    `json:"value"`
	Since time.Time `json:"since"`
}

// answer introduces the holder. It is a courtesy, so it has no errors.
func (s *slot) answer(to string) {
	if s.state.Load() == stateTaking {
		return
	}
	text, err := json.Marshal(introduction{s.queue, s.value, s.since})
	if err != nil {
		panic(err) // bytes and a time
	}
	ctx, cancel := context.WithTimeout(s.t.ctx, answerTimeout)
	defer cancel()
	_, _ = s.t.s.scout.send(ctx, []letter{{to: to, message: amqp.Publishing{Body: text}}})
}

// ask asks the holders of B queues who they are. Some may not answer.
func ask(ctx context.Context, w *wire, p *prober, mailbox string, queues []string) (map[string]introduction, error) {
	answers := map[string]introduction{}
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	ch, err := w.conn.Channel()
	if err != nil {
		return nil, err
	}
	mailbox += uuid.NewString()
	// Answers wait here, so it keeps messages, other than all queues else.
	if _, err := ch.QueueDeclare(mailbox, false, false, true, false, amqp.Table{"x-queue-type": "classic"}); err != nil {
		return nil, explain("declare queue "+mailbox, err)
	}
	mail, err := ch.ConsumeWithContext(ctx, mailbox, "", true, true, false, false, nil)
	if err != nil {
		return nil, explain("read queue "+mailbox, err)
	}
	var letters []letter
	for _, queue := range queues {
		letters = append(letters, letter{to: queue, message: amqp.Publishing{Type: letterWho, ReplyTo: mailbox, Expiration: "0"}})
	}
	delivered, err := p.send(ctx, letters)
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
			var a introduction
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
