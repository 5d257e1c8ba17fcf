package consul

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/hashicorp/consul/api"

	"onejob/internal/boottime"
	"onejob/lock"
)

// lockKeys locks the keys of leases in one transaction, and again without those
// that Consul refused, until each lease has its answer in err.
//
// Within one session a lock may be taken twice, and that changes nothing. So a
// try whose answer was lost is simply repeated.
func (l *Locker) lockKeys(ctx context.Context, list []*lease) {
	list = slices.DeleteFunc(list, func(ls *lease) bool {
		ls.err = context.Cause(ls.t.ctx)
		return ls.err != nil
	})
	l.commit(ctx, "acquire", list, func(ls *lease) api.TxnOps {
		return api.TxnOps{{KV: &api.KVTxnOp{Verb: api.KVLock, Key: ls.path, Value: ls.value, Session: ls.t.id}}}
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
}

// deleteKeys deletes the keys of leases in one transaction. A key that is not
// ours any more is left alone, and its lease told so.
func (l *Locker) deleteKeys(ctx context.Context, list []*lease) {
	l.commit(ctx, "release", list, func(ls *lease) api.TxnOps {
		return api.TxnOps{
			{KV: &api.KVTxnOp{Verb: api.KVCheckSession, Key: ls.path, Session: ls.t.id}},
			{KV: &api.KVTxnOp{Verb: api.KVDelete, Key: ls.path}},
		}
	}, func(ls *lease, what string, again bool) error {
		switch {
		case !notOurs(what):
			return fmt.Errorf("release lock %s: %w", ls.key, l.cfg.explain(errors.New(what)))
		case again: // most likely it was our own deletion
			return nil
		}
		return fmt.Errorf("%s: %w", ls.key, lock.ErrRevoked)
	})
}

// notOurs reports whether this is what a check-session says of a key that is
// gone, or that another session holds, or none.
func notOurs(what string) bool {
	return strings.Contains(what, "failed to check session") || strings.Contains(what, "failed session check")
}

// commit sends the operations of all leases in one transaction, at most three
// times as long as Consul may be able to apply it, and within requestTimeout.
// It sends it again without those that Consul refuses, whose answer refused
// tells from Consul's words; again says that an earlier try may have been
// applied.
func (l *Locker) commit(ctx context.Context, verb string, list []*lease, ops func(*lease) api.TxnOps, refused func(ls *lease, what string, again bool) error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	again := false
	for tries := 1; len(list) > 0; {
		var all api.TxnOps
		for _, ls := range list {
			all = append(all, ops(ls)...)
		}
		err := l.txn(ctx, l.keys, all)
		answer := classify(err)
		if answer == applied {
			setErr(list, nil)
			return
		}
		if answer == conflict {
			rest := split(list, len(all)/len(list), err, func(ls *lease, what string) { ls.err = refused(ls, what, again) })
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
// word on it, and returns the others. Each lease has that many operations.
func split(list []*lease, operations int, conflict error, refused func(*lease, string)) (rest []*lease) {
	what := map[int]string{}
	for _, e := range txnErrors(conflict) {
		if i := e.OpIndex / operations; what[i] == "" {
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
