package consul

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/boottime"
	"onejob/internal/batch"
	"onejob/internal/retry"
	"onejob/lock"
)

const (
	// maxRounds bounds how often locks are tried again whose reused name was in the way.
	maxRounds = 5

	// maxAcquires is how many locks are asked for in one transaction, which has to check
	// the record of the database and some markers of reused names as well.
	maxAcquires = maxBatch - 6
)

// locks locks the keys of leases, and gives them back, for all who ask at the same moment.
type locks struct {
	*client
	reusing func() bool // whether all living replicas share locks under reused names
	reuses  atomic.Bool // a reused name was asked for
	markers markers

	acquires, releases batch.Group[*lease]
}

// newLocks returns locks whose transactions end with life.
func newLocks(life context.Context, c *client, reusing func() bool) *locks {
	k := &locks{client: c, reusing: reusing, markers: markers{seen: map[group]boottime.Instant{}}}
	group := func(what Measure, limit int, commit func(context.Context, []*lease)) batch.Group[*lease] {
		return batch.Group[*lease]{Commit: func(list []*lease) {
			sent := time.Now()
			commit(life, list)
			c.cfg.measure(what, len(list), time.Since(sent))
		}, Max: limit, Parallel: 2}
	}
	k.acquires = group(MeasureAcquire, maxAcquires, k.lockKeys)
	k.releases = group(MeasureRelease, maxBatch, k.deleteKeys)
	return k
}

// acquire locks a key under the session that a list of leases belongs to.
func (k *locks) acquire(ctx context.Context, in *leases, r lock.Request, path string) (*lease, error) {
	ls := k.newLease(in, r, path)
	if !in.reserve(ls) {
		ls.Abandon(lock.ErrHeld)
		return nil, fmt.Errorf("%s: %w", r.Key, lock.ErrHeldHere)
	}
	k.acquires.Do(ls)
	if ls.err != nil {
		err := cmp.Or(in.Lost(), ls.err)
		ls.Abandon(err)
		ls.settle(true)
		return nil, err
	}
	ls.locked = ls.index
	ls.Grant()
	if err := cmp.Or(context.Cause(ls.Context()), ctx.Err()); err != nil {
		_ = ls.Release(ctx)
		return nil, err
	}
	return ls, nil
}

