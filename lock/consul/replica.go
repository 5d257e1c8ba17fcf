package consul

import (
	"cmp"
	"context"
	"errors"
	"fmt"
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
	"onejob/internal/retry"
	"onejob/lock"
	"onejob/lock/internal/hold"
)

const (
	// shutdownTimeout bounds each of the two steps of the end: giving back the keys,
	// and then the session.
	shutdownTimeout = 2 * time.Second

	// lastWait bounds how long the end of a session waits for those who hold on to it.
	lastWait = time.Second

	// listMaxWait is how long the cluster's list may take at most to acknowledge a heartbeat
	// before Consul gets one.
	listMaxWait = 2500 * time.Millisecond
)

// listWait is listMaxWait, or less where a long margin makes leases short: there must be time for
// another sign of life, a second later, if the first one fails.
func (c Config) listWait() time.Duration {
	return min(listMaxWait, (lock.Silence-c.Margin-time.Second)/2)
}

// A session is the session of this replica, from its creation to its end, with the leases
// and slots under it.
type session struct {
	ttlSession
	list    lock.Cluster // the cluster's list that it is on; nil if there is none
	cluster string       // the id that this Consul had; empty if nobody asks
	service string       // as which we are registered; empty with liveness ttl

	signs atomic.Int64 // of life, in the replica's key
	heard atomic.Int64 // when the heartbeat was sent that the list acknowledged last

	locks   *locks
	leases  *leases
	slots   *slots
	empty   chan struct{} // closed when the session is over and the last lease gone
	emptied sync.Once

	mu      sync.Mutex
	trouble error // what the last request that failed to keep the session alive makes of its end
}

// newSession returns a session that has not begun. The source of the wall clock's jumps is
// nil but in tests.
func newSession(k *locks, limits *registry, list lock.Cluster, source func() (time.Duration, bool)) *session {
	t := &session{list: list, locks: k, empty: make(chan struct{}), trouble: errUnheard}
	t.ttlSession = ttlSession{client: k.client, kind: "session", Session: hold.NewSession(source, func(jump time.Duration) {
		t.cfg.Log.Warn("clock_jumped", zap.String("session", t.id), zap.Duration("jump", jump), zap.Int("leases", t.count()))
	})}
	t.leases = &leases{ttlSession: &t.ttlSession, release: k.releases.Do, removed: t.closeIfEmpty, own: map[string]*lease{}, names: map[string]*lease{}, burnt: map[string]boottime.Instant{}}
	t.slots = &slots{pool: pool{ttlSession: &t.ttlSession}, limits: limits, removed: t.closeIfEmpty, list: map[*slot]bool{}}
	return t
}

// begin registers the replica, creates a session and shows it to the others.
func (t *session) begin(ctx context.Context) (err error) {
	joined := false
	defer func() {
		if err != nil {
			t.endDead(context.WithoutCancel(ctx))
			if joined {
				_ = t.leave(context.WithoutCancel(ctx), false)
			}
		}
	}()

	if t.list != nil {
		if t.cluster, err = t.belong(ctx, t.list); err != nil {
			return err
		}
	}
	if t.cfg.Liveness == Check {
		t.service = "onejob-" + uuid.NewString()
		t.slots.service = t.service
		t.Begin(hold.Check, t.cfg.check(), boottime.Now())
		if err := t.register(ctx); err != nil {
			return fmt.Errorf("register service %s: %w", t.cfg.Service, err)
		}
	}
	if err := t.create(ctx, "onejob "+t.cfg.Replica.Name, t.service); err != nil {
		return fmt.Errorf("create a session: %w", err)
	}
	if t.list != nil {
		sent := boottime.Now()
		joined = true // perhaps, if it fails
		if err := t.join(ctx); err != nil {
			return err
		}
		t.heard.Store(int64(sent))
		t.Begin(hold.Silence, t.cfg.silence(), sent)
	}
	return t.appear(ctx)
}

// join puts the session on the cluster's list.
func (t *session) join(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	if err := t.list.Join(ctx, t.cluster, t.id); err != nil {
		return listError{err}
	}
	return nil
}

