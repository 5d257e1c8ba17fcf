// # Semaphores
//
// [Locker.Semaphores] follows Consul's own guide to semaphores, in the format of
// HashiCorp's Go client, so that a program that uses its Semaphore, a script
// under "consul lock -n 3 <prefix>/limits/<name>" and our tasks share the same
// slots:
//
//	<prefix>/limits/<name>/.lock      the limit, and the sessions that hold slots
//	<prefix>/limits/<name>/<session>  a contender's entry, locked by its session
//	<prefix>/limit-settings/<name>    our own record: the limit, as it was set
//
// A session holds a slot if it is among the holders in .lock and has a live entry.
// Both are written, and removed, in one transaction with a Check-And-Set on .lock. The
// holders are a set of sessions, so every slot needs a session of its own, which the
// replica keeps alive together with its first.
//
// The record outlives the .lock, which "consul lock" deletes when it was the
// last to use it: then .lock is made anew from the record. While both are there
// the record is right, and a .lock that says otherwise is put right by the next
// onejob that enters or leaves. A program of HashiCorp's that was told another
// limit reports that as a conflict, and does not enter. A semaphore that such
// programs made has no record until Resize gives it one, and is gone when they
// delete its .lock. Between the moment when they delete a .lock and the next
// Take, they may also make one with a limit of their own, and enter under that.
//
// HashiCorp's client prunes a holder as soon as its entry is gone. We wait for
// the lock-delay, counted from when Consul first told us that the session has
// ended. Where a person deleted the entry of a live session, or a .lock under
// its holders, we wait for Config.Verify as well: that is how long its holder may take
// to notice. Meanwhile the slot counts as held. A .lock that "consul lock" deleted
// when everybody had left looks the same as one that a person deleted with all
// entries, so our next one waits for that long, too.
//
// What is in .lock and cannot be understood to the last field is lock.ErrForeign
// and never overwritten; slots below it are revoked, since nothing proves them.
// A .lock that is a list of holders, as the guide writes it, keeps that form.
// Holders of many thousand slots do not fit into Consul's limit of 512 KB for
// one transaction; a semaphore costs its whole .lock with every change, and is
// meant for some hundreds.
//
// https://developer.hashicorp.com/consul/docs/automate/semaphore
package consul

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/boottime"
	"onejob/internal/retry"
	"onejob/lock"
	"onejob/lock/internal/hold"
)

// semaphores implements lock.Semaphores.
type semaphores struct {
	*registry
	present *hold.Present[*session]
}

// check is open for a name and a limit that may be wrong.
func (s semaphores) check(name string, slots int) (*semaphore, error) {
	if err := lock.CheckSemaphore(name, slots); err != nil {
		return nil, err
	}
	return s.open(name), nil
}

// Create implements lock.Semaphores.
func (s semaphores) Create(ctx context.Context, name string, slots int) error {
	return s.edit(ctx, "create", name, slots, func(v *view, again bool) (api.TxnOps, error) {
		switch {
		case v.foreign != nil:
			return nil, v.foreign
		case again && v.setting != nil && v.limit == slots:
			return nil, nil // an earlier try was applied, though its answer was lost
		case v.exists():
			return nil, fmt.Errorf("%s: %w", name, lock.ErrExists)
		}
		return v.setLimit(s.keyNames, slots), nil
	})
}

// Resize implements lock.Semaphores.
func (s semaphores) Resize(ctx context.Context, name string, slots int) error {
	return s.edit(ctx, "resize", name, slots, func(v *view, _ bool) (api.TxnOps, error) {
		if err := v.usable(); err != nil {
			return nil, err
		}
		return v.setLimit(s.keyNames, slots), nil
	})
}

// Destroy implements lock.Semaphores. Holders whose slots it revokes learn so
// within Config.Verify; until they let go, a semaphore that is created under the
// same name lets no onejob in. Holders that have died, and nobody else, are waited for.
func (s semaphores) Destroy(ctx context.Context, name string, force bool) error {
	sem, err := s.check(name, 0) // one view for all tries: it knows since when a holder has been missing
	if err != nil {
		return err
	}
	defer sem.done()
	for until := boottime.Now().Add(s.cfg.slotDelay() + time.Second); ; {
		err := s.destroy(ctx, name, force)
		if !errors.Is(err, lock.ErrDelayed) || until.Passed() || ctx.Err() != nil {
			return err
		}
		retry.Pause(ctx, 200*time.Millisecond)
	}
}

func (s semaphores) destroy(ctx context.Context, name string, force bool) error {
	return s.edit(ctx, "destroy", name, 0, func(v *view, again bool) (api.TxnOps, error) {
		switch err := v.usable(); {
		case again && errors.Is(err, lock.ErrNoSemaphore):
			return nil, nil
		case err != nil:
			return nil, err
		case !force && v.held() > 0 && v.held() == len(v.dying):
			return nil, fmt.Errorf("%s: %d %w by sessions that have ended (%w)", name, v.held(), lock.ErrInUse, lock.ErrDelayed)
		case !force && v.held() > 0:
			return nil, fmt.Errorf("%s: %d %w", name, v.held(), lock.ErrInUse)
		}
		var ops api.TxnOps
		for _, pair := range []*api.KVPair{v.setting, v.lock} {
			if pair != nil {
				ops = append(ops, op(api.KVDeleteCAS, api.KVTxnOp{Key: pair.Key, Index: pair.ModifyIndex}))
			}
		}
		return ops, nil
	})
}

