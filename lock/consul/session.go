package consul

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/hashicorp/consul/api"
	"go.uber.org/zap"

	"onejob/boottime"
	"onejob/internal/mutant"
	"onejob/lock"
)

// A session is what this replica knows of one Consul session, from its creation to its end.
type session struct {
	l       *Locker
	id      string // of the session
	cluster string // the id that this Consul had; empty if nobody asks
	service string // as which we are registered; empty with liveness ttl

	signs atomic.Int64 // of life, in the replica's key

	ctx    context.Context // ends with trust in the session
	cancel context.CancelCauseFunc

	mu          sync.Mutex
	leaseWindow leaseWindow
	clocks      boottime.Jumps
	looked      boottime.Instant            // when clocks was last asked
	trouble     error                       // of the last request that should have kept the session alive
	leases      map[string]*lease           // by their own names; one that is here reserves its key
	names       map[string]*lease           // by the reused names of those that have one, whether they are locked under it or not
	burnt       map[string]boottime.Instant // reused names about which a request was not answered, and since when
	slots       map[*slot]bool              // of semaphores
	pool        []*slotSession              // for the slots
	empty       chan struct{}               // closed when the session is over and the last lease gone
}

// begin registers the replica, creates a session and shows it to the others.
func (l *Locker) begin(ctx context.Context) (*session, error) {
	t := &session{l: l, leaseWindow: leaseWindow{check: never, session: never, silence: never}, leases: map[string]*lease{}, names: map[string]*lease{}, burnt: map[string]boottime.Instant{}, slots: map[*slot]bool{}, empty: make(chan struct{})}
	t.clocks.Source = l.ahead
	t.clocks.Since() // what came before it is not about this session
	begun, joined := false, false
	defer func() {
		if !begun {
			t.endDead(context.WithoutCancel(ctx))
			if joined {
				_ = t.leave(context.WithoutCancel(ctx), false)
			}
		}
	}()

	if l.cluster != nil {
		id, err := l.belong(ctx)
		if err != nil {
			return nil, err
		}
		t.cluster = id
	}
	if l.cfg.Liveness == Check {
		t.service = "onejob-" + uuid.NewString()
		t.leaseWindow.check = l.cfg.check().Deadline(boottime.Now())
		if err := l.register(ctx, t.service); err != nil {
			return nil, fmt.Errorf("register service %s: %w", l.cfg.Service, err)
		}
	}

	id, sent, err := l.createSession(ctx, t.sessionEntry("onejob "+l.cfg.Replica.Name))
	if err != nil {
		return nil, fmt.Errorf("create a session: %w", err)
	}
	t.id = id
	t.leaseWindow.session = l.cfg.session().Deadline(sent)
	if l.cluster != nil {
		sent := boottime.Now()
		joined = true // perhaps, if it fails
		if err := l.join(ctx, t); err != nil {
			return nil, err
		}
		t.leaseWindow.silence = l.cfg.silence().Deadline(sent)
	}
	if err := t.appear(ctx); err != nil {
		return nil, err
	}
	t.ctx, t.cancel = context.WithCancelCause(context.Background())
	begun = true
	return t, nil
}

// join puts the session on the cluster's list.
func (l *Locker) join(ctx context.Context, t *session) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	if err := l.cluster.Join(ctx, t.cluster, t.id); err != nil {
		return listError{err}
	}
	return nil
}

func checkID(service string) string { return "service:" + service }

// register makes the replica a service with a TTL check. A check that nobody
// feeds any more takes the registration with it after a minute.
func (l *Locker) register(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	return l.heartbeats.Agent().ServiceRegisterOpts(&api.AgentServiceRegistration{
		ID:   id,
		Name: l.cfg.Service,
		Meta: map[string]string{"replica": l.cfg.Replica.Name, "version": l.cfg.Replica.Version},
		Check: &api.AgentServiceCheck{
			CheckID:                        checkID(id),
			Name:                           "onejob replica " + l.cfg.Replica.Name,
			TTL:                            l.cfg.CheckTTL.String(),
			Status:                         api.HealthPassing,
			DeregisterCriticalServiceAfter: "1m",
		},
	}, api.ServiceRegisterOpts{Token: l.token.current()}.WithContext(ctx))
}

