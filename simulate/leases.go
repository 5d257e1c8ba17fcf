//go:build simulate

package simulate

import (
	"context"
	"fmt"
	"slices"
	"time"

	"onejob/boottime"
	"onejob/lock"
	"onejob/lock/consul"
	"onejob/simulate/fakeconsul"
)

// handlerGrace is how long a handler may go on when its lease has ended: a command is killed
// by then.
const handlerGrace = 500 * time.Millisecond

const prefix = "service/onejob"

var timings = []consul.Config{
	{},
	{CheckTTL: 5 * time.Second, Margin: 700 * time.Millisecond, SessionTTL: 10 * time.Second, Renew: 2 * time.Second, LockDelay: 2 * time.Second, Verify: time.Second},
	{Liveness: consul.TTL, SessionTTL: 10 * time.Second, Renew: 2 * time.Second, Verify: 2 * time.Second},
}

// leases is what the world knows of leases.
type leases struct {
	replicas  []*replica // the last process of each machine
	started   []*replica // all processes
	holders   []*holder
	revoked   map[string]time.Duration // sessions that were ended by hand, or by a restore
	deleted   map[string]time.Duration // keys that were deleted by hand
	believed  map[string]belief        // by session
	restored  time.Duration            // when a snapshot was restored last
	byHand    bool                     // what ends now is ended by hand
	settled   bool                     // nothing is broken any more
	over      bool                     // nothing is started any more
	handovers int
	serial    int
}

// replica is one that locks keys, works, and releases them.
type replica struct {
	w      *world
	m      *machine
	life   int // which process of the machine it is
	locker *consul.Locker
	stop   func() // as a signal does
	kill   func()
	done   chan struct{} // closed when it has stopped
	begun  int           // handlers, since the world has settled

	process string // with a worker
	began   time.Duration
	told    time.Duration // when it was told to stop; zero if it was not
}

// belief is the latest deadline that was seen of a lease under a session.
type belief struct {
	m        *machine
	deadline boottime.Instant
	behind   time.Duration // by how much the machine's clock had been paused
	stood    bool          // it may have been counted from before a pause
}

// holder is one lease, from the moment at which it was asked for until it was released.
type holder struct {
	r       *replica
	life    int
	key     string
	value   string
	session string
	lease   lock.Lease
	asked   time.Duration
	inside  bool

	deadline boottime.Instant // as it was last seen, at that moment of the machine's clock
	seen     boottime.Instant
	reported bool
}

func (w *world) timing() consul.Config { return timings[w.plan.Timing].WithDefaults() }

// start starts a process of the machine, with a replica in it.
func (w *world) start(m *machine) *replica {
	if w.plan.Mode == Workers {
		return w.startWorker(m)
	}
	m.life++
	r := &replica{w: w, m: m, life: m.life, done: make(chan struct{})}
	w.started = append(w.started, r)
	running, stop := context.WithCancel(context.Background())
	working, stopWork := context.WithCancel(running)
	abrupt := w.rand.IntN(3) == 0
	r.stop = func() {
		stopWork()
		if abrupt {
			stop()
		}
	}
	r.kill = stop
	life := m.life
	go func() {
		m.process()
		locker, _ := w.newLocker(m, fmt.Sprintf("r%d.%d", m.id, life))
		r.locker = locker
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			if err := locker.Run(running, nil); err != nil {
				w.violate("run", "replica %d: %v", m.id, err)
			}
		}()
		workers := make(chan struct{})
		for i := range w.plan.Workers + 1 {
			go func() {
				r.work(working, life, i == w.plan.Workers)
				workers <- struct{}{}
			}()
		}
		if w.plan.Seed%3 == 0 {
			go func() {
				_ = lock.Lead(working, locker, func(ctx context.Context) error { return r.lead(ctx, working, life) })
				workers <- struct{}{}
			}()
		} else {
			go func() { workers <- struct{}{} }()
		}
		for range w.plan.Workers + 2 {
			<-workers
		}
		stop()
		<-ended
		close(r.done)
	}()
	return r
}

// crash ends the process of the machine, at once.
func (w *world) crash(m *machine) {
	r := w.replicas[m.id]
	w.strike(m)
	w.noteDeath(r)
	w.handlers = slices.DeleteFunc(w.handlers, func(h *handler) bool { return h.m == m })
	w.holders = slices.DeleteFunc(w.holders, func(h *holder) bool { return h.r == r })
	m.life++
	if m.paused >= 0 { // the next process does not run on a clock that stands still
		m.behind += w.now() - m.paused
		m.paused = -1
	}
	m.thaw() // for the goroutines to end
	r.kill()
}

