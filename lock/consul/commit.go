package consul

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/hashicorp/consul/api"

	"onejob/internal/boottime"
	"onejob/internal/mutant"
	"onejob/lock"
)

// lockKeys locks the keys of leases, in as few transactions as they fit into, and
// again without those that Consul refused, until each lease has its answer in
// err.
//
// Within one session a lock may be taken twice, and that changes nothing. So a
// try whose answer was lost is simply repeated.
func (l *Locker) lockKeys(ctx context.Context, list []*lease) {
	list = slices.DeleteFunc(list, func(ls *lease) bool {
		ls.err = context.Cause(ls.t.ctx)
		return ls.err != nil
	})
	for len(list) > 0 {
		n := fitting(list)
		var guard []byte
		if version := list[0].database; version != 0 && !mutant.Record {
			guard = appendOp(nil, api.KVCheckIndex, l.databaseKey(), "", nil, version)
		}
		l.commit(ctx, "acquire", list[:n], guard, 1, func(b []byte, ls *lease) []byte {
			return appendOp(b, api.KVLock, ls.path, ls.t.id, ls.value, 0)
		}, func(ls *lease, what string, _ bool) error {
			switch {
			case strings.Contains(what, "lock delay"):
				return fmt.Errorf("%s: %w", ls.key, lock.ErrDelayed)
			case strings.Contains(what, "lock is already held"):
				return fmt.Errorf("%s: %w", ls.key, lock.ErrHeld)
			case strings.Contains(what, "invalid session"):
				ls.t.lose(fmt.Errorf("%w: Consul says that session %s is invalid", lock.ErrLost, ls.t.id))
				return fmt.Errorf("%s: %w: %s", ls.key, lock.ErrLost, what)
			}
			return fmt.Errorf("acquire lock %s: %w", ls.key, l.cfg.explain(errors.New(what)))
		})
		list = list[n:]
	}
}

// deleteKeys deletes the keys of leases. A key that another session holds is left
// alone, and its lease told so.
//
// A key that is as we wrote it is ours, and deleting it takes one operation. If
// somebody wrote to it meanwhile, or we never heard what we wrote, it takes a
// look at the session as well.
func (l *Locker) deleteKeys(ctx context.Context, list []*lease) {
	var known, others []*lease
	for _, ls := range list {
		if ls.index != 0 {
			known = append(known, ls)
		} else {
			others = append(others, ls)
		}
	}
	for chunk := range slices.Chunk(known, maxBatch) {
		l.commit(ctx, "release", chunk, nil, 1, func(b []byte, ls *lease) []byte {
			return appendOp(b, api.KVDeleteCAS, ls.path, "", nil, ls.index)
		}, func(ls *lease, _ string, again bool) error {
			if !again { // else it was our own deletion, most likely
				others = append(others, ls)
			}
			return nil
		})
	}
	for chunk := range slices.Chunk(others, maxBatch/2) {
		l.commit(ctx, "release", chunk, nil, 2, func(b []byte, ls *lease) []byte {
			b = appendOp(b, api.KVCheckSession, ls.path, ls.t.id, nil, 0)
			return appendOp(append(b, ','), api.KVDelete, ls.path, "", nil, 0)
		}, func(ls *lease, what string, again bool) error {
			switch {
			case !notOurs(what):
				return fmt.Errorf("release lock %s: %w", ls.key, l.cfg.explain(errors.New(what)))
			case again:
				return nil
			}
			return fmt.Errorf("%s: %w", ls.key, lock.ErrRevoked)
		})
	}
}

// notOurs reports whether this is what a check-session says of a key that is
// gone, or that another session holds, or none.
func notOurs(what string) bool {
	return strings.Contains(what, "failed to check session") || strings.Contains(what, "failed session check")
}

// commit sends the operations of all leases in one transaction, at most three
// times as long as Consul may be able to apply it, and within requestTimeout. ops
// appends those of one lease, so many of them, as JSON. guard is an operation that goes
// before them, if it is not empty: Consul applies nothing unless it holds, and the answer
// is then lock.ErrChanged.
//
// It sends it again without those that Consul refuses, whose answer refused
// tells from Consul's words; again says that an earlier try may have been
// applied.
func (l *Locker) commit(ctx context.Context, verb string, list []*lease, guard []byte, operations int, ops func([]byte, *lease) []byte, refused func(ls *lease, what string, again bool) error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	again := false
	before := 0 // operations
	if len(guard) > 0 {
		before = 1
	}
	for tries := 1; len(list) > 0; {
		body := append(append(make([]byte, 0, 512*(len(list)+1)), '['), guard...)
		for i, ls := range list {
			if i+before > 0 {
				body = append(body, ',')
			}
			body = ops(body, ls)
		}
		var written txnResults
		err := l.txnJSON(ctx, append(body, ']'), &written)
		answer := classify(err)
		if answer == applied {
			for i, ls := range list {
				ls.err, ls.index = nil, written.index(before+i, ls.path)
			}
			return
		}
		if answer == conflict {
			if before > 0 && slices.ContainsFunc(txnErrors(err), func(e *api.TxnError) bool { return e.OpIndex == 0 }) {
				setErr(list, lock.ErrChanged)
				return
			}
			rest := split(list, before, operations, err, func(ls *lease, what string) { ls.err = refused(ls, what, again) })
			if len(rest) < len(list) {
				list = rest
				continue
			}
			answer = wrong // it names none of them
		}
		if answer == unknown {
			again = true
			for _, ls := range list {
				ls.doubt = boottime.Now()
			}
		}
		if answer == wrong || tries == 3 || ctx.Err() != nil {
			setErr(list, fmt.Errorf("%s locks: %w", verb, l.cfg.explain(err)))
			return
		}
		pause(ctx, backoff(tries))
		tries++
	}
}

// split calls refused for each lease that a conflict names, with Consul's first
// word on it, and returns the others. Each lease has that many operations, after so
// many of others.
func split(list []*lease, before, operations int, conflict error, refused func(*lease, string)) (rest []*lease) {
	what := map[int]string{}
	for _, e := range txnErrors(conflict) {
		if i := (e.OpIndex - before) / operations; what[i] == "" {
			what[i] = e.What
		}
	}
	for i, ls := range list {
		if w := what[i]; w != "" {
			refused(ls, w)
		} else {
			rest = append(rest, ls)
		}
	}
	return rest
}

func setErr(list []*lease, err error) {
	for _, ls := range list {
		ls.err = err
	}
}
