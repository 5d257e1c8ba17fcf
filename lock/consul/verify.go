package consul

import (
	"context"
	"encoding/json"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hashicorp/consul/api"
	"go.uber.org/zap"

	"onejob/internal/retry"
	"onejob/lock/internal/hold"
)

// verify looks at all keys of a session, without a Raft write. A key that is gone
// ends that lease alone. It also deletes the keys that nobody works under.
// What cannot be looked at now is looked at next time.
func (k *locks) verify(ctx context.Context, in *leases) {
	list := slices.DeleteFunc(in.all(), func(ls *lease) bool {
		s := ls.State()
		return s != hold.Held && s != hold.Leaked
	})
	for chunk := range slices.Chunk(list, maxBatch/2) {
		var ops api.TxnOps
		var owner []int
		for i, ls := range chunk {
			ops, owner = append(ops, op(api.KVCheckSession, api.KVTxnOp{Key: ls.path, Session: in.id})), append(owner, i)
			switch {
			case ls.reused == "" || ls.locked == 0:
			case ls.path == ls.reused:
				// A snapshot that was restored may have brought back the lock of
				// another task, which this session had under the same name.
				ops, owner = append(ops, op(api.KVCheckIndex, api.KVTxnOp{Key: ls.path, Index: ls.locked})), append(owner, i)
			case ls.State() == hold.Held:
				// Without the marker others may lock the task under its reused name.
				ops, owner = append(ops, op(api.KVGet, api.KVTxnOp{Key: k.markerKey(groupOf(ls.task))})), append(owner, i)
			}
		}
		rctx, cancel := context.WithTimeout(ctx, requestTimeout)
		_, resp, _, err := k.keys.Txn().Txn(ops, k.query(rctx))
		cancel()
		if err != nil {
			continue
		}
		gone, written := map[*lease]bool{}, map[*lease]bool{}
		for _, e := range resp.Errors {
			// The other errors, a missing right for one, say nothing about the key.
			switch {
			case e.OpIndex < 0 || e.OpIndex >= len(owner):
			case notOurs(e.What), ops[e.OpIndex].KV.Verb == api.KVGet && strings.Contains(e.What, "doesn't exist"):
				gone[chunk[owner[e.OpIndex]]] = true
			case moved(e.What):
				written[chunk[owner[e.OpIndex]]] = true
			}
		}
		for ls := range written {
			if !gone[ls] && k.lockedForAnother(ctx, ls) {
				gone[ls] = true
			}
		}
		// All keys go when the session does. Then the leases end with the session, not here.
		if len(gone) > 0 {
			if alive, _ := in.lives(ctx); !alive {
				return
			}
		}
		var left []*lease
		for _, ls := range chunk {
			switch leaked := ls.State() == hold.Leaked; {
			case leaked && gone[ls]:
				ls.settle(true)
			case leaked && len(resp.Errors) == len(gone)+len(written):
				left = append(left, ls)
			case gone[ls]:
				ls.revoke()
			}
		}
		if len(left) > 0 {
			k.deleteKeys(ctx, left)
		}
	}
	in.giveUp(giveUpAfter * k.cfg.Verify)
}

// lockedForAnother reports whether the reused name of a lease, which somebody has written
// to since it was locked, is not locked for its task any more.
func (k *locks) lockedForAnother(ctx context.Context, ls *lease) bool {
	pair, err := k.get(ctx, ls.path)
	return err == nil && (pair == nil || pair.Session != ls.in.id || namesAnother(pair.Value, ls.key))
}

// A leaked lock is a key, or a slot, that one of our sessions holds in Consul and that
// nobody here works under. A snapshot that is restored brings them: what was held
// when it was taken is held again, by a session that has lived on, though we have
// let go since. To others it looks like any lock whose holder lives, and would
// stay for as long as we do. So every replica looks for its own.
const (
	// leakScanInterval is how often, in Config.Verify: once a minute by default.
	leakScanInterval = 20

	// leakScanShare is how much of the time looking may take, as one in so many. All
	// keys of all replicas are read for it.
	leakScanShare = 500

	// leakScanMax is the longest pause, for a Consul that was slow twice.
	leakScanMax = 10 * time.Minute
)

// findLeaked looks for leaked locks and slots from time to time, until ctx ends.
func findLeaked(ctx context.Context, k *locks, leases *leases, slots *slots) {
	var took, before time.Duration
	for {
		retry.Pause(ctx, nextLeakScan(k.cfg.Verify, took, before))
		if ctx.Err() != nil {
			return
		}
		began := time.Now()
		k.findLeaked(ctx, leases)
		slots.findLeaked(ctx)
		took, before = time.Since(began), took
	}
}

