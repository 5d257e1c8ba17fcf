package consul

import (
	"context"
	"encoding/json"
	"maps"
	"strconv"
	"strings"
	"time"

	"github.com/hashicorp/consul/api"
	"go.uber.org/zap"

	"onejob/lock/internal/retry"
)

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
)

// findLeaked looks for leaked locks and slots from time to time, until ctx ends.
func findLeaked(ctx context.Context, k *locks, leases *leases, slots *slots) {
	var took time.Duration
	for {
		retry.Pause(ctx, max(leakScanInterval*k.cfg.Verify, leakScanShare*took))
		if ctx.Err() != nil {
			return
		}
		began := time.Now()
		k.findLeaked(ctx, leases)
		slots.findLeaked(ctx)
		took = time.Since(began)
	}
}

// findLeaked puts leaked locks on the list of a session, where verify finds them and sees
// to them. What is on the list before Consul is asked, or after, is no leaked.
func (k *locks) findLeaked(ctx context.Context, in *leases) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	in.mu.Lock()
	leases, names := maps.Clone(in.own), maps.Clone(in.names)
	in.mu.Unlock()

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
	for len(gone) > 0 {
		n := min(len(gone), maxBatch)
		if err := k.txn(ctx, k.keys, gone[:n]); err != nil {
			return // another replica was quicker, or a marker was written; next time then
		}
		gone = gone[n:]
	}
}
