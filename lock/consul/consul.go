package consul

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"
	"unicode/utf8"

	"go.uber.org/zap"

	"onejob/boottime"
	"onejob/internal/retry"
	"onejob/lock"
	"onejob/lock/internal/hold"
)

// Locker implements lock.Locker.
type Locker struct {
	*client
	*locks
	membership *membership
	limits     *registry
	cluster    lock.Cluster // whose Consul this must be; nil if any will do

	ahead func() (time.Duration, bool) // of the wall clock; nil but in tests

	// kill ends the life that bounds every transaction. It does so a while after Run was
	// told to stop, so that nobody waits for a Consul that does not answer.
	kill context.CancelFunc

	present  hold.Present[*session]
	draining sync.WaitGroup // sessions that are over and still hold keys
}

var (
	_ lock.Locker   = (*Locker)(nil)
	_ lock.Reporter = (*Locker)(nil)
	_ lock.Timed    = (*Locker)(nil)
)

// New returns a Locker, or everything that is wrong with the configuration. It
// does not talk to Consul; Run does.
func New(cfg Config) (*Locker, error) {
	invalid := cfg.Validate()
	cfg = cfg.WithDefaults()
	secure, err := tlsConfig(cfg.Client.TLSConfig)
	if err := errors.Join(invalid, err); err != nil {
		return nil, err
	}
	c, err := newClient(&cfg, secure)
	if err != nil {
		return nil, err
	}
	l := &Locker{client: c}
	l.membership = newMembership(c, l.present.Changed.Send)
	l.membership.own = func() (session, cluster string, reappear func(context.Context)) {
		if t := l.current(); t != nil {
			return t.id, t.cluster, t.reappear
		}
		return "", "", nil
	}
	life, kill := context.WithCancel(context.Background())
	l.kill = kill
	l.locks = newLocks(life, c, l.membership.reusing.Load)
	l.limits = &registry{client: c, members: l.membership, changed: &l.present.Changed, life: life, semaphores: map[string]*semaphore{}}
	return l, nil
}

// Times implements lock.Timed: the lock-delay counts from the end of the session.
func (l *Locker) Times() (margin, lockDelay time.Duration) { return l.cfg.Margin, l.cfg.LockDelay }

// Run implements lock.Locker. It may be called once. When ctx has ended it
// returns within about five seconds, whether or not Consul answers. Release leases
// before that: the keys of those that are held then are locked for the lock-delay.
func (l *Locker) Run(ctx context.Context, cluster lock.Cluster) error {
	if l.cluster = cluster; cluster != nil && l.cfg.Replica.Process == "" {
		l.cfg.Replica.Process = cluster.Process()
	}
	defer func() {
		for _, t := range l.transports {
			t.CloseIdleConnections()
		}
	}()
	defer l.kill()
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(shutdownTimeout, l.kill) })
	defer stop()

	watchCtx, stopWatch := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	wg.Go(func() { l.membership.watch(watchCtx) })
	defer wg.Wait()
	defer stopWatch()
	defer l.draining.Wait()

	said := "" // the event
	for failures := 0; ctx.Err() == nil; {
		t := newSession(l.locks, l.limits, l.cluster, l.ahead)
		if err := t.begin(ctx); err != nil {
			if ctx.Err() != nil {
				break
			}
			failures++
			err = l.explain(err)
			l.present.Fail(err)
			switch {
			case errors.Is(err, lock.ErrOtherCluster):
				l.unavailable("consul_is_another", &said, err, failures)
			case errors.As(err, new(listError)):
				l.unavailable("list_unavailable", &said, err, failures)
			default:
				l.unavailable("consul_unavailable", &said, err, failures)
			}
			retry.Pause(ctx, retry.Backoff(failures))
			continue
		}
		failures, said = 0, ""
		l.cfg.Log.Info("session_started", zap.String("session", t.id), zap.String("liveness", string(l.cfg.Liveness)))
		l.present.Set(t)
		t.live(ctx)
		l.present.Set(nil)
		if ctx.Err() != nil {
			t.end(context.WithoutCancel(ctx))
			break
		}
		l.cfg.measure(MeasureLost, 1, 0)
		l.cfg.Log.Warn("session_lost", zap.String("session", t.id), zap.Error(t.Lost()), zap.Int("leases", t.count()))
		l.draining.Go(func() { t.drain(ctx) })
	}
	return nil
}