// register makes the replica a service with a TTL check. A check that nobody
// feeds any more takes the registration with it after a minute.
func (t *session) register(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	return t.heartbeats.Agent().ServiceRegisterOpts(&api.AgentServiceRegistration{
		ID:   t.service,
		Name: t.cfg.Service,
		Meta: map[string]string{"replica": t.cfg.Replica.Name, "version": t.cfg.Replica.Version},
		Check: &api.AgentServiceCheck{
			CheckID:                        checkID(t.service),
			Name:                           "onejob replica " + t.cfg.Replica.Name,
			TTL:                            t.cfg.CheckTTL.String(),
			Status:                         api.HealthPassing,
			DeregisterCriticalServiceAfter: "1m",
		},
	}, api.ServiceRegisterOpts{Token: t.token.current()}.WithContext(ctx))
}

// appear puts the replica's key there, which tells the others that the session
// lives. It may be called again when somebody deleted the key, or as a sign of life:
// each value is another one.
func (t *session) appear(ctx context.Context) error {
	err := t.txn(ctx, t.heartbeats, api.TxnOps{{KV: &api.KVTxnOp{
		Verb: api.KVLock, Key: t.replicaKey(t.id), Value: t.card(), Session: t.id,
	}}})
	if err != nil {
		return fmt.Errorf("write key %s: %w", t.replicaKey(t.id), err)
	}
	return nil
}

func (t *session) card() []byte {
	r := t.cfg.Replica
	r.Names = names
	return encode(struct {
		Replica
		Signs int64 `json:"signs"` // that were given
	}{r, t.signs.Add(1)})
}

var errUnheard = errors.New("no heartbeat was acknowledged in time")

// failed remembers why a request did not keep the session alive.
func (t *session) failed(what string, err error) {
	t.cfg.Log.Debug(what, zap.Error(err))
	t.mu.Lock()
	defer t.mu.Unlock()
	t.trouble = fmt.Errorf("%w: %w", errUnheard, t.explain(err))
}

// live keeps the session alive until it is lost or ctx ends.
func (t *session) live(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(t.Context(), cancel)
	defer stop()

	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { t.expire(ctx) })
	wg.Go(func() { every(ctx, t.cfg.Renew, t.renew) })
	wg.Go(func() { every(ctx, t.cfg.Renew, t.slots.renew) })
	wg.Go(func() {
		every(ctx, t.cfg.Verify, func(ctx context.Context) bool { t.locks.verify(ctx, t.leases); return true })
	})
	wg.Go(func() { every(ctx, t.cfg.Verify, func(ctx context.Context) bool { t.slots.verify(ctx); return true }) })
	wg.Go(func() { findLeaked(ctx, t.locks, t.leases, t.slots) })
	if t.cluster != "" {
		wg.Go(func() { t.watchCluster(ctx) })
		wg.Go(func() { every(ctx, time.Second, t.speak) })
	}
	if t.service != "" {
		wg.Go(func() { every(ctx, t.cfg.Heartbeat, t.beat) })
	}
	<-ctx.Done()
}

// expire ends the session at its deadline. It looks twice a second at least,
// because timers stand still while the machine is suspended and the deadline
// does not.
func (t *session) expire(ctx context.Context) {
	for ctx.Err() == nil {
		left, why := t.Left()
		if left <= 0 {
			t.mu.Lock()
			why = cmp.Or(why, t.trouble)
			t.mu.Unlock()
			t.lose(why)
			return
		}
		retry.Pause(ctx, min(left, t.slots.expire(), 500*time.Millisecond))
	}
}

