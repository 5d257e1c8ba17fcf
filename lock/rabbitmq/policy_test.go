package rabbitmq

import (
	"net/http"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"

	"onejob/internal/testenv"
)

// A policy for all queues that has a dead-letter exchange collects what looks leave behind, until the
// policy that docs/operate/rabbitmq.md recommends has precedence. With that, holders answer as before.
func TestPolicyForAllQueues(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	policy := func(name, pattern string, priority int, definition map[string]any) {
		t.Helper()
		err := v.Server.Manage(t.Context(), http.MethodPut, "/policies/"+v.Name+"/"+name,
			map[string]any{"pattern": pattern, "priority": priority, "definition": definition, "apply-to": "queues"}, nil)
		if err != nil {
			t.Fatal(err)
		}
	}
	conn, err := amqp.Dial(v.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ch.QueueDeclare("dead", false, false, true, false, nil); err != nil {
		t.Fatal(err)
	}
	if err := ch.QueueBind("dead", "", "amq.fanout", false, nil); err != nil {
		t.Fatal(err)
	}
	collected := func() int {
		t.Helper()
		n, err := ch.QueuePurge("dead", false)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	s := start(t, config(t, v))
	if err := s.Create(t.Context(), "l", 2); err != nil {
		t.Fatal(err)
	}
	use := func() {
		t.Helper()
		held := takeSoon(t, s, "l")
		if sem, err := s.Inspect(t.Context(), "l"); err != nil || len(sem.Holders) != 1 || sem.Holders[0].Since.IsZero() {
			t.Errorf("%+v, %v", sem, err)
		}
		if err := held.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}

	policy("all", ".*", 0, map[string]any{"dead-letter-exchange": "amq.fanout"})
	testenv.Eventually(t, maxWait, "the policy collects something", func() bool { use(); return collected() > 0 })
	policy("onejob", "^onejob/", 100, map[string]any{"max-length": 1000000})
	testenv.Eventually(t, maxWait, "nothing more is collected", func() bool { collected(); use(); return collected() == 0 })
	for range 5 {
		use()
	}
	if n := collected(); n > 0 {
		t.Errorf("%d messages were collected", n)
	}
}