// work locks keys, one after the other. One worker of each replica has a key of its own, and
// keeps it for long: some lease is to be there whenever a session ends.
func (r *replica) work(ctx context.Context, life int, alone bool) {
	w := r.w
	for ctx.Err() == nil && r.m.life == life {
		session := r.locker.Session()
		if session == "" {
			pause(ctx, between(w.rand, 50*time.Millisecond, 300*time.Millisecond))
			continue
		}
		key := fmt.Sprintf("k%d", w.rand.IntN(w.plan.Keys))
		w.serial++
		switch {
		case alone:
			key = fmt.Sprintf("own%d", r.m.id)
		case w.rand.IntN(4) == 0: // nobody asks for it again, and so finds what is left of it
			key = fmt.Sprintf("once%d", w.serial)
		}
		value := fmt.Sprintf("{\"n\":%d}", w.serial)
		asked := w.now()
		lease, err := r.locker.Acquire(ctx, lock.Request{Session: session, Key: key, Value: []byte(value)})
		w.gate()
		if err != nil {
			pause(ctx, between(w.rand, 10*time.Millisecond, 400*time.Millisecond))
			continue
		}
		h := &holder{r: r, life: life, key: key, value: value, session: session, lease: lease, asked: asked}
		d := short(w.rand, 15*time.Second)
		if alone {
			d = time.Minute
		}
		if w.settled {
			d = 20 * time.Millisecond
		}
		r.hold(ctx, h, d)
		err = lease.Release(context.Background())
		w.note("replica %d: released %s: %v", r.m.id, key, err)
		if path := prefix + "/tasks/" + key; err == nil && r.m.life == life && !w.disturbed(r.m.id, w.now()-20*time.Second, w.now()) && !w.repeated(r.m.id, w.now()) {
			if by, v := w.consul.Held(path); by == session && string(v) == value {
				w.violate("released", "replica %d has released %s, and still holds it", r.m.id, key)
			}
		}
		h.leave()
		rest := 50 * time.Millisecond
		if w.settled {
			rest = 2 * time.Second
		}
		pause(ctx, between(w.rand, 0, rest))
	}
}

// lead is the leader's work.
func (r *replica) lead(leading, ctx context.Context, life int) error {
	w := r.w
	// Lead keeps the lease to itself; its context is what a leader has.
	h := &holder{r: r, life: life, key: "leader", session: r.locker.Session(), lease: contextLease{leading}, asked: w.now()}
	r.hold(ctx, h, short(w.rand, 8*time.Second))
	h.leave()
	pause(ctx, between(w.rand, 0, time.Second))
	return nil
}

// contextLease is a lease of which only the context is known.
type contextLease struct{ ctx context.Context }

func (l contextLease) Context() context.Context { return l.ctx }
func (l contextLease) Deadline() boottime.Instant {
	if l.ctx.Err() != nil {
		return boottime.Now()
	}
	return boottime.Now().Add(time.Hour)
}
func (contextLease) Release(context.Context) error { return nil }

// hold works under a lease, as worker/attempt.go does, until the work is done, or until some
// time after the lease has ended.
func (r *replica) hold(ctx context.Context, h *holder, d time.Duration) {
	w := r.w
	if r.m.life != h.life {
		return
	}
	w.holders = append(w.holders, h)
	if h.lease.Deadline().Passed() || h.lease.Context().Err() != nil {
		w.note("replica %d: %s not begun", r.m.id, h.key)
		return
	}
	h.inside = true
	w.handovers++
	r.begun++
	w.note("replica %d: begins %s under %s", r.m.id, h.key, h.session)
	w.check()
	until := w.now() + d
	for w.now() < until && ctx.Err() == nil {
		h.see()
		step := time.NewTimer(min(between(w.rand, 30*time.Millisecond, 300*time.Millisecond), until-w.now()))
		select {
		case <-step.C:
		case <-h.lease.Context().Done():
		case <-ctx.Done():
		}
		step.Stop()
		w.gate()
		if r.m.life != h.life {
			return
		}
		if h.lease.Context().Err() != nil {
			break
		}
	}
	if cause := context.Cause(h.lease.Context()); cause != nil {
		w.note("replica %d: told to end %s: %v", r.m.id, h.key, cause)
		time.Sleep(between(w.rand, 0, handlerGrace))
		w.gate()
	}
	if h.inside {
		w.note("replica %d: ends %s", r.m.id, h.key)
	}
	h.inside = false
}