// sessionEntry is what Consul is asked of a session.
func (t *session) sessionEntry(name string) map[string]any {
	entry := map[string]any{
		"Name":      name,
		"Behavior":  api.SessionBehaviorDelete,
		"TTL":       t.l.cfg.SessionTTL.String(),
		"LockDelay": t.l.cfg.LockDelay.String(),
		// The default would tie the session to gossip's idea of the node, which
		// has false alarms of its own. The library leaves an empty list out, so
		// the request is written here.
		"NodeChecks": []string{},
	}
	if t.service != "" {
		entry["ServiceChecks"] = []api.ServiceCheck{{ID: checkID(t.service)}}
	}
	return entry
}

// createSession also returns the moment before the request that succeeded. The
// agent tells the servers of a new check in its own time, so the first request
// may come too early.
func (l *Locker) createSession(ctx context.Context, entry map[string]any) (string, boottime.Instant, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	for try := 1; ; try++ {
		sent := boottime.Now()
		var out struct{ ID string }
		_, err := l.heartbeats.Raw().Write("/v1/session/create", entry, &out, l.write(ctx))
		if err == nil {
			return out.ID, sent, nil
		}
		if !strings.Contains(err.Error(), "Missing check") && !strings.Contains(err.Error(), "critical state") {
			return "", 0, err
		}
		pause(ctx, 20*time.Millisecond)
		if ctx.Err() != nil {
			return "", 0, err
		}
	}
}

// appear puts the replica's key there, which tells the others that the session
// lives. It may be called again when somebody deleted the key, or as a sign of life:
// each value is another one.
func (t *session) appear(ctx context.Context) error {
	err := t.l.txn(ctx, t.l.heartbeats, api.TxnOps{{KV: &api.KVTxnOp{
		Verb: api.KVLock, Key: t.l.replicaKey(t.id), Value: t.card(), Session: t.id,
	}}})
	if err != nil {
		return fmt.Errorf("write key %s: %w", t.l.replicaKey(t.id), err)
	}
	return nil
}

func (t *session) card() []byte {
	r := t.l.cfg.Replica
	r.Names = names
	return encode(struct {
		Replica
		Signs int64 `json:"signs"` // that were given
	}{r, t.signs.Add(1)})
}

// deadline returns when the session ends unless it is kept alive, or when it
// ended.
func (t *session) deadline() boottime.Instant {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.look()
	return t.leaseWindow.until()
}

// lookEvery is how long it may take until a jump of the wall clock is noticed, by those
// who ask for a deadline.
const lookEvery = 50 * time.Millisecond

// look makes all deadlines come sooner if the wall clock has jumped ahead. t.mu is held.
func (t *session) look() {
	now := boottime.Now()
	if now.Sub(t.looked) < lookEvery || t.ctx.Err() != nil {
		return
	}
	t.looked = now
	jump := t.clocks.Since()
	if jump == 0 {
		return
	}
	t.leaseWindow.age(now, jump)
	for _, s := range t.pool {
		s.deadline = s.deadline.Add(-jump)
	}
	t.l.log.Warn("clock_jumped", zap.String("session", t.id), zap.Duration("jump", jump), zap.Int("leases", len(t.leases)+len(t.slots)))
}

// extend moves one of the deadlines after a request that was sent then was
// acknowledged. If that came too late the session is lost, whatever Consul says.
func (t *session) extend(which *boottime.Instant, timing lock.Timing, sent boottime.Instant) {
	t.mu.Lock()
	t.look()
	stale := sent <= t.leaseWindow.jumped
	extended := stale || t.leaseWindow.extend(which, boottime.Now(), timing.Deadline(sent))
	t.mu.Unlock()
	if !extended {
		t.lose(fmt.Errorf("%w: the deadline passed before a heartbeat was acknowledged", lock.ErrLost))
	}
}

// lose ends the session: from now on nobody believes in its session.
func (t *session) lose(why error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.leaseWindow.end(boottime.Now())
	t.cancel(why)
}

// failed remembers why a request did not keep the session alive.
func (t *session) failed(what string, err error) {
	t.l.log.Debug(what, zap.Error(err))
	t.mu.Lock()
	defer t.mu.Unlock()
	t.trouble = t.l.cfg.explain(err)
}

