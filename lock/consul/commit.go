package consul

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/hashicorp/consul/api"

	"onejob/boottime"
	"onejob/internal/mutant"
	"onejob/lock"
)

// maxRounds bounds how often locks are tried again whose reused name was in the way.
const maxRounds = 5

// errContested says of a lease that its reused name could not be had, and that its own
// name may be.
var errContested = errors.New("another task may have the name")

// errMarked says of a lease that its group has a marker, see names.go.
var errMarked = errors.New("the group has a marker")

// lockKeys locks the keys of leases, in as few transactions as they fit into, and
// again without those that Consul refused, until each lease has its answer in
// err.
//
// Within one session a lock may be taken twice, and that changes nothing. So a
// try whose answer was lost is simply repeated.
func (l *Locker) lockKeys(ctx context.Context, list []*lease) {
	ctx, cancel := context.WithTimeout(ctx, 2*requestTimeout)
	defer cancel()
	list = slices.DeleteFunc(slices.Clone(list), func(ls *lease) bool {
		ls.err = context.Cause(ls.t.ctx)
		return ls.err != nil
	})
	for round := 1; len(list) > 0; round++ {
		var divert []*lease
		for _, ls := range list {
			if ls.reused != "" && (ls.taken || !l.reusing.Load()) || errors.Is(ls.err, errContested) {
				divert = append(divert, ls)
			}
		}
		l.divert(ctx, divert)
		rest := slices.DeleteFunc(slices.Clone(list), func(ls *lease) bool { return slices.Contains(divert, ls) })
		for _, ls := range rest {
			if ls.reused != "" {
				ls.path = ls.reused
			}
		}
		for len(rest) > 0 {
			b := l.lockBatch(rest)
			l.commit(ctx, acquiring, rest[:b.leases], b.build, l.refusedLock)
			rest = rest[b.leases:]
		}
		list = slices.DeleteFunc(list, func(ls *lease) bool {
			return !errors.Is(ls.err, errContested) && !errors.Is(ls.err, errMarked)
		})
		if round == maxRounds || ctx.Err() != nil {
			for _, ls := range list {
				ls.err = fmt.Errorf("%s: %w", ls.key, lock.ErrHeld)
			}
			return
		}
	}
}

// refusedLock returns what Consul's words on the lock of a lease mean.
func (l *Locker) refusedLock(ls *lease, what string, _ bool) error {
	switch {
	case strings.Contains(what, "lock delay"):
		return fmt.Errorf("%s: %w", ls.key, lock.ErrDelayed)
	case strings.Contains(what, "lock is already held") && ls.reused != "" && strings.Contains(what, strconv.Quote(ls.reused)):
		return errContested
	case strings.Contains(what, "lock is already held"):
		return fmt.Errorf("%s: %w", ls.key, lock.ErrHeld)
	case ls.reused != "" && moved(what):
		return errContested
	case strings.Contains(what, "invalid session"):
		ls.t.lose(fmt.Errorf("%w: Consul says that session %s is invalid", lock.ErrLost, ls.t.id))
		return fmt.Errorf("%s: %w: %s", ls.key, lock.ErrLost, what)
	}
	return fmt.Errorf("acquire lock %s: %w", ls.key, l.cfg.explain(errors.New(what)))
}

// moved reports whether this is what a check-index, or a check-not-exists, says of a key
// that is not as it was.
func moved(what string) bool {
	return strings.Contains(what, "current modify index") || strings.Contains(what, "doesn't exist") || strings.HasSuffix(what, "exists")
}

// A lockBatch is one transaction that locks the keys of the first leases of a list.
type lockBatch struct {
	leases int
	build  func([]*lease) txnBody
}

// A txnBody is the operations of a transaction as JSON, and whose each of them is: the
// place of a lease in the list; below zero, what all of them rest on.
type txnBody struct {
	json  []byte
	owner []int
	marks []group // of the owners from firstMarker downwards
}

// The owners of operations that belong to no lease.
const (
	ofRecord    = -1 // the record of the database must be as it was
	firstMarker = -2 // a group must have no marker
)

func (b *txnBody) add(owner int, op []byte) {
	if len(b.json) > 0 {
		b.json = append(b.json, ',')
	}
	b.json = append(b.json, op...)
	b.owner = append(b.owner, owner)
}

// preamble returns a body that checks the record of the database, if that matters.
func (l *Locker) preamble(list []*lease) txnBody {
	b := txnBody{json: make([]byte, 0, 256*(len(list)+1))}
	if version := list[0].database; version != 0 && !mutant.Record {
		b.add(ofRecord, appendOp(nil, api.KVCheckIndex, l.databaseKey(), "", nil, version))
	}
	return b
}

