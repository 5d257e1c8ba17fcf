package worker_test

import (
	"context"
	"fmt"
	"testing"

	"onejob/lock"
	"onejob/tasks"
)

// A handler may hold locks of its own, or have asked for tasks that were cancelled. Its error about them
// says nothing about its own attempt, which nothing has ended.
func TestErrorsAboutSomethingElse(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	kinds := tasks.Kinds{}
	rows := map[string]int64{}
	for name, err := range map[string]error{"lost": lock.ErrLost, "revoked": lock.ErrRevoked, "cancelled": tasks.ErrCancelled, "shutdown": tasks.ErrShutdown} {
		tasks.Handle(kinds, name, func(context.Context, *tasks.Attempt, struct{}) (struct{}, error) {
			return struct{}{}, fmt.Errorf("something else: %w", err)
		})
		rows[name] = c.insert(t, "kind, max_attempts", name, 2)
	}
	c.replica(t, "a", kinds, nil)
	for name, id := range rows {
		c.await(t, id, "failed")
		if got := c.outcomes(t, id); got != "failed failed" {
			t.Errorf("%s: the outcomes are %s", name, got)
		}
	}
}