func (h *holder) leave() {
	h.inside = false
	h.r.w.holders = slices.DeleteFunc(h.r.w.holders, func(o *holder) bool { return o == h })
}

// see looks at the lease with the eyes of its holder.
func (h *holder) see() {
	deadline, now := h.lease.Deadline(), boottime.Now()
	if h.r.m.life != h.life || h.key == "leader" {
		return
	}
	if h.deadline != 0 && h.deadline <= h.seen && deadline > now {
		h.r.w.violate("revived", "replica %d: the deadline of %s had passed by %v, and now is %v ahead", h.r.m.id, h.key, h.seen.Sub(h.deadline), deadline.Sub(now))
	}
	if now.Sub(deadline) > 700*time.Millisecond && h.lease.Context().Err() == nil && !h.r.m.stood() {
		h.r.w.violate("context", "replica %d: the deadline of %s has passed by %v, and its context lives", h.r.m.id, h.key, now.Sub(deadline))
	}
	h.deadline, h.seen = deadline, now
	h.r.w.believe(h.r.m, h.session, deadline)
}

func (w *world) believe(m *machine, session string, deadline boottime.Instant) {
	if w.believed == nil {
		w.believed = map[string]belief{}
	}
	if b := w.believed[session]; b.deadline < deadline {
		w.believed[session] = belief{m, deadline, m.behind, m.stood()}
	}
}

// excused reports whether somebody else may be inside together with this holder: its process
// cannot act, or has only just woken up, or its lock was taken away by hand.
func (h *holder) excused() bool {
	w := h.r.w
	if h.r.m.stood() {
		return true
	}
	at := time.Duration(-1)
	if t, ok := w.revoked[h.session]; ok {
		at = t
	}
	if t, ok := w.deleted[h.key]; ok && t >= h.asked {
		at = max(at, t)
	}
	if w.restored >= h.asked {
		at = max(at, w.restored)
	}
	return at >= 0 && w.unnoticed(h.r.m.id, at)
}

// unnoticed reports whether a replica may not have noticed yet what was taken from it by hand at a
// moment.
func (w *world) unnoticed(who int, at time.Duration) bool {
	cfg := w.timing()
	patience := cfg.Verify + cfg.Verify/5 + time.Second + handlerGrace
	if w.disturbed(who, at-20*time.Second, w.now()) {
		patience = 2*cfg.SessionTTL + 10*time.Second
	}
	return w.now()-at < patience
}

// check looks whether two work on one key.
func (w *world) check() {
	for i, a := range w.holders {
		for _, b := range w.holders[i+1:] {
			if a.key == b.key && a.inside && b.inside && !(a.reported && b.reported) && !a.excused() && !b.excused() {
				a.reported, b.reported = true, true
				w.violate("two inside", "replicas %d (session %s) and %d (session %s) work on %s", a.r.m.id, a.session, b.r.m.id, b.session, a.key)
			}
		}
	}
}

// sessionEnded is called by Consul when a session ends.
func (w *world) sessionEnded(session string, why fakeconsul.End) {
	w.note("session %s has ended: %s", session, why)
	if _, revoked := w.revoked[session]; revoked || w.byHand || why == fakeconsul.Forgotten {
		w.rob(session)
		return
	}
	if why == fakeconsul.Destroyed || why == fakeconsul.Gone {
		return // its own replica did it, or its agent, which forgot the check
	}
	b := w.believed[session]
	if b.m == nil || b.m.paused >= 0 || b.m.behind != b.behind || b.stood { // a pause has moved the deadline
		return
	}
	cfg := w.timing()
	margin := cfg.Margin
	// The deadline counts from a request that was sent so much earlier, at most: if that was before a
	// pause, the clock that it was counted by stood still since, however late the answer came.
	if b.deadline.Add(margin-max(cfg.SessionTTL, cfg.CheckTTL)) <= b.m.clockAt(b.m.resumed) {
		return
	}
	if left := b.deadline.Sub(b.m.clockAt(w.now())); left > -margin {
		w.violate("margin", "the session %s of replica %d ended %v before the deadline of its leases, not %v after it", session, b.m.id, left, margin)
	}
}

// rob notes that a session was taken away by hand.
func (w *world) rob(session string) {
	if w.revoked == nil {
		w.revoked = map[string]time.Duration{}
	}
	w.revoked[session] = w.now()
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