// beat feeds the health check, at the local agent, and reports whether it could.
func (t *session) beat(ctx context.Context) bool {
	timing := t.cfg.check()
	rctx, cancel := context.WithTimeout(ctx, max(timing.Heartbeat, timing.Slack()/2))
	defer cancel()
	sent := boottime.Now()
	err := t.heartbeats.Agent().UpdateTTLOpts(checkID(t.service), "", api.HealthPassing, t.query(rctx))
	switch {
	case err == nil:
		t.cfg.measure(MeasureHeartbeat, 1, boottime.Now().Sub(sent))
		t.extend(hold.Check, timing, sent)
		return true
	case strings.Contains(err.Error(), "Unknown check ID"), strings.Contains(err.Error(), "does not have associated TTL"):
		t.lose(errors.New("the agent no longer knows the health check; was it restarted?"))
	case ctx.Err() == nil:
		t.failed("heartbeat_failed", fmt.Errorf("heartbeat: %w", err))
	}
	return false
}

// renew renews the session and reports whether it could.
func (t *session) renew(ctx context.Context) bool {
	took, err := t.ttlSession.renew(ctx)
	if err == nil {
		t.cfg.measure(MeasureRenewal, 1, took)
	} else if t.Lost() == nil && ctx.Err() == nil {
		t.failed("renewal_failed", err)
	}
	return err == nil
}

// watchCluster calls stay whenever this does not look like the cluster's Consul, until ctx
// ends. A Consul that took the place of ours and does not know our session shows at the next
// renewal.
func (t *session) watchCluster(ctx context.Context) {
	for ctx.Err() == nil {
		err := t.follow(ctx, t.clusterKey(), func(pair *api.KVPair, _ bool) bool { return pair == nil || string(pair.Value) != t.cluster })
		if err == nil {
			t.stay(ctx)
		}
		retry.Pause(ctx, time.Second)
	}
}

// stay ends the session if this is the cluster's Consul no more, and puts the cluster's
// id back where somebody deleted it. That this Consul knows our session proves that it
// is ours.
func (t *session) stay(ctx context.Context) {
	if !errors.Is(t.ours(ctx, t.cluster), lock.ErrOtherCluster) {
		return
	}
	if alive, _ := t.lives(ctx); !alive {
		return
	}
	err := t.txn(ctx, t.keys, api.TxnOps{
		{KV: &api.KVTxnOp{Verb: api.KVCheckSession, Key: t.replicaKey(t.id), Session: t.id}},
		{KV: &api.KVTxnOp{Verb: api.KVCAS, Key: t.clusterKey(), Value: []byte(t.cluster)}},
	})
	if err == nil {
		return
	}
	if err := t.ours(ctx, t.cluster); errors.Is(err, lock.ErrOtherCluster) {
		t.lose(err)
	}
}

// speak gives a sign of life to Consul, as a change of the replica's key, each time that it is
// called while the cluster's list does not answer.
func (t *session) speak(ctx context.Context) bool {
	silent := boottime.Now().Sub(boottime.Instant(t.heard.Load()))
	if max(silent, t.Silent(hold.Silence, t.cfg.silence())) < t.cfg.listWait() {
		return true
	}
	sent := boottime.Now()
	if err := t.appear(ctx); err != nil {
		t.failed("sign_of_life_failed", err)
		return false
	}
	t.extend(hold.Silence, t.cfg.silence(), sent)
	return true
}

// reappear is called when the replica's key has vanished: the session has
// ended, or somebody deleted just the key. If Consul cannot tell, the deadline
// will.
func (t *session) reappear(ctx context.Context) {
	if alive, _ := t.lives(ctx); !alive {
		return
	}
	if err := t.appear(ctx); err != nil {
		t.cfg.Log.Debug("replica_record_failed", zap.Error(err))
	}
}

// end ends the session and lets Consul forget the replica. What the holders have let go
// of was given back by Release.
//
// A lease that is still held belongs to a handler that ignores its context. It runs
// until it returns or the process exits, which is some milliseconds away in most
// programs. So its key is not deleted, and its slot is not left: somebody else could
// begin at once. Both go with the session. Consul then keeps the key from others for
// the lock-delay, and replicas count the slot as taken for at least as long. The
// cluster's list is not told that the replica has stopped: others take the task over
// when they have heard nothing for lock.Silence. What the replica has said in Consul then
// tells them that it was a stop, which is not charged to the task as a crash is.
func (t *session) end(ctx context.Context) {
	held := t.busy()
	t.lose(errors.New("the replica ends its session"))
	if held {
		// What still runs has its deadline now, as it has when the session is lost, and
		// the margin is the time that it has to end before the session does.
		select {
		case <-t.empty:
		case <-time.After(min(t.cfg.Margin, lastWait)):
		}
		held = t.busy()
	}
	t.endDead(ctx)
	switch {
	case t.cluster == "":
	case held:
		t.saySo(ctx)
	default:
		t.part(ctx, false)
	}
}