// lockBatch plans a transaction that locks as many of the leases as fit into it, under
// their reused names if they have one.
func (l *Locker) lockBatch(list []*lease) lockBatch {
	marked := map[group]bool{} // as they are now: the transaction does not grow when it is tried again
	build := func(list []*lease) txnBody {
		b := l.preamble(list)
		for _, ls := range list {
			if ls.reused == "" {
				continue
			}
			g := groupOf(ls.task)
			if marked[g] || slices.Contains(b.marks, g) {
				continue
			}
			b.add(firstMarker-len(b.marks), appendOp(nil, api.KVCheckNotExists, l.markerKey(g), "", nil, 0))
			b.marks = append(b.marks, g)
		}
		var op []byte
		for i, ls := range list {
			if ls.reused == "" {
				b.add(i, appendOp(op[:0], api.KVLock, ls.path, ls.t.id, ls.value, 0))
				continue
			}
			if marked[groupOf(ls.task)] {
				// If this is applied late, the lease may be held under its own name by then.
				b.add(i, appendOp(op[:0], api.KVCheckNotExists, ls.own, "", nil, 0))
				b.add(i, appendOp(op[:0], api.KVLock, ls.own, ls.t.id, nil, 0))
				b.add(i, appendOp(op[:0], api.KVDelete, ls.own, "", nil, 0))
			}
			op = appendOp(op[:0], api.KVLock, ls.reused, ls.t.id, reusedValue(ls.key, ls.value), 0)
			b.add(i, op)
		}
		return b
	}
	size, ops := 200, 1
	for i, ls := range list {
		n := 1
		if ls.reused != "" {
			g := groupOf(ls.task)
			if _, known := marked[g]; !known {
				marked[g] = l.markers.has(g)
				n++ // at most
			}
			if marked[g] {
				n += 3
			}
		}
		size += n * sizeOf(ls)
		if i > 0 && (size > maxTxn || ops+n > maxBatch || ls.database != list[0].database) {
			return lockBatch{i, build}
		}
		ops += n
	}
	return lockBatch{len(list), build}
}

// divertBatch plans a transaction that locks as many of the leases as fit into it under
// their own names.
func (l *Locker) divertBatch(list []*lease) lockBatch {
	n := min(len(list), (maxBatch-1)/5)
	for i := range n {
		if list[i].database != list[0].database {
			n = i
			break
		}
	}
	return lockBatch{n, func(list []*lease) txnBody {
		b := l.preamble(list)
		for i, ls := range list {
			check := appendOp(nil, api.KVCheckIndex, ls.reused, "", nil, ls.seen)
			if ls.seen == 0 {
				check = appendOp(nil, api.KVCheckNotExists, ls.reused, "", nil, 0)
			}
			b.add(i, appendOp(nil, api.KVSet, l.markerKey(groupOf(ls.task)), "", []byte(ls.key+" "+ls.t.id+" "+strconv.FormatInt(int64(boottime.Now()), 10)), 0))
			b.add(i, check)
			if ls.seen == 0 { // a holder that died may have left its lock-delay
				b.add(i, appendOp(nil, api.KVLock, ls.reused, ls.t.id, nil, 0))
				b.add(i, appendOp(nil, api.KVDelete, ls.reused, "", nil, 0))
			}
			b.add(i, appendOp(nil, api.KVLock, ls.own, ls.t.id, ls.value, 0))
			l.markers.add(groupOf(ls.task))
		}
		return b
	}}
}

