package rabbitmq

import (
	"os"
	"os/exec"
	"testing"
	"time"

	"onejob/internal/servers"
	"onejob/internal/testenv"
)

// TestPartitionedBrokers: nodes of a cluster lose one another for 20 s, with a holder's
// connection at the one that is alone. Nobody enters beside its command, during the
// partition and after. It is no promise of RabbitMQ's; see docs/decisions/rabbitmq.md.
// "make partition-test" runs it.
func TestPartitionedBrokers(t *testing.T) {
	if os.Getenv("TEST_PARTITIONS") == "" {
		t.Skip("it takes minutes: TEST_PARTITIONS=1 runs it")
	}
	t.Parallel()
	for _, test := range []struct {
		handling string
		nodes    int
	}{
		{"ignore", 2},
		{"autoheal", 2},
		{"pause_minority", 3},
	} {
		t.Run(test.handling, func(t *testing.T) {
			t.Parallel()
			first, v := testenv.OwnRabbitMQ(t, servers.RabbitMQConfig{Extra: "cluster_partition_handling = " + test.handling})
			nodes := []*servers.RabbitMQ{first}
			for len(nodes) < test.nodes {
				nodes = append(nodes, testenv.JoinRabbitMQ(t, first))
			}
			alone := nodes[1]
			others := append([]*servers.RabbitMQ{first}, nodes[2:]...)

			c := newTally(t)
			admin := create(t, config(t, v)) // the slot's queue is on the first node
			if err := admin.Create(t.Context(), "k", 1); err != nil {
				t.Fatal(err)
			}
			enter := func(node *servers.RabbitMQ) {
				h := exec.Command(os.Args[0])
				h.Env = append(os.Environ(), holderEnv+"="+node.URL(v.Name), leaseEnv+"=5s", stubbornEnv+"="+c.listener.Addr().String())
				h.Stderr = os.Stderr
				if err := h.Start(); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = h.Process.Kill(); _ = h.Wait() })
			}
			enter(alone)
			testenv.Eventually(t, maxWait, "the holder is inside", func() bool { _, entries, _ := c.counts(); return entries == 1 })
			for _, node := range nodes {
				enter(node)
			}
			if err := alone.Part(t.Context(), others...); err != nil {
				t.Fatal(err)
			}
			time.Sleep(20 * time.Second) // the partition's length
			living, entries, most := c.counts()
			t.Logf("during the partition: %d commands, %d entries, at most %d at once", living, entries, most)
			if err := alone.Meet(t.Context(), others...); err != nil {
				t.Log("meet again: ", err) // a node that has paused does it by itself
			}
			time.Sleep(20 * time.Second) // nobody is to enter beside another one
			living, entries, most = c.counts()
			t.Logf("in the end: %d commands, %d entries, at most %d at once", living, entries, most)
			if most != 1 {
				t.Errorf("%d ran at once under a limit of 1", most)
			}
		})
	}
}