// nextLeakScan returns when to look again after the last two looks took so long. One that
// took long may have waited for a leader. Two have read much.
func nextLeakScan(verify, took, before time.Duration) time.Duration {
	least := leakScanInterval * verify
	return max(least, min(leakScanShare*min(took, before), leakScanMax))
}

// findLeaked puts leaked locks on the list of a session, where verify finds them and sees
// to them. What is on the list before Consul is asked, or after, is no leaked.
func (k *locks) findLeaked(ctx context.Context, in *leases) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	in.mu.Lock()
	leases, names := maps.Clone(in.own), maps.Clone(in.names)
	in.mu.Unlock()

	leading, _ := k.scan(ctx, k.leaderPath())
	for _, pair := range leading { // a session may have resigned and lived on
		if pair.Key == k.leaderPath() && pair.Session == in.id && leases[pair.Key] == nil {
			in.adopt(&lease{key: "leader", own: pair.Key, path: pair.Key, index: pair.ModifyIndex})
		}
	}
	markers, _ := k.scan(ctx, k.markersFolder())
	held, err := k.scan(ctx, k.taskKey(""))
	if err != nil {
		return
	}
	for _, pair := range held {
		if pair.Session == in.id && leases[pair.Key] == nil {
			in.adopt(&lease{key: strings.TrimPrefix(pair.Key, k.taskKey("")), own: pair.Key, path: pair.Key, index: pair.ModifyIndex})
		}
	}
	k.sweepMarkers(ctx, markers, held)
	if !k.reuses.Load() {
		return // saves reading thousands of names
	}
	reused, _ := k.scan(ctx, k.reusedFolder())
	for _, pair := range reused {
		if pair.Session != in.id || names[pair.Key] != nil {
			continue
		}
		// A task may have had it since the names were copied. It would have moved the index.
		again, err := k.get(ctx, pair.Key)
		if err == nil && again != nil && again.Session == in.id && again.ModifyIndex == pair.ModifyIndex {
			key, _, _ := strings.Cut(string(pair.Value), " ")
			in.adopt(&lease{key: key, own: pair.Key, path: pair.Key, reused: pair.Key})
		}
	}
}

// findLeaked does the same for slots.
func (in *slots) findLeaked(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	in.mu.Lock()
	known := map[string]bool{}
	pool := map[string]*slotSession{}
	for _, s := range in.sessions {
		pool[s.id] = s
		for name := range s.at {
			known[in.limitEntry(name, s.id)] = true
		}
	}
	in.mu.Unlock()
	if len(pool) == 0 {
		return
	}
	pairs, _ := in.scan(ctx, in.limitsFolder())
	for _, pair := range pairs {
		if s := pool[pair.Session]; s != nil && !known[pair.Key] {
			name, _, _ := strings.Cut(strings.TrimPrefix(pair.Key, in.limitsFolder()), "/")
			in.adopt(s, name)
		}
	}
}

// scan is list. It logs the error, as the next look may do better.
func (c *client) scan(ctx context.Context, folder string) (api.KVPairs, error) {
	pairs, err := c.list(ctx, folder)
	if err != nil {
		c.cfg.Log.Debug("leak_scan_failed", zap.Error(err))
	}
	return pairs, err
}

// sweepMarkers deletes the markers of groups of which no task has been held under its own
// name for a while. held lists the tasks' folder, as it was after the markers were read.
func (k *locks) sweepMarkers(ctx context.Context, before, held api.KVPairs) {
	inUse := map[string]bool{}
	for _, pair := range held {
		var v struct {
			Task int64 `json:"task_id"`
		}
		id, err := strconv.ParseInt(strings.TrimPrefix(pair.Key, k.taskKey("")), 10, 64)
		if json.Unmarshal(pair.Value, &v) == nil && v.Task != 0 && v.Task != id {
			continue // a lock_key that looks like an ID
		}
		if err == nil && id > 0 && pair.Session != "" {
			inUse[k.markerKey(groupOf(id))] = true
		}
	}
	gone := k.markers.unused(before, inUse, k.markersFolder(), 2*k.cfg.LockDelay)
	for some := range slices.Chunk(gone, maxBatch) {
		if err := k.txn(ctx, k.keys, some); err != nil {
			return // another replica was quicker, or a marker was written; next time then
		}
	}
}
