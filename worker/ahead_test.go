package worker_test

import (
	"context"
	"encoding/json"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/hashicorp/consul/api"

	"onejob/internal/testenv"
	"onejob/tasks"
)

// holdCommits lets every transaction that makes a task without a lock_key running wait at
// its commit, until the test calls what it returns.
func (c *cluster) holdCommits(t *testing.T) (letGo func()) {
	t.Helper()
	c.exec(t, `
CREATE FUNCTION public.hold() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0 AS $$ BEGIN PERFORM pg_catalog.pg_advisory_xact_lock_shared(4711); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER hold AFTER UPDATE ON onejob.tasks DEFERRABLE INITIALLY DEFERRED
   FOR EACH ROW WHEN (NEW.status = 'running' AND NEW.lock_key IS NULL) EXECUTE FUNCTION public.hold()`)
	holder, err := c.pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(holder.Release)
	if _, err := holder.Exec(t.Context(), `SELECT pg_advisory_lock(4711)`); err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		if _, err := holder.Exec(t.Context(), `SELECT pg_advisory_unlock(4711)`); err != nil {
			t.Fatal(err)
		}
	}
}

// ownLocks returns the locks in Consul of tasks without a lock_key.
func (c *cluster) ownLocks(t *testing.T) api.KVPairs {
	t.Helper()
	locks, err := c.findOwnLocks()
	if err != nil {
		t.Fatal(err)
	}
	return locks
}

// findOwnLocks is ownLocks for other goroutines than the test's.
func (c *cluster) findOwnLocks() (locks api.KVPairs, err error) {
	pairs, _, err := c.kv.Client.KV().List(c.kv.Prefix+"/", nil)
	if err != nil {
		return nil, err
	}
	for _, p := range pairs {
		if p.Session != "" && strings.Contains(string(p.Value), `"task_id"`) {
			locks = append(locks, p)
		}
	}
	return locks, nil
}

// The lock is there before the claim has committed. If it does not commit, the lock is given
// back, and the task still runs once.
func TestLockWhileTheClaimCommits(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	var runs atomic.Int32
	k := tasks.Kinds{}
	tasks.Handle(k, "count", func(context.Context, *tasks.Attempt, none) (none, error) {
		runs.Add(1)
		return none{}, nil
	})
	letGo := c.holdCommits(t)
	c.replica(t, "a", k, nil)
	id := c.insert(t, "kind", "count")
	var first api.KVPairs
	testenv.Eventually(t, maxWait, "the lock is there", func() bool { first = c.ownLocks(t); return len(first) == 1 })
	if status := get[string](t, c, `SELECT status FROM onejob.tasks WHERE id = $1`, id); status != "pending" || runs.Load() != 0 {
		t.Errorf("the task is %s and ran %d times before its claim was committed", status, runs.Load())
	}
	testenv.Eventually(t, maxWait, "the claim is cut off at its commit", func() bool {
		return get[int](t, c, `SELECT count(pg_terminate_backend(pid)) FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711 AND NOT granted
			   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`) > 0
	})
	testenv.Eventually(t, maxWait, "the lock was given back", func() bool {
		now := c.ownLocks(t)
		return len(now) == 0 || len(now) == 1 && now[0].LockIndex != first[0].LockIndex
	})
	letGo()
	c.await(t, id, "succeeded")
	if n := get[int](t, c, `SELECT attempt FROM onejob.tasks WHERE id = $1`, id); n != 1 || runs.Load() != 1 {
		t.Errorf("attempt %d, and it ran %d times", n, runs.Load())
	}
	testenv.Eventually(t, maxWait, "no lock is left", func() bool { return len(c.ownLocks(t)) == 0 })
}

// A lock that was granted under another record of the database than the one during which
// the claim was committed is asked for again.
func TestLockUnderTheRecordOfTheCommit(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	locked := make(chan uint64, 10)
	k := tasks.Kinds{}
	tasks.Handle(k, "look", func(context.Context, *tasks.Attempt, none) (none, error) {
		index := uint64(0)
		locks, err := c.findOwnLocks()
		if len(locks) > 0 {
			index = locks[0].LockIndex
		}
		locked <- index
		return none{}, err
	})
	letGo := c.holdCommits(t)
	r := c.replica(t, "a", k, nil)
	id := c.insert(t, "kind", "look")
	var first api.KVPairs
	testenv.Eventually(t, maxWait, "the lock is there", func() bool { first = c.ownLocks(t); return len(first) == 1 })

	r.logged(t, "postgres_recorded")
	record, _, err := c.kv.Client.KV().Get(c.kv.Prefix+"/database", nil)
	if err != nil {
		t.Fatal(err)
	}
	before := map[string]any{}
	if err := json.Unmarshal(record.Value, &before); err != nil {
		t.Fatal(err)
	}
	before["fences_to"] = 5
	if record.Value, err = json.Marshal(before); err != nil {
		t.Fatal(err)
	}
	if _, err := c.kv.Client.KV().Put(record, nil); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, maxWait, "the replica has repaired the record", func() bool {
		now, _, err := c.kv.Client.KV().Get(record.Key, nil)
		return err == nil && string(now.Value) != string(record.Value)
	})
	letGo()
	c.await(t, id, "succeeded")
	switch <-locked {
	case 0:
		t.Error("the handler ran without a lock")
	case first[0].LockIndex:
		t.Error("the handler ran under the lock of the earlier record")
	}
}
