package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"onejob/internal/plaintext"
	"onejob/lock"
	"onejob/lock/consul"
	"onejob/store"
)

func tasksExplain() *cobra.Command {
	c := &cobra.Command{
		Use:   "explain ID",
		Short: "Explain why a task waits, where it runs, or what became of it",
		Long: `Explain why a task waits, where it runs, or what became of it. The first sentence is that
of onejob.why(ID) in SQL. For a task that waits, the next ones say what only Consul (or
RabbitMQ) knows: who holds its lock key, unless something else keeps the task waiting, and the
slots of its limit.

Exit codes: 0 the task was explained, also if Consul does not answer; 1 there is no such
task, or Postgres is unavailable; 2 usage or configuration error.`,
		Example: `  onejob tasks explain 17
  onejob tasks explain 17 -o json | jq -r .why`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeNames(taskIDs("")),
	}
	path, output := configFlag(c), outputFlag(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		id, err := taskID(args[0])
		if err != nil {
			return err
		}
		cfg, db, locks, err := both(*path)
		if err != nil {
			return err
		}
		defer db.Close()
		e := explanation{TaskID: id}
		if e.Why, err = db.Why(c.Context(), id); err != nil {
			return err
		}
		e.Why = strings.TrimSuffix(e.Why, fmt.Sprintf(" onejob tasks explain %d asks Consul.", id)) // it does so now
		row, err := db.Row(c.Context(), id)
		if err != nil {
			return err
		}
		e.Status = row.Status
		// A row is running, too, while its replica finds that something else has the lock key.
		if row.Status == "pending" || row.Status == "running" && row.LockKey != nil {
			e.Lock = lockOf(c.Context(), locks, row)
		}
		if row.Status == "pending" {
			e.Limit = limitOf(c.Context(), &cfg, locks, row)
		}
		if *output == formatJSON {
			return printJSON(c.OutOrStdout(), e)
		}
		return e.print(c.OutOrStdout())
	}
	return c
}

// explanation is what there is to say of a task.
type explanation struct {
	TaskID int64        `json:"task_id"`
	Status string       `json:"status"`
	Why    string       `json:"why"`
	Lock   *lockHolder  `json:"lock"`  // nil if there is nothing to ask
	Limit  *limitAnswer `json:"limit"` // nil unless the task waits and has a limit
}

// lockHolder is what Consul says of a lock key.
type lockHolder struct {
	Key     string `json:"key"`
	Session string `json:"session"` // empty: nobody holds it
	Holder  string `json:"holder"`
	Node    string `json:"node"`
	Error   string `json:"error"` // Consul does not answer
}

// limitAnswer is what the limits' backend says of a limit.
type limitAnswer struct {
	Name       string   `json:"name"`
	Configured bool     `json:"configured"` // by limits.kinds, not by the task
	Exists     bool     `json:"exists"`
	Slots      int      `json:"slots"`
	Held       int      `json:"held"`
	Holders    []string `json:"holders"` // some
	Error      string   `json:"error"`
}

func lockOf(ctx context.Context, locks *consul.Locker, row store.Row) *lockHolder {
	h := &lockHolder{Key: strconv.FormatInt(row.ID, 10)}
	var session string
	var value []byte
	var err error
	if row.LockKey == nil {
		session, value, err = locks.TaskHolder(ctx, row.ID)
	} else {
		h.Key = *row.LockKey
		session, value, err = locks.Holder(ctx, h.Key)
	}
	if err != nil {
		h.Error = err.Error()
		return h
	}
	if session == "" {
		return h
	}
	h.Session, h.Holder = session, holderOf(value)
	h.Node, _ = locks.Node(ctx, session) // without it, the session is still known
	return h
}

// shownHolders is how many holders of a limit are named.
const shownHolders = 5

func limitOf(ctx context.Context, cfg *Config, locks *consul.Locker, row store.Row) *limitAnswer {
	a := &limitAnswer{Name: cfg.Limits.Kinds[row.Kind], Configured: true}
	if row.LimitName != nil {
		a.Name, a.Configured = *row.LimitName, false
	}
	if a.Name == "" {
		return nil
	}
	limits, _, err := cfg.limits(locks, zap.NewNop())
	if err != nil {
		a.Error = err.Error()
		return a
	}
	s, err := limits.Inspect(ctx, a.Name)
	switch {
	case errors.Is(err, lock.ErrNoSemaphore):
		return a
	case err != nil:
		a.Error = err.Error()
		return a
	}
	a.Exists, a.Slots, a.Held = true, s.Slots, len(s.Holders)
	for _, h := range s.Holders[:min(len(s.Holders), shownHolders)] {
		a.Holders = append(a.Holders, holderOf(h.Value))
	}
	return a
}

func (e explanation) print(w io.Writer) error {
	printf(w, "%s\n", e.Why)
	if e.lockMatters() {
		printf(w, "%s\n", e.Lock.sentence())
	}
	if e.Limit != nil {
		printf(w, "%s\n", e.Limit.sentence())
	}
	return nil
}

// lockMatters says whether the holder of the lock key adds to why the task waits: if that is about
// the lock key, or names no reason. A task that was given back for another reason may also find its
// key held.
func (e explanation) lockMatters() bool {
	switch {
	case e.Lock == nil:
		return false
	case e.Status != "pending", strings.Contains(e.Why, "lock key"), strings.Contains(e.Why, " is in its way"):
		return true
	}
	return e.Lock.Session != "" && strings.Contains(e.Why, "given back")
}

func (h *lockHolder) sentence() string {
	switch {
	case h.Error != "":
		return "Consul does not say who holds its lock key: " + h.Error
	case h.Session == "":
		return "In Consul, nobody holds its lock key now. After the death of a holder, nobody gets it for the lock-delay (consul.lock_delay)."
	}
	node := ""
	if h.Node != "" {
		node = " of node " + h.Node
	}
	return fmt.Sprintf("In Consul, its lock key is held by %s (session %s%s).", h.Holder, h.Session, node)
}

func (a *limitAnswer) sentence() string {
	its := fmt.Sprintf("Its limit %s", a.Name)
	if a.Configured {
		its = fmt.Sprintf("The limit %s, which its kind has in this configuration (limits.kinds),", a.Name)
	}
	holders := slices.Clone(a.Holders)
	if a.Held > len(holders) {
		holders = append(holders, fmt.Sprintf("and %d more", a.Held-len(holders)))
	}
	switch {
	case a.Error != "":
		return its + " cannot be looked at: " + a.Error
	case !a.Exists:
		return fmt.Sprintf("%s does not exist: create it with onejob limits set %s SLOTS.", its, plaintext.Argument(a.Name))
	case a.Slots == 0:
		return fmt.Sprintf("%s has 0 slots, which pauses it: onejob limits set %s SLOTS.", its, plaintext.Argument(a.Name))
	case a.Held == 0:
		return fmt.Sprintf("%s has %s, none of which is taken.", its, plaintext.Plural(a.Slots, "slot"))
	}
	full := ""
	if a.Held >= a.Slots {
		full = "is full: it "
	}
	return fmt.Sprintf("%s %shas %s, and these are taken: %s.", its, full, plaintext.Plural(a.Slots, "slot"), strings.Join(holders, "; "))
}
