package worker_test

import (
	"strings"
	"testing"

	"onejob/internal/testenv"
	"onejob/tasks"
	execkind "onejob/tasks/kinds/exec"
)

// Replicas say which commands they know, also after a reload, so that onejob.why can tell
// that none has the one that a task asks for.
func TestWhyNamesTheCommandThatNoReplicaHas(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	commands := func(names ...string) tasks.Kinds {
		all := map[string]execkind.Command{}
		for _, name := range names {
			all[name] = execkind.Command{Path: "/bin/true"}
		}
		kind, err := execkind.New(execkind.Config{Commands: all})
		if err != nil {
			t.Fatal(err)
		}
		return tasks.Kinds{"exec": kind, "noop": tasks.Noop{}}
	}
	r := c.replica(t, "one", commands("report"), nil)
	id := c.insert(t, "kind, payload", "exec", `{"command": "backup"}`)
	why := func() string { return get[string](t, c, "SELECT onejob.why($1)", id) }
	const missing = `because no live replica that serves its queue has its command, "backup", in its configuration`
	testenv.Eventually(t, maxWait, "why names the command", func() bool { return strings.Contains(why(), missing) })
	if err := r.Reload(commands("report", "backup"), nil, nil); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, maxWait, "the row has the new command", func() bool {
		return get[bool](t, c, `SELECT names -> 'exec' -> 'command' ? 'backup' FROM onejob.replicas`)
	})
	if text := why(); strings.Contains(text, missing) {
		t.Errorf("the command is known by now: %s", text)
	}
}