// newLease returns a lease that is about to be asked for.
func (k *locks) newLease(in *leases, r lock.Request, path string) *lease {
	ls := &lease{in: in, key: r.Key, own: path, path: path, value: r.Value, database: r.Database, task: r.Task}
	if r.Task != 0 {
		ls.reused = k.reusedKey(r.Task)
		k.reuses.Store(true)
	}
	ls.Init(in.Session)
	return ls
}

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
// try whose answer was lost is simply repeated. When the session is lost no answer is waited
// for: until all have theirs, the cluster's list does not learn that the replica lives on.
func (k *locks) lockKeys(ctx context.Context, list []*lease) {
	ctx, cancel := context.WithTimeout(ctx, 2*requestTimeout)
	defer cancel()
	list = slices.DeleteFunc(slices.Clone(list), func(ls *lease) bool {
		ls.err = ls.in.Lost()
		return ls.err != nil
	})
	if len(list) > 0 { // all are of one session: there is no other that is not lost
		stop := context.AfterFunc(list[0].in.Context(), cancel)
		defer stop()
	}
	for round := 1; len(list) > 0; round++ {
		var divert []*lease
		for _, ls := range list {
			if ls.reused != "" && (ls.taken || !k.reusing()) || errors.Is(ls.err, errContested) {
				divert = append(divert, ls)
			}
		}
		k.divert(ctx, divert)
		rest := slices.DeleteFunc(slices.Clone(list), func(ls *lease) bool { return slices.Contains(divert, ls) })
		for _, ls := range rest {
			if ls.reused != "" {
				ls.path = ls.reused
			}
		}
		for len(rest) > 0 {
			b := k.lockBatch(rest)
			k.commit(ctx, acquiring, rest[:b.leases], b.build, k.refusedLock)
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

// divert gives leases their own names whose reused ones another task has. Leases that it
// could not decide keep errContested.
func (k *locks) divert(ctx context.Context, list []*lease) {
	for _, ls := range list {
		ls.path = ls.own
	}
	for chunk := range slices.Chunk(list, maxBatch) {
		ops := make(api.TxnOps, len(chunk))
		for i, ls := range chunk {
			ops[i] = op(api.KVGetOrEmpty, api.KVTxnOp{Key: ls.reused})
		}
		pairs, err := k.readAll(ctx, ops)
		if err != nil {
			setErr(chunk, fmt.Errorf("acquire locks: look at the holders: %w", k.explain(err)))
			continue
		}
		var others []*lease
		for _, ls := range chunk {
			switch pair := pairs[ls.reused]; {
			case pair == nil:
				ls.seen = 0
			case pair.Session == "" || namesAnother(pair.Value, ls.key):
				ls.seen = pair.ModifyIndex
			default:
				ls.err = fmt.Errorf("%s: %w", ls.key, lock.ErrHeld)
				continue
			}
			others = append(others, ls)
		}
		for len(others) > 0 {
			b := k.divertBatch(others)
			k.commit(ctx, acquiring, others[:b.leases], b.build, k.refusedLock)
			others = others[b.leases:]
		}
	}
}

// refusedLock returns what Consul's words on the lock of a lease mean.
func (k *locks) refusedLock(ls *lease, what string, _ bool) error {
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
		ls.in.lose(fmt.Errorf("session %s: %s", ls.in.id, what))
		return fmt.Errorf("%s: %w: %s", ls.key, lock.ErrLost, what)
	}
	return fmt.Errorf("acquire lock %s: %w", ls.key, k.explain(errors.New(what)))
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
	json  []byte // a list that is not closed yet
	owner []int
	marks []group // of the owners from firstMarker downwards
}

// The owners of operations that belong to no lease.
const (
	ofRecord    = -1 // the record of the database must be as it was
	firstMarker = -2 // a group must have no marker
)

// newTxnBody returns a body without operations, and with room for so many of the usual
// length.
func newTxnBody(operations, length int) txnBody {
	return txnBody{json: append(make([]byte, 0, length*(operations+1)), '['), owner: make([]int, 0, operations)}
}

func (b *txnBody) add(owner int, op []byte) {
	if len(b.owner) > 0 {
		b.json = append(b.json, ',')
	}
	b.json = append(b.json, op...)
	b.owner = append(b.owner, owner)
}

// preamble returns a body that checks the record of the database, if that matters.
func (k *locks) preamble(list []*lease) txnBody {
	b := newTxnBody(len(list)+1, 256)
	if version := list[0].database; version != 0 {
		b.add(ofRecord, appendOp(nil, api.KVCheckIndex, k.databaseKey(), "", nil, version))
	}
	return b
}

// lockBatch plans a transaction that locks as many of the leases as fit into it, under
// their reused names if they have one.
func (k *locks) lockBatch(list []*lease) lockBatch {
	marked := map[group]bool{} // as they are now: the transaction does not grow when it is tried again
	build := func(list []*lease) txnBody {
		b := k.preamble(list)
		for _, ls := range list {
			if ls.reused == "" {
				continue
			}
			g := groupOf(ls.task)
			if marked[g] || slices.Contains(b.marks, g) {
				continue
			}
			b.add(firstMarker-len(b.marks), appendOp(nil, api.KVCheckNotExists, k.markerKey(g), "", nil, 0))
			b.marks = append(b.marks, g)
		}
		var op, value []byte
		for i, ls := range list {
			if ls.reused == "" {
				b.add(i, appendOp(op[:0], api.KVLock, ls.path, ls.in.id, ls.value, 0))
				continue
			}
			if marked[groupOf(ls.task)] {
				// If this is applied late, the lease may be held under its own name by then.
				b.add(i, appendOp(op[:0], api.KVCheckNotExists, ls.own, "", nil, 0))
				b.add(i, appendOp(op[:0], api.KVLock, ls.own, ls.in.id, nil, 0))
				b.add(i, appendOp(op[:0], api.KVDelete, ls.own, "", nil, 0))
			}
			value = appendReusedValue(value[:0], ls.key, ls.value)
			op = appendOp(op[:0], api.KVLock, ls.reused, ls.in.id, value, 0)
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
				marked[g] = k.markers.has(g)
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

// sizeOf bounds how long an operation on the key of a lease is. In JSON a byte of a key
// may be six, and three of a value are four.
func sizeOf(ls *lease) int { return 180 + 6*len(ls.own) + 4*(len(ls.value)+2)/3 }

// divertBatch plans a transaction that locks as many of the leases as fit into it under
// their own names.
func (k *locks) divertBatch(list []*lease) lockBatch {
	n := min(len(list), (maxBatch-1)/5)
	for i := range n {
		if list[i].database != list[0].database {
			n = i
			break
		}
	}
	return lockBatch{n, func(list []*lease) txnBody {
		b := k.preamble(list)
		for i, ls := range list {
			check := appendOp(nil, api.KVCheckIndex, ls.reused, "", nil, ls.seen)
			if ls.seen == 0 {
				check = appendOp(nil, api.KVCheckNotExists, ls.reused, "", nil, 0)
			}
			b.add(i, appendOp(nil, api.KVSet, k.markerKey(groupOf(ls.task)), "", []byte(ls.key+" "+ls.in.id+" "+strconv.FormatInt(int64(boottime.Now()), 10)), 0))
			b.add(i, check)
			if ls.seen == 0 { // a holder that died may have left its lock-delay
				b.add(i, appendOp(nil, api.KVLock, ls.reused, ls.in.id, nil, 0))
				b.add(i, appendOp(nil, api.KVDelete, ls.reused, "", nil, 0))
			}
			b.add(i, appendOp(nil, api.KVLock, ls.own, ls.in.id, ls.value, 0))
			k.markers.add(groupOf(ls.task))
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
func (k *locks) deleteKeys(ctx context.Context, list []*lease) {
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
	// not returns what Consul's words on a key mean that the session was to hold, given those
	// that say that it does not.
	not := func(held func(what string) bool) func(*lease, string, bool) error {
		return func(ls *lease, what string, again bool) error {
			switch {
			case held(what):
				return fmt.Errorf("release lock %s: %w", ls.key, k.explain(errors.New(what)))
			case again: // it was our own request, most likely
				return nil
			}
			return fmt.Errorf("%s: %w", ls.key, lock.ErrRevoked)
		}
	}
	for chunk := range slices.Chunk(reused, maxBatch) {
		k.commit(ctx, releasing, chunk, each(1, func(b []byte, ls *lease, _ int) []byte {
			return appendOp(b, api.KVUnlock, ls.path, ls.in.id, nil, 0)
		}), not(func(what string) bool { return !strings.Contains(what, "lock isn't held") }))
	}
	for chunk := range slices.Chunk(known, maxBatch) {
		k.commit(ctx, releasing, chunk, each(1, func(b []byte, ls *lease, _ int) []byte {
			return appendOp(b, api.KVDeleteCAS, ls.path, "", nil, ls.index)
		}), func(ls *lease, _ string, again bool) error {
			if !again { // else it was our own deletion, most likely
				others = append(others, ls)
			}
			return nil
		})
	}
	for chunk := range slices.Chunk(others, maxBatch/2) {
		k.commit(ctx, releasing, chunk, each(2, func(b []byte, ls *lease, i int) []byte {
			if i == 0 {
				return appendOp(b, api.KVCheckSession, ls.path, ls.in.id, nil, 0)
			}
			return appendOp(b, api.KVDelete, ls.path, "", nil, 0)
		}), not(func(what string) bool { return !notOurs(what) }))
	}
}

// each builds transactions with n operations for each lease.
func each(n int, append func(b []byte, ls *lease, i int) []byte) func([]*lease) txnBody {
	return func(list []*lease) txnBody {
		b := newTxnBody(n*len(list), 160)
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
func (k *locks) commit(ctx context.Context, verb string, list []*lease, build func([]*lease) txnBody, refused func(ls *lease, what string, again bool) error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	again := false
	for tries := 1; len(list) > 0; {
		body := build(list)
		written, err := k.txnJSON(ctx, append(body.json, ']'), verb == acquiring)
		answer := classify(err)
		if answer == applied {
			for _, ls := range list {
				ls.err = nil
				if verb == acquiring {
					ls.index = written.next(ls.path)
				}
			}
			return
		}
		if answer == conflict {
			rest, changed := k.split(list, body, err, func(ls *lease, what string) { ls.err = refused(ls, what, again) })
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
			setErr(list, fmt.Errorf("%s locks: %w", verb, k.explain(err)))
			return
		}
		retry.Pause(ctx, retry.Backoff(tries))
		tries++
	}
}

// split calls refused for each lease that a conflict names, with Consul's first
// word on it, and returns the others. It reports whether the conflict names what all of
// them rest on. Leases of a group that has a marker get errMarked.
func (k *locks) split(list []*lease, body txnBody, conflict error, refused func(*lease, string)) (rest []*lease, changed bool) {
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
			k.markers.add(g)
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
