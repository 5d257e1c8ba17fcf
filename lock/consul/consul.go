package consul

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/consul/api"
	"go.uber.org/zap"

	"onejob/internal/batch"
	"onejob/lock"
)

const (
	// requestTimeout bounds one request, and all the tries of one transaction.
	requestTimeout = 5 * time.Second

	// shutdownTimeout bounds each of the two steps of the end: giving back the keys,
	// and then the session.
	shutdownTimeout = 2 * time.Second

	// maxBatch is how many operations Consul takes in one transaction.
	maxBatch = 128

	// maxAcquires is how many locks are asked for in one transaction, which has to check
	// the record of the database and some markers of reused names as well.
	maxAcquires = maxBatch - 6

	// maxConns is how many connections are kept for the next request: one for
	// each transaction that may be under way, and for each key that is watched.
	maxConns = 16
)

// Locker implements lock.Locker.
type Locker struct {
	cfg   Config
	log   *zap.Logger
	token tokenFile

	keys       *api.Client // for keys and watches
	heartbeats *api.Client // for what keeps the session alive: nothing else may hold it up

	transports [2]*http.Transport // of both

	acquires batch.Group[*lease]
	releases batch.Group[*lease]

	membership *membership
	cluster    lock.Cluster // whose Consul this must be; nil if any will do

	semaphores registry
	markers    markers
	reuses     atomic.Bool // a reused name was asked for
	reusing    atomic.Bool // all living replicas share locks under reused names

	ahead func() (time.Duration, bool) // of the wall clock; nil but in tests

	// life bounds every transaction. It ends a while after Run was told to
	// stop, so that nobody waits for a Consul that is away.
	life context.Context
	kill context.CancelFunc

	mu       sync.Mutex
	live     *session
	changed  chan struct{}
	lastErr  error
	draining sync.WaitGroup // sessions that are over and still hold keys
}

var _ lock.Locker = (*Locker)(nil)

// New returns a Locker, or everything that is wrong with the configuration. It
// does not talk to Consul; Run does.
func New(cfg Config) (*Locker, error) {
	invalid := cfg.Validate()
	cfg = cfg.WithDefaults()
	secure, err := tlsConfig(cfg.Client.TLSConfig)
	if err := errors.Join(invalid, err); err != nil {
		return nil, err
	}
	l := &Locker{cfg: cfg, log: cfg.Log, changed: make(chan struct{})}
	l.life, l.kill = context.WithCancel(context.Background())
	l.membership = newMembership(l)
	l.acquires = batch.Group[*lease]{Commit: func(list []*lease) {
		sent := time.Now()
		l.lockKeys(l.life, list)
		l.measure(MeasureAcquire, len(list), time.Since(sent))
	}, Max: maxAcquires, Parallel: 2}
	l.releases = batch.Group[*lease]{Commit: func(list []*lease) {
		sent := time.Now()
		l.deleteKeys(l.life, list)
		l.measure(MeasureRelease, len(list), time.Since(sent))
	}, Max: maxBatch, Parallel: 2}

	// As in the library, a token file goes before a token.
	clientConfig := *cfg.Client
	if clientConfig.TokenFile == "" {
		clientConfig.TokenFile = os.Getenv(api.HTTPTokenFileEnvName)
	}
	if clientConfig.TokenFile != "" {
		l.token.path = clientConfig.TokenFile
		if err := l.token.read(); err != nil {
			return nil, fmt.Errorf("consul token file: %w", err)
		}
	}
	if clientConfig.HttpClient != nil {
		return nil, errors.New("consul: a ready-made HttpClient cannot be used; set Client.Transport instead")
	}
	if clientConfig.Transport == nil {
		clientConfig.Transport = api.DefaultConfig().Transport
	}
	for i, c := range []**api.Client{&l.keys, &l.heartbeats} {
		own := clientConfig
		own.Transport = transport(&clientConfig, secure)
		l.transports[i] = own.Transport
		if cfg.RoundTripper != nil {
			own.HttpClient = &http.Client{Transport: cfg.RoundTripper}
		}
		client, err := api.NewClient(&own)
		if err != nil {
			return nil, fmt.Errorf("consul: %w", err)
		}
		*c = client
	}
	return l, nil
}

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

	var said trouble
	for failures := 0; ctx.Err() == nil; {
		t, err := l.begin(ctx)
		if err != nil {
			if ctx.Err() != nil {
				break
			}
			failures++
			err = l.cfg.explain(err)
			l.setError(err)
			if d := describe(err); failures%30 == 0 || d != said {
				said = d
				fields := []zap.Field{zap.Error(err), zap.Int("failures", failures)}
				switch d {
				case isAnother:
					l.log.Warn("consul_is_another", fields...)
				case listUnavailable:
					l.log.Warn("list_unavailable", fields...)
				default:
					l.log.Warn("consul_unavailable", fields...)
				}
			}
			pause(ctx, backoff(failures))
			continue
		}
		failures, said = 0, none
		l.log.Info("session_started", zap.String("session", t.id), zap.String("liveness", string(l.cfg.Liveness)))
		l.enter(t)
		t.live(ctx)
		l.leave()
		if ctx.Err() != nil {
			t.end(context.WithoutCancel(ctx))
			break
		}
		l.measure(MeasureLost, 1, 0)
		l.log.Warn("session_lost", zap.String("session", t.id), zap.Error(context.Cause(t.ctx)), zap.Int("leases", t.count()))
		l.draining.Go(func() { t.drain(ctx) })
	}
	return nil
}