// part tells the cluster's list that the session is over when the replica stops. If the list
// cannot be told, it says so in Consul: the others look there when they miss its heartbeats.
func (t *session) part(ctx context.Context, lost bool) {
	if t.leave(ctx, lost) != nil {
		t.saySo(ctx)
	}
}

// saySo records in Consul that the replica has stopped in order.
func (t *session) saySo(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, shutdownTimeout)
	defer cancel()
	_, _ = t.heartbeats.KV().Put(&api.KVPair{Key: t.stoppedKey(t.id), Value: t.card()}, t.write(ctx))
}

// endDead ends the session, if Consul still has it, and the registration.
func (t *session) endDead(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, shutdownTimeout)
	defer cancel()
	var errs []error
	if t.id != "" {
		errs = append(errs, t.destroy(ctx), t.slots.end(ctx))
	}
	if t.service != "" {
		err := t.heartbeats.Agent().ServiceDeregisterOpts(t.service, t.query(ctx))
		if status, ok := errors.AsType[api.StatusError](err); ok && status.Code == http.StatusNotFound {
			err = nil
		}
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		t.cfg.Log.Debug("session_end_failed", zap.String("session", t.id), zap.Error(err))
	}
}

// drain waits until the work of a lost session has ended, then ends the session
// in case Consul still has it: others need not wait for it to expire. Work that
// goes on for longer than Consul would have kept the session is not waited for;
// nor is any once ctx ends. Its keys then go into the lock-delay. The cluster's list
// learns of it when the work has ended, however long that takes; also if ctx ends before the list
// can be told.
func (t *session) drain(ctx context.Context) {
	for _, h := range t.held() {
		if h.State() == hold.Leaked {
			h.settle(true)
		}
	}
	t.closeIfEmpty()
	select {
	case <-t.empty:
	case <-time.After(2 * t.cfg.SessionTTL):
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
	for failures := 1; ctx.Err() == nil; failures++ {
		if t.leave(ctx, true) == nil {
			return
		}
		retry.Pause(ctx, retry.Backoff(failures))
	}
	if ctx = context.WithoutCancel(ctx); t.busy() {
		t.saySo(ctx)
	} else {
		t.part(ctx, true)
	}
}

// leave tells the cluster's list that the session is over. As long as it has not heard
// that, a Consul that was wiped is not adopted.
func (t *session) leave(ctx context.Context, lost bool) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	return t.list.Leave(ctx, t.id, lost)
}

func (t *session) count() int { return t.leases.count() + t.slots.count() }

// A holding is a lease or a slot under the session.
type holding interface {
	State() hold.State
	settle(gone bool)
}

// held returns the leases and slots under the session.
func (t *session) held() (list []holding) {
	for _, ls := range t.leases.all() {
		list = append(list, ls)
	}
	for _, sl := range t.slots.all() {
		list = append(list, sl)
	}
	return list
}

// busy reports whether the holder of a lease or a slot has not let go yet.
func (t *session) busy() bool {
	return slices.ContainsFunc(t.held(), func(h holding) bool { return h.State() == hold.Held || h.State() == hold.Revoked })
}

// closeIfEmpty tells drain that the last lease of a lost session is gone.
func (t *session) closeIfEmpty() {
	if t.Context().Err() != nil && t.count() == 0 {
		t.emptied.Do(func() { close(t.empty) })
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
		retry.Pause(ctx, wait-wait/10+rand.N(wait/10+1)-time.Since(began))
	}
}