// live keeps the session alive until it is lost or ctx ends.
func (t *session) live(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(t.ctx, cancel)
	defer stop()

	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { t.expire(ctx) })
	wg.Go(func() { every(ctx, t.l.cfg.Renew, t.renew) })
	wg.Go(func() { every(ctx, t.l.cfg.Renew, t.renewPool) })
	wg.Go(func() { every(ctx, t.l.cfg.Verify, func(ctx context.Context) bool { t.verify(ctx); return true }) })
	wg.Go(func() { every(ctx, t.l.cfg.Verify, func(ctx context.Context) bool { t.verifySlots(ctx); return true }) })
	wg.Go(func() { t.releaseLeaked(ctx) })
	if t.cluster != "" {
		wg.Go(func() { every(ctx, t.l.cfg.Renew, t.stay) })
		wg.Go(func() { every(ctx, time.Second, t.speak) })
	}
	if t.service != "" {
		wg.Go(func() { every(ctx, t.l.cfg.Heartbeat, t.beat) })
	}
	<-ctx.Done()
}

// expire ends the session at its deadline. It looks twice a second at least,
// because timers stand still while the machine is suspended and the deadline
// does not.
func (t *session) expire(ctx context.Context) {
	for ctx.Err() == nil {
		left := t.deadline().Until()
		if left <= 0 {
			t.mu.Lock()
			why := fmt.Errorf("%w: no heartbeat was acknowledged in time", lock.ErrLost)
			switch {
			case t.leaseWindow.jumped != 0 && boottime.Now().Sub(t.leaseWindow.jumped) < 2*time.Second:
				why = fmt.Errorf("%w: the wall clock has jumped ahead by %v: this machine was paused, or its clock was set", lock.ErrLost, t.leaseWindow.jump.Round(time.Millisecond))
			case t.trouble != nil:
				why = fmt.Errorf("%w: %w", why, t.trouble)
			}
			t.mu.Unlock()
			t.lose(why)
			return
		}
		pause(ctx, min(left, t.expirePool(), 500*time.Millisecond))
	}
}

// beat feeds the health check, at the local agent, and reports whether it could.
func (t *session) beat(ctx context.Context) bool {
	timing := t.l.cfg.check()
	rctx, cancel := context.WithTimeout(ctx, max(timing.Heartbeat, timing.Slack()/2))
	defer cancel()
	sent := boottime.Now()
	err := t.l.heartbeats.Agent().UpdateTTLOpts(checkID(t.service), "", api.HealthPassing, t.l.query(rctx))
	switch {
	case err == nil:
		t.l.measure(MeasureHeartbeat, 1, boottime.Now().Sub(sent))
		t.extend(&t.leaseWindow.check, timing, sent)
		return true
	case strings.Contains(err.Error(), "Unknown check ID"), strings.Contains(err.Error(), "does not have associated TTL"):
		t.lose(fmt.Errorf("%w: the agent no longer knows the health check; was it restarted?", lock.ErrLost))
	case ctx.Err() == nil:
		t.failed("heartbeat_failed", fmt.Errorf("heartbeat: %w", err))
	}
	return false
}

// renew renews the session, at the servers, and reports whether it could.
func (t *session) renew(ctx context.Context) bool {
	timing := t.l.cfg.session()
	rctx, cancel := context.WithTimeout(ctx, max(time.Second, timing.Slack()/2))
	defer cancel()
	sent := boottime.Now()
	entry, _, err := t.l.heartbeats.Session().Renew(t.id, t.l.write(rctx))
	switch {
	case err == nil && entry == nil:
		t.lose(fmt.Errorf("%w: Consul says that session %s has ended", lock.ErrLost, t.id))
	case err == nil:
		t.l.measure(MeasureRenewal, 1, boottime.Now().Sub(sent))
		t.extend(&t.leaseWindow.session, timing, sent)
		return true
	case ctx.Err() == nil:
		t.failed("renewal_failed", fmt.Errorf("renew session %s: %w", t.id, err))
	}
	return false
}

// lives asks Consul whether the session still lives. If it has ended, it is lost. If
// Consul cannot tell, or may not because the token was narrowed, that is an error.
func (t *session) lives(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	entry, err := t.l.lookAt(ctx, t.l.heartbeats, t.id)
	if err == nil && entry == nil {
		t.lose(fmt.Errorf("%w: session %s was ended from outside", lock.ErrLost, t.id))
	}
	return entry != nil, err
}

// reappear is called when the replica's key has vanished: the session has
// ended, or somebody deleted just the key. If Consul cannot tell, the deadline
// will.
func (t *session) reappear(ctx context.Context) {
	if alive, _ := t.lives(ctx); !alive {
		return
	}
	if err := t.appear(ctx); err != nil {
		t.l.log.Debug("replica_record_failed", zap.Error(err))
	}
}

