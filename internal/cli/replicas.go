package cli

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"onejob/store"
	"onejob/tasks"
)

func replicasCommand() *cobra.Command {
	c := &cobra.Command{Use: "replicas", Short: "List replicas"}
	c.AddCommand(replicasList())
	return c
}

func replicasList() *cobra.Command {
	c := &cobra.Command{
		Use:   "list",
		Short: "List the replicas that run, and those that ended in the last ten minutes",
		Long: `List the replicas that run, and those that ended in the last ten minutes, from
onejob.replicas. A replica that loses its session starts another one, which has a line
of its own. RUNNING is the number of attempts, and how many the replica runs at the
same time. States:

  working   claims tasks
  stopping  claims no more tasks, and finishes those that run
  stopped   has stopped gracefully
  lost      the session has ended; the process lives on with another one
  dead      the process has ended, or its heartbeat has stopped`,
		Args: cobra.NoArgs,
	}
	output := outputFlag(c)
	return withStore(c, func(c *cobra.Command, _ []string, db *store.Store) error {
		list, err := db.Replicas(c.Context())
		if err != nil {
			return err
		}
		views := make([]replicaView, len(list))
		for i, r := range list {
			views[i] = replicaView{r.Name, r.State, r.Host, r.PID, r.Version, r.Kinds, r.Queues, r.Concurrency, r.Running, r.HeartbeatAt, r.Session, r.Process}
		}
		return printRows(c, *output, views,
			short("NAME", func(r replicaView) any { return r.Name }),
			whole("STATE", func(r replicaView) any { return r.State }),
			whole("RUNNING", func(r replicaView) any { return fmt.Sprintf("%d/%d", r.Running, r.Concurrency) }),
			short("HOST", func(r replicaView) any { return r.Host }),
			whole("PID", func(r replicaView) any { return r.PID }),
			short("VERSION", func(r replicaView) any { return r.Version }),
			short("QUEUES", func(r replicaView) any { return cmp.Or(strings.Join(r.Queues, ","), "all") }),
			short("KINDS", func(r replicaView) any { return strings.Join(r.Kinds, ",") }),
			whole("LAST HEARTBEAT", func(r replicaView) any { return when(&r.HeartbeatAt) }))
	})
}

// replicaView is a replica as JSON.
type replicaView struct {
	Name        string             `json:"name"`
	State       tasks.ReplicaState `json:"state"`
	Host        string             `json:"host"`
	PID         int                `json:"pid"`
	Version     string             `json:"version"`
	Kinds       []string           `json:"kinds"`
	Queues      []string           `json:"queues"`
	Concurrency int                `json:"concurrency"`
	Running     int                `json:"running"`
	HeartbeatAt time.Time          `json:"heartbeat_at"`
	Session     string             `json:"session"`
	Process     string             `json:"process"`
}