// deleteKeys gives the keys of leases back: reused names are unlocked, the others
// deleted. A key that another session holds is left alone, and its lease told so.
//
// A key that is as we wrote it is ours, and deleting it takes one operation. If
// somebody wrote to it meanwhile, or we never heard what we wrote, it takes a
// look at the session as well.
func (l *Locker) deleteKeys(ctx context.Context, list []*lease) {
	var reused, known, others []*lease
	for _, ls := range list {
		switch {
		case ls.path == ls.reused:
			reused = append(reused, ls)
		case ls.index != 0:
			known = append(known, ls)
		default:
			others = append(others, ls)
		}
	}
	for chunk := range slices.Chunk(reused, maxBatch) {
		l.commit(ctx, releasing, chunk, each(1, func(b []byte, ls *lease, _ int) []byte {
			return appendOp(b, api.KVUnlock, ls.path, ls.t.id, nil, 0)
		}), func(ls *lease, what string, again bool) error {
			switch {
			case !strings.Contains(what, "lock isn't held"):
				return fmt.Errorf("release lock %s: %w", ls.key, l.cfg.explain(errors.New(what)))
			case again: // it was our own request, most likely
				return nil
			}
			return fmt.Errorf("%s: %w", ls.key, lock.ErrRevoked)
		})
	}
	for chunk := range slices.Chunk(known, maxBatch) {
		l.commit(ctx, releasing, chunk, each(1, func(b []byte, ls *lease, _ int) []byte {
			return appendOp(b, api.KVDeleteCAS, ls.path, "", nil, ls.index)
		}), func(ls *lease, _ string, again bool) error {
			if !again { // else it was our own deletion, most likely
				others = append(others, ls)
			}
			return nil
		})
	}
	for chunk := range slices.Chunk(others, maxBatch/2) {
		l.commit(ctx, releasing, chunk, each(2, func(b []byte, ls *lease, i int) []byte {
			if i == 0 {
				return appendOp(b, api.KVCheckSession, ls.path, ls.t.id, nil, 0)
			}
			return appendOp(b, api.KVDelete, ls.path, "", nil, 0)
		}), func(ls *lease, what string, again bool) error {
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

// each builds transactions with n operations for each lease.
func each(n int, append func(b []byte, ls *lease, i int) []byte) func([]*lease) txnBody {
	return func(list []*lease) txnBody {
		b := txnBody{json: make([]byte, 0, 256*n*len(list))}
		var op []byte
		for owner, ls := range list {
			for i := range n {
				op = append(op[:0], ls, i)
				b.add(owner, op)
			}
		}
		return b
	}
}

// notOurs reports whether this is what a check-session says of a key that is
// gone, or that another session holds, or none.
func notOurs(what string) bool {
	return strings.Contains(what, "failed to check session") || strings.Contains(what, "failed session check")
}

// What a transaction does with the keys of leases, as errors call it.
const (
	acquiring = "acquire"
	releasing = "release" // and what Consul answers of the keys is not read
)

// commit sends the operations of all leases in one transaction, at most three
// times as long as Consul may be able to apply it, and within requestTimeout.
//
// It sends it again without those that Consul refuses, whose answer refused
// tells from Consul's words; again says that an earlier try may have been
// applied. If the record of the database has changed, none is applied, and the answer of
// all is lock.ErrChanged.
func (l *Locker) commit(ctx context.Context, verb string, list []*lease, build func([]*lease) txnBody, refused func(ls *lease, what string, again bool) error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	again := false
	for tries := 1; len(list) > 0; {
		body := build(list)
		var written txnResults
		var out any
		if verb == acquiring {
			out = &written
		}
		err := l.txnJSON(ctx, append(append([]byte{'['}, body.json...), ']'), out)
		answer := classify(err)
		if answer == applied {
			for _, ls := range list {
				ls.err = nil
				if out != nil {
					ls.index = written.next(ls.path)
				}
			}
			return
		}
		if answer == conflict {
			rest, changed := l.split(list, body, err, func(ls *lease, what string) { ls.err = refused(ls, what, again) })
			if changed {
				setErr(list, lock.ErrChanged)
				return
			}
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
				ls.burnt = ls.burnt || ls.path == ls.reused
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
// word on it, and returns the others. It reports whether the conflict names what all of
// them rest on. Leases of a group that has a marker get errMarked.
func (l *Locker) split(list []*lease, body txnBody, conflict error, refused func(*lease, string)) (rest []*lease, changed bool) {
	what := map[int]string{}
	for _, e := range txnErrors(conflict) {
		if e.OpIndex < 0 || e.OpIndex >= len(body.owner) {
			continue
		}
		owner := body.owner[e.OpIndex]
		if owner == ofRecord {
			return nil, true
		}
		if what[owner] == "" {
			what[owner] = e.What
		}
	}
	marked := map[group]bool{}
	for i, g := range body.marks {
		if strings.HasSuffix(what[firstMarker-i], "exists") {
			marked[g] = true
			l.markers.add(g)
		}
	}
	for i, ls := range list {
		switch w := what[i]; {
		case w != "":
			refused(ls, w)
		case ls.reused != "" && marked[groupOf(ls.task)]:
			ls.err = errMarked
		default:
			rest = append(rest, ls)
		}
	}
	return rest, false
}

func setErr(list []*lease, err error) {
	for _, ls := range list {
		ls.err = err
	}
}