// verify looks at all keys of the session, without a Raft write: who finds a key
// gone loses that lease alone. It also deletes the keys that nobody works under.
// What cannot be looked at now is looked at next time.
func (t *session) verify(ctx context.Context) {
	t.mu.Lock()
	leases := slices.Collect(maps.Values(t.leases))
	t.mu.Unlock()
	leases = slices.DeleteFunc(leases, func(ls *lease) bool {
		s := ls.state.Load()
		return s != stateHeld && s != stateLeaked
	})
	for chunk := range slices.Chunk(leases, maxBatch/2) {
		var ops api.TxnOps
		var owner []int
		for i, ls := range chunk {
			ops, owner = append(ops, op(api.KVCheckSession, api.KVTxnOp{Key: ls.path, Session: t.id})), append(owner, i)
			switch {
			case ls.reused == "" || ls.locked == 0:
			case ls.path == ls.reused:
				// A snapshot that was restored may have brought back the lock of
				// another task, which this session had under the same name.
				ops, owner = append(ops, op(api.KVCheckIndex, api.KVTxnOp{Key: ls.path, Index: ls.locked})), append(owner, i)
			case ls.state.Load() == stateHeld:
				// Without the marker others may lock the task under its reused name.
				ops, owner = append(ops, op(api.KVGet, api.KVTxnOp{Key: t.l.markerKey(groupOf(ls.task))})), append(owner, i)
			}
		}
		rctx, cancel := context.WithTimeout(ctx, requestTimeout)
		_, resp, _, err := t.l.keys.Txn().Txn(ops, t.l.query(rctx))
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
			if !gone[ls] && t.lockedForAnother(ctx, ls) {
				gone[ls] = true
			}
		}
		// All keys go when the session does. That is another story.
		if len(gone) > 0 {
			if alive, _ := t.lives(ctx); !alive {
				return
			}
		}
		var left []*lease
		for _, ls := range chunk {
			switch leaked := ls.state.Load() == stateLeaked; {
			case leaked && gone[ls]:
				t.settle(ls, true)
			case leaked && len(resp.Errors) == len(gone)+len(written):
				left = append(left, ls)
			case gone[ls]:
				ls.revoke()
			}
		}
		if len(left) > 0 {
			t.l.deleteKeys(ctx, left)
		}
	}
}

// lockedForAnother reports whether the reused name of a lease, which somebody has written
// to since it was locked, is not locked for its task any more.
func (t *session) lockedForAnother(ctx context.Context, ls *lease) bool {
	pair, err := t.l.get(ctx, ls.path)
	return err == nil && (pair == nil || pair.Session != t.id || namesAnother(pair.Value, ls.key))
}

// lastWait bounds how long the end of a session waits for those who hold on to it.
const lastWait = time.Second

// end ends the session and lets Consul forget the replica. What the holders have let go
// of was given back by Release.
//
// A lease that is still held belongs to a handler that ignores its context. It runs
// until it returns or the process exits, which is some milliseconds away in most
// programs. So its key is not deleted, and its slot is not left: somebody else could
// begin at once. Both go with the session. Consul then keeps the key from others for
// the lock-delay, and replicas count the slot as taken for at least as long. The
// cluster's list is not told that the replica has stopped: others take the task over
// when they have heard nothing for lock.Silence, or at once if a supervisor tells them
// that the process is gone.
func (t *session) end(ctx context.Context) {
	held := t.held()
	t.lose(fmt.Errorf("%w: the replica ends its session", lock.ErrLost))
	if held {
		// What still runs has its deadline now, as it has when the session is lost, and
		// the margin is the time that it has to end before the session does.
		timer := time.NewTimer(min(t.l.cfg.Margin, lastWait))
		defer timer.Stop()
		select {
		case <-t.empty:
		case <-timer.C:
		}
		held = t.held()
	}
	t.endDead(ctx)
	if t.cluster != "" && !held {
		if t.leave(ctx, false) != nil && !mutant.Stopped { // the others will hear no heartbeat
			ctx, cancel := context.WithTimeout(ctx, shutdownTimeout)
			defer cancel()
			_, _ = t.l.heartbeats.KV().Put(&api.KVPair{Key: t.l.stoppedKey(t.id), Value: t.card()}, t.l.write(ctx))
		}
	}
}

// endDead ends the session, if Consul still has it, and the registration.
func (t *session) endDead(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, shutdownTimeout)
	defer cancel()
	var errs []error
	if t.id != "" {
		_, err := t.l.heartbeats.Session().Destroy(t.id, t.l.write(ctx))
		errs = append(errs, err, t.endPool(ctx))
	}
	if t.service != "" {
		err := t.l.heartbeats.Agent().ServiceDeregisterOpts(t.service, t.l.query(ctx))
		var status api.StatusError
		if errors.As(err, &status) && status.Code == http.StatusNotFound {
			err = nil
		}
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		t.l.log.Debug("session_end_failed", zap.String("session", t.id), zap.Error(err))
	}
}