// trouble is why no session can be had.
type trouble int

const (
	none trouble = iota
	unavailable
	isAnother       // cluster's
	listUnavailable // of the cluster
)

func describe(err error) trouble {
	var list listError
	switch {
	case errors.Is(err, lock.ErrOtherCluster):
		return isAnother
	case errors.As(err, &list):
		return listUnavailable
	}
	return unavailable
}

// listError is an error of the cluster's list, not of Consul.
type listError struct{ error }

func (e listError) Unwrap() error { return e.error }

// Ready returns nil as soon as there is a session. If ctx ends before, it
// returns what keeps the session from coming.
func (l *Locker) Ready(ctx context.Context) error {
	for {
		changed := l.Changed()
		if l.current() != nil {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			l.mu.Lock()
			defer l.mu.Unlock()
			if l.lastErr != nil {
				return fmt.Errorf("consul: %w", l.lastErr)
			}
			return errors.New("consul: no session yet")
		}
	}
}

// Session implements lock.Locker.
func (l *Locker) Session() string {
	if t := l.current(); t != nil {
		return t.id
	}
	return ""
}

// Changed implements lock.Locker.
func (l *Locker) Changed() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.changed
}

// Dead implements lock.Locker.
func (l *Locker) Dead(ctx context.Context, sessions []string) ([]string, error) {
	return l.membership.dead(ctx, sessions)
}

func (l *Locker) taskKey(key string) string        { return l.cfg.Prefix + "/tasks/" + key }
func (l *Locker) replicaKey(session string) string { return l.cfg.Prefix + "/replicas/" + session }

// current returns the session that we may believe in now, or nil.
func (l *Locker) current() *session {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.live == nil || l.live.deadline().Passed() {
		return nil
	}
	return l.live
}

func (l *Locker) enter(t *session) {
	l.mu.Lock()
	l.live, l.lastErr = t, nil
	l.mu.Unlock()
	l.signal()
}

func (l *Locker) leave() {
	l.mu.Lock()
	l.live = nil
	l.mu.Unlock()
	l.signal()
}

func (l *Locker) setError(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lastErr = err
}

// signal wakes everybody who waits on Changed.
func (l *Locker) signal() {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.changed)
	l.changed = make(chan struct{})
}

// query returns options for a read that the leader answers, after it has made
// sure that it still is the leader.
func (l *Locker) query(ctx context.Context) *api.QueryOptions {
	q := &api.QueryOptions{RequireConsistent: true, Token: l.token.current()}
	return q.WithContext(ctx)
}

func (l *Locker) write(ctx context.Context) *api.WriteOptions {
	w := &api.WriteOptions{Token: l.token.current()}
	return w.WithContext(ctx)
}

// backoff returns how long to wait after so many failures: 100 ms doubling up
// to 2 s, with jitter, so that replicas do not come back in step.
func backoff(failures int) time.Duration {
	d := min(2*time.Second, 100*time.Millisecond<<min(failures-1, 5))
	return d/2 + rand.N(d/2+1)
}

// pause waits for d, or for ctx to end.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