// edit looks at a semaphore and applies what f makes of it, until nobody changed
// it in between. No operations mean that there is nothing to do; again says that
// an earlier try may have been applied.
func (s semaphores) edit(ctx context.Context, verb, name string, slots int, f func(v *view, again bool) (api.TxnOps, error)) error {
	sem, err := s.check(name, slots)
	if err != nil {
		return err
	}
	defer sem.done()
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	again := false
	var answer error
	err = sem.try(ctx, func(v *view) (done bool, err error) {
		var ops api.TxnOps
		if ops, answer = f(v, again); answer != nil || len(ops) == 0 {
			return true, nil
		}
		err = s.txn(ctx, s.keys, ops)
		again = again || classify(err) == unknown
		return err == nil, err
	})
	if err != nil {
		return fmt.Errorf("%s limit %s: %w", verb, name, err)
	}
	return answer
}

// Take implements lock.Semaphores. It takes no longer than a few seconds,
// whatever ctx says: what one caller takes travels with what others do.
func (s semaphores) Take(ctx context.Context, name string, n int, value []byte) ([]lock.Lease, error) {
	if err := lock.CheckSemaphore(name, 0); err != nil {
		return nil, err
	}
	switch {
	case n < 1 || n > lock.MaxTake:
		return nil, fmt.Errorf("limit %s: %d slots at once are not between 1 and %d", name, n, lock.MaxTake)
	case len(value) > maxValue:
		return nil, fmt.Errorf("limit %s: the value is %d bytes long, more than %d", name, len(value), maxValue)
	case ctx.Err() != nil:
		return nil, ctx.Err()
	}
	t := s.present.Current()
	if t == nil {
		return nil, lock.ErrLost
	}
	c := &change{pool: &t.slots.pool, n: n, value: value}
	s.change(name, c)

	slots := make([]*slot, len(c.sessions))
	for i, session := range c.sessions {
		slots[i] = t.slots.add(session, name)
		if c.err != nil && c.doubt {
			slots[i].doubt = boottime.Now()
		}
	}
	if c.err != nil {
		for _, sl := range slots {
			sl.Abandon(c.err)
			sl.settle(true)
		}
		return nil, c.err
	}
	for _, sl := range slots {
		sl.Grant()
	}
	if err := cmp.Or(t.Lost(), ctx.Err()); err != nil {
		_ = parallel(maxBatch, slots, func(sl *slot) error { return sl.Release(ctx) })
		return nil, err
	}
	leases := make([]lock.Lease, n)
	for i, sl := range slots {
		leases[i] = sl
	}
	return leases, nil
}

// Inspect implements lock.Semaphores. Waiting counts the contenders that hold no
// slot; onejob's waiters write no entry.
func (s semaphores) Inspect(ctx context.Context, name string) (lock.Semaphore, error) {
	sem, err := s.check(name, 0)
	if err != nil {
		return lock.Semaphore{}, err
	}
	defer sem.done()
	v, err := sem.look(ctx)
	if err != nil {
		return lock.Semaphore{}, fmt.Errorf("inspect limit %s: %w", name, s.explain(err))
	}
	if err := v.usable(); err != nil {
		return lock.Semaphore{}, err
	}
	out := lock.Semaphore{Name: name, Slots: v.limit}
	for session := range v.content.Holders.set {
		if v.gone[session] {
			continue
		}
		h := lock.SlotHolder{Session: session}
		if entry := v.entries[session]; entry != nil {
			h.Value = entry.Value
		}
		out.Holders = append(out.Holders, h)
	}
	slices.SortFunc(out.Holders, func(a, b lock.SlotHolder) int { return strings.Compare(a.Session, b.Session) })
	for session := range v.entries {
		if !v.content.Holders.set[session] {
			out.Waiting++
		}
	}
	return out, nil
}

// List implements lock.Semaphores. It names those too whose .lock was written
// for another purpose.
func (s semaphores) List(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	var names []string
	for _, kind := range []struct{ folder, suffix string }{
		{s.settingsFolder(), ""},
		{s.limitsFolder(), "/" + api.DefaultSemaphoreKey},
	} {
		keys, meta, err := s.keys.KV().Keys(kind.folder, "", s.query(ctx))
		if err == nil && meta.ResultsFilteredByACLs {
			err = incomplete("some keys below " + kind.folder)
		}
		if err == nil && len(keys) == 0 { // an answer that is empty says nothing of the rights
			_, err = s.get(ctx, kind.folder)
		}
		if err != nil {
			return nil, fmt.Errorf("list limits: %w", s.explain(err))
		}
		for _, key := range keys {
			name, ok := strings.CutSuffix(strings.TrimPrefix(key, kind.folder), kind.suffix)
			if ok && lock.CheckSemaphore(name, 0) == nil {
				names = append(names, name)
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}
