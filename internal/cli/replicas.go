package cli

import (
	"strings"
	"time"

	"github.com/spf13/cobra"

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
		Short: "List the replicas that work, and those that ended within ten minutes",
		Long: `List the replicas that work, and those that ended within ten minutes, as
onejob.replicas has them. A replica that loses its session begins another, with a
line of its own. States:

  working   it takes tasks
  stopping  it takes no more, and finishes what it has
  stopped   it ended in order
  lost      the session ended, and the process lives on under another one
  dead      the process ended, or nothing was heard of it`,
		Args: cobra.NoArgs,
	}
	path, output := configFlag(c), outputFlag(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		asJSON, err := output()
		if err != nil {
			return err
		}
		db, err := openStore(*path)
		if err != nil {
			return err
		}
		defer db.Close()
		list, err := db.Replicas(c.Context())
		if err != nil {
			return err
		}
		if asJSON {
			views := make([]replicaView, len(list))
			for i, r := range list {
				views[i] = replicaView{r.Name, r.State, r.Host, r.PID, r.Version, r.Kinds, r.Queues, r.Concurrency, r.Running, r.HeartbeatAt, r.Session, r.Process}
			}
			return printJSON(c.OutOrStdout(), views)
		}
		t := newTable(c.OutOrStdout())
		t.row("NAME", "STATE", "RUNNING", "HOST", "PID", "VERSION", "QUEUES", "KINDS", "LAST HEARTBEAT")
		for _, r := range list {
			queues := "all"
			if len(r.Queues) > 0 {
				queues = strings.Join(r.Queues, ",")
			}
			t.row(firstLine(r.Name, 40), r.State, r.Running, firstLine(r.Host, 40), r.PID, firstLine(r.Version, 20), firstLine(queues, 40),
				firstLine(strings.Join(r.Kinds, ","), 40), when(&r.HeartbeatAt))
		}
		return t.flush()
	}
	return c
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