// unavailable logs why no session can be had, if that is news or has lasted for long.
func (l *Locker) unavailable(event string, said *string, err error, failures int) {
	if failures%30 == 0 || event != *said {
		*said = event
		l.cfg.Log.Warn(event, zap.Error(err), zap.Int("failures", failures))
	}
}

// Ready returns nil as soon as there is a session. If ctx ends before, it
// returns what keeps the session from coming.
func (l *Locker) Ready(ctx context.Context) error { return l.present.Wait(ctx, "consul") }

// current returns the session that we may believe in now, or nil.
func (l *Locker) current() *session { return l.present.Current() }

// Session implements lock.Locker.
func (l *Locker) Session() string {
	if t := l.current(); t != nil {
		return t.id
	}
	return ""
}

// Changed implements lock.Locker.
func (l *Locker) Changed() <-chan struct{} { return l.present.Changed.Next() }

// LeaseLeft returns how long leases will last if no further heartbeat is acknowledged, and
// zero while there is no session.
func (l *Locker) LeaseLeft() time.Duration {
	t := l.current()
	if t == nil {
		return 0
	}
	return max(0, t.Deadline().Until())
}

// SlotDelay returns for how long a slot may count as taken whose holder has died: Take says
// lock.ErrDelayed for so long. Each Locker counts it from when it first sees that the holder's
// session has ended, so a program that asks once, and then ends, never has that slot.
func (l *Locker) SlotDelay() time.Duration { return l.cfg.slotDelay() }

// Dead implements lock.Locker.
func (l *Locker) Dead(ctx context.Context, sessions []string) ([]string, error) {
	return l.membership.dead(ctx, sessions)
}

// Heard implements lock.Locker.
func (l *Locker) Heard(session string, sent boottime.Instant) {
	if t := l.current(); t != nil && t.id == session {
		t.heard.Store(int64(sent))
		t.extend(hold.Silence, l.cfg.silence(), sent)
	}
}

// Lose implements lock.Locker.
func (l *Locker) Lose(session string, why error) {
	if t := l.current(); t != nil && t.id == session {
		t.lose(why)
	}
}

// Semaphores returns the semaphores below the Locker's prefix. Only Take needs a
// Locker that runs.
func (l *Locker) Semaphores() lock.Semaphores { return semaphores{l.limits, &l.present} }

// Acquire implements lock.Locker.
func (l *Locker) Acquire(ctx context.Context, r lock.Request) (lock.Lease, error) {
	switch {
	case r.Key == "" || len(r.Key) > maxKey:
		return nil, fmt.Errorf("acquire a lock: the key is %d bytes long, not 1 to %d", len(r.Key), maxKey)
	case !utf8.ValidString(r.Key): // JSON would make several such keys one
		return nil, fmt.Errorf("acquire a lock: the key %q is not valid UTF-8", r.Key)
	case len(r.Value) > maxValue:
		return nil, fmt.Errorf("acquire lock %s: its value is %d bytes long, more than %d", r.Key, len(r.Value), maxValue)
	case r.Task < 0 || r.Task > 0 && !isID(r.Key, r.Task):
		return nil, fmt.Errorf("acquire lock %s: it is not the ID of task %d", r.Key, r.Task)
	}
	ls, err := l.acquire(ctx, r, l.taskKey(r.Key))
	if err != nil {
		return nil, err // not a nil *lease in a lock.Lease
	}
	return ls, nil
}

// isID reports whether a key is the ID of a task.
func isID(key string, task int64) bool {
	var id [20]byte
	return key == string(strconv.AppendInt(id[:0], task, 10))
}

func (l *Locker) acquire(ctx context.Context, r lock.Request, path string) (*lease, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	t := l.current()
	if t == nil || t.id != r.Session {
		return nil, lock.ErrLost
	}
	return l.locks.acquire(ctx, t.leases, r, path)
}
