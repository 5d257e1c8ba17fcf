package rabbitmq

import (
	"slices"
	"strconv"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// names makes the names of one semaphore's queues. A semaphore's name has no
// slash in it, so no two queues of any semaphores can be called the same.
type names struct{ base string }

func (c Config) names(semaphore string) names { return names{c.Prefix + "/" + semaphore + "/"} }

func (n names) a(slot int) string      { return n.base + strconv.Itoa(slot) + "-A" }
func (n names) b(slot int) string      { return n.base + strconv.Itoa(slot) + "-B" }
func (n names) d(slot int) string      { return n.base + strconv.Itoa(slot) + "-D" }
func (n names) mutex() string          { return n.base + "admin" }
func (n names) wakeup() string         { return n.base + "bell" }
func (n names) reach(slots int) string { return n.base + "reach-" + strconv.Itoa(slots) }

// as and bs return the names of the A and B queues from..to, both included, and
// ds those of the delay queues of some slots.
func (n names) as(from, to int) []string { return span(n.a, from, to) }
func (n names) bs(from, to int) []string { return span(n.b, from, to) }

func (n names) ds(slots []int) []string { return each(n.d, slots) }

// reaches returns the names of all that a reach may be.
func (n names) reaches() []string { return each(n.reach, reaches) }

func each(name func(int) string, numbers []int) []string {
	list := make([]string, len(numbers))
	for i, number := range numbers {
		list[i] = name(number)
	}
	return list
}

func span(name func(int) string, from, to int) []string {
	var list []string
	for slot := from; slot <= to; slot++ {
		list = append(list, name(slot))
	}
	return list
}

// reaches are the numbers that a reach may be: zero and the powers of two, up to
// the first that is not below lock.MaxSlots.
var reaches = []int{0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}

// reachFor returns the lowest reach that covers so many slots.
func reachFor(slots int) int {
	i, _ := slices.BinarySearch(reaches, slots)
	return reaches[min(i, len(reaches)-1)]
}

// arguments are those of every queue. The type is spelled out, as a virtual host
// may have another default, and quorum queues cannot be exclusive. Nothing that
// anybody sends to the queue stays in it.
var arguments = amqp.Table{"x-queue-type": "classic", "x-max-length": 0}

// declareDurable declares a queue that outlives everybody.
func declareDurable(ch *amqp.Channel, name string) error {
	_, err := ch.QueueDeclare(name, true, false, false, false, arguments)
	return err
}

// delayArguments are those of a slot's delay queue: it stays for so long after its
// consumer is gone. It is classic as well: a quorum queue would survive the loss of
// a node, but B does not, and each slot that is taken would found a Raft group.
func delayArguments(delay time.Duration) amqp.Table {
	return amqp.Table{"x-queue-type": "classic", "x-max-length": 0, "x-expires": delay.Milliseconds()}
}

// declareOwn declares a queue that belongs to the channel's connection and goes
// with it. If the connection has it already that is no error.
func declareOwn(ch *amqp.Channel, name string) error {
	_, err := ch.QueueDeclare(name, false, false, true, false, arguments)
	return err
}
