package consul

import (
	"context"
	"slices"
	"strings"

	"github.com/hashicorp/consul/api"

	"onejob/lock/internal/hold"
)

// verify looks at all keys of a session, without a Raft write: who finds a key
// gone loses that lease alone. It also deletes the keys that nobody works under.
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
		// All keys go when the session does. That is another story.
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
}

// lockedForAnother reports whether the reused name of a lease, which somebody has written
// to since it was locked, is not locked for its task any more.
func (k *locks) lockedForAnother(ctx context.Context, ls *lease) bool {
	pair, err := k.get(ctx, ls.path)
	return err == nil && (pair == nil || pair.Session != ls.in.id || namesAnother(pair.Value, ls.key))
}