// drain waits until the work of a lost session has ended, then ends the session
// in case Consul still has it: others need not wait for it to expire. Work that
// goes on for longer than Consul would have kept the session is not waited for;
// nor is any once ctx ends. Its keys then go into the lock-delay. The cluster's list
// learns of it when the work has ended, however long that takes.
func (t *session) drain(ctx context.Context) {
	t.mu.Lock()
	maps.DeleteFunc(t.leases, func(_ string, ls *lease) bool { return ls.state.Load() == stateLeaked })
	maps.DeleteFunc(t.slots, func(sl *slot, _ bool) bool { return sl.state.Load() == stateLeaked })
	t.closeIfEmpty()
	t.mu.Unlock()
	timer := time.NewTimer(2 * t.l.cfg.SessionTTL)
	defer timer.Stop()
	select {
	case <-t.empty:
	case <-timer.C:
	case <-ctx.Done():
	}
	t.endDead(context.WithoutCancel(ctx))
	if t.cluster == "" {
		return
	}
	select {
	case <-t.empty:
	case <-ctx.Done():
	}
	for failures := 1; ctx.Err() == nil && t.leave(ctx, true) != nil; failures++ {
		pause(ctx, backoff(failures))
	}
}

// leave tells the cluster's list that the session is over. As long as it has not heard
// that, a Consul that was wiped is not adopted.
func (t *session) leave(ctx context.Context, lost bool) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	return t.l.cluster.Leave(ctx, t.id, lost)
}

// count returns how many leases the session has.
func (t *session) count() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.leases) + len(t.slots)
}

// held reports whether the holder of a lease or a slot has not let go yet.
func (t *session) held() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	held := func(state int32) bool { return state == stateHeld || state == stateRevoked }
	for _, ls := range t.leases {
		if held(ls.state.Load()) {
			return true
		}
	}
	for sl := range t.slots {
		if held(sl.state.Load()) {
			return true
		}
	}
	return false
}

// reserve puts a lease on the session's list, unless another has its key.
func (t *session) reserve(ls *lease) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, taken := t.leases[ls.own]; taken && !mutant.List {
		return false
	}
	t.leases[ls.own] = ls
	if ls.reused != "" {
		ls.taken = t.names[ls.reused] != nil || t.isBurnt(ls.reused)
		if t.names[ls.reused] == nil {
			t.names[ls.reused] = ls
		}
	}
	return true
}

// isBurnt reports whether a request about a reused name was not answered so lately that
// the name must not be used. t.mu is held.
func (t *session) isBurnt(name string) bool {
	at, ok := t.burnt[name]
	if ok && boottime.Now().Sub(at) > burntFor {
		delete(t.burnt, name)
		return false
	}
	return ok
}

// settle is called when nobody works under a lease any more. If its key is gone
// for sure the lease is taken off the list; if not, or if a request that we gave
// up on may be applied still, verify will see to the key. A lost session has no
// such worries: Consul deletes its keys with the session.
func (t *session) settle(ls *lease, gone bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ctx.Err() == nil && (!gone || ls.doubtful()) {
		ls.state.Store(stateLeaked)
		return
	}
	delete(t.leases, ls.own)
	if t.names[ls.reused] == ls {
		delete(t.names, ls.reused)
	}
	if ls.burnt {
		t.burnt[ls.reused] = boottime.Now()
	}
	t.closeIfEmpty()
}

// closeIfEmpty tells retire that the last lease of a lost session is gone. t.mu is
// held.
func (t *session) closeIfEmpty() {
	if len(t.leases)+len(t.slots) > 0 || t.ctx.Err() == nil {
		return
	}
	select {
	case <-t.empty:
	default:
		close(t.empty)
	}
}

// every calls f at once and then at intervals of d, give or take a tenth, until
// ctx ends. When f reports failure it is called again within a second.
func every(ctx context.Context, d time.Duration, f func(context.Context) bool) {
	for ctx.Err() == nil {
		began := time.Now()
		wait := d
		if !f(ctx) {
			wait = min(d, time.Second)
		}
		pause(ctx, wait-wait/10+rand.N(wait/10+1)-time.Since(began))
	}
}
