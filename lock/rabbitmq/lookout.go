package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"onejob/internal/retry"
	"onejob/lock"
)

// The pauses between two looks of those who wait. Where they wait for many semaphores, all of them
// together look some fifty times a second, as those who take slots use the same connection.
const (
	shortestWait = 100 * time.Millisecond
	longestWait  = time.Second
	waitForEach  = 20 * time.Millisecond // lookout of this process

	// listenAgain is after how long a lookout that could not listen to its wake-up queue tries again:
	// the queue goes with its last listener, and that may be just then. Each try costs a channel.
	listenAgain = 15 * time.Second
)

// A lookout holds the callers of this process that wait for slots of one semaphore.
// One of them is on duty: it receives the wake-ups and looks now and then, for all, and
// wakes as many as there are slots, those first who came first. When it leaves,
// another one takes over.
type lookout struct {
	s      *Semaphores
	name   string
	queues names
	users  int           // guarded by Semaphores.waiting
	duty   chan struct{} // holds a token while nobody is on duty
	came   chan struct{} // somebody came who wants a look at once

	mu      sync.Mutex
	waiters []*waiter // those who have not been woken

	// What follows belongs to the one on duty.
	next      time.Time // when to look again
	wait      time.Duration
	seen      time.Time // when the last look began
	view      view      // what it saw
	listening *session
	wakeups   <-chan amqp.Delivery
	stop      func()
	deaf      *session  // could not listen,
	since     time.Time // when it was tried last
}

// A waiter is one call of Await.
type waiter struct {
	woken chan error // gets one
}

// Await implements lock.Semaphores. It waits for a wake-up. As RabbitMQ does not tell
// when a queue goes, somebody also looks, ever less often.
func (s *Semaphores) Await(ctx context.Context, name string) error {
	if err := lock.CheckSemaphore(name, 0); err != nil {
		return err
	}
	l := s.join(name)
	defer s.part(l)
	w := l.enter()
	for {
		select {
		case err := <-w.woken:
			return err
		case <-l.duty:
			l.watch(ctx, w)
			l.duty <- struct{}{}
		case <-ctx.Done():
			l.quit(w)
			return context.Cause(ctx)
		}
	}
}

// join returns the lookout of a semaphore.
func (s *Semaphores) join(name string) *lookout {
	s.waiting.Lock()
	defer s.waiting.Unlock()
	l := s.lookouts[name]
	if l == nil {
		l = &lookout{
			s: s, name: name, queues: s.cfg.names(name),
			duty: make(chan struct{}, 1), came: make(chan struct{}, 1),
			wait: shortestWait, stop: func() {},
		}
		l.duty <- struct{}{}
		s.lookouts[name] = l
	}
	l.users++
	return l
}

// part leaves a lookout. The last one closes it.
func (s *Semaphores) part(l *lookout) {
	s.waiting.Lock()
	l.users--
	last := l.users == 0
	if last {
		delete(s.lookouts, l.name)
	}
	s.waiting.Unlock()
	if !last {
		return
	}
	l.stop()
}

// wake makes those look at once who wait here, if any do.
func (s *Semaphores) wake(name string) {
	s.waiting.Lock()
	defer s.waiting.Unlock()
	if l := s.lookouts[name]; l != nil {
		l.force()
	}
}

func (l *lookout) force() {
	select {
	case l.came <- struct{}{}:
	default: // it is known already
	}
}

func (l *lookout) enter() *waiter {
	w := &waiter{woken: make(chan error, 1)}
	l.mu.Lock()
	l.waiters = append(l.waiters, w)
	l.mu.Unlock()
	l.force()
	return w
}

// quit takes a waiter off the list. If it was woken, another one is in its place.
func (l *lookout) quit(w *waiter) {
	l.mu.Lock()
	i := slices.Index(l.waiters, w)
	if i >= 0 {
		l.waiters = slices.Delete(l.waiters, i, i+1)
	}
	l.mu.Unlock()
	if i < 0 && <-w.woken == nil && l.wake(1, 0) == 0 {
		l.s.probeSession.notify(l.queues.wakeup(), 0)
	}
}

// wake wakes up to n waiters, and says how many. The slot is one that came free, or
// 0; only the one on duty may name one.
func (l *lookout) wake(n, slot int) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n = min(n, len(l.waiters))
	if slot > 0 && n > 0 { // on duty, therefore
		h := &hint{slot, l.view, l.seen}
		if slot <= h.view.slots && h.view.slots <= h.view.reach && !h.stale() {
			l.s.hint(l.name, h)
		}
	}
	for _, w := range l.waiters[:n] {
		w.woken <- nil
	}
	l.waiters = slices.Delete(l.waiters, 0, n)
	return n
}

func (l *lookout) anybody() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.waiters) > 0
}

// fail wakes all with an error.
func (l *lookout) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.waiters {
		w.woken <- err
	}
	l.waiters = nil
}

// watch is the duty of w. It returns when w is woken or ctx ends.
func (l *lookout) watch(ctx context.Context, w *waiter) {
	for len(w.woken) == 0 && ctx.Err() == nil {
		changed := l.s.Changed()
		if time.Until(l.next) <= 0 {
			l.look(ctx)
			continue
		}
		select {
		case message, ok := <-l.wakeups:
			if !ok {
				l.wakeups, l.listening = nil, nil
				break
			}
			l.wake(1, slotOf(message))
		case <-l.came:
			l.next = time.Time{}
		case <-changed:
			retry.Pause(ctx, rand.N(20*time.Millisecond+l.s.crowd())) // not all at the same moment
			l.next = time.Time{}
		case <-time.After(time.Until(l.next)):
		case <-ctx.Done():
		}
	}
}

// look looks at the semaphore, and wakes whom it may concern. It says when to look
// again.
func (l *lookout) look(ctx context.Context) {
	select {
	case <-l.came:
	default:
	}
	crowd := l.s.crowd()
	l.wait = max(min(2*l.wait, longestWait), crowd)
	t := l.s.current()
	if t != nil {
		began := time.Now()
		v, err := l.s.lookOnDuty(ctx, l.queues)
		if err == nil && !v.there() {
			err = lock.ErrNoSemaphore
		}
		if err == nil {
			err = t.recognise(ctx, l.queues, v)
		}
		switch {
		case ctx.Err() != nil:
			return // the others' duty
		case err != nil:
			l.fail(fmt.Errorf("limit %s: %w", l.name, err))
			return
		}
		if n := l.vacant(v, t); n > 0 {
			l.wake(n, 0)
			l.wait = max(shortestWait, crowd) // they may leave some
		} else if v.room() > 0 {
			l.wait = max(min(l.wait, longestWait/2), crowd)
		}
		l.seen, l.view = began, v
		if t != l.listening && l.anybody() && (t != l.deaf || time.Since(l.since) > listenAgain) {
			l.stop()
			l.wakeups, l.stop = t.listen(ctx, l.queues.wakeup())
			switch {
			case l.wakeups != nil:
				l.listening, l.deaf = t, nil
				l.next = time.Time{} // a slot may have been given back just before
				return
			case ctx.Err() != nil:
				return // the others' duty
			}
			l.stop()
			l.listening, l.deaf, l.since = nil, t, time.Now()
		}
	}
	l.next = time.Now().Add(l.wait/2 + rand.N(l.wait/2))
}

// vacant returns for how many there is room. A listener passes over a slot that
// was not free at the last look: it was given back just now, and somebody has been
// woken for it.
func (l *lookout) vacant(v view, t *session) int {
	if t != l.listening || l.wakeups == nil {
		return v.room()
	}
	before, still := l.view.free(), 0
	for _, slot := range v.free() {
		if slices.Contains(before, slot) {
			still++
		}
	}
	return min(still, v.room())
}

// A glance is a look that several wait for.
type glance struct {
	done chan struct{} // closed when it is over
	view view
	err  error
}

// crowd returns how long each lookout is to wait at least between two looks.
func (s *Semaphores) crowd() time.Duration {
	s.waiting.Lock()
	defer s.waiting.Unlock()
	return time.Duration(len(s.lookouts)) * waitForEach
}

// lookOnDuty is look for a lookout.
func (s *Semaphores) lookOnDuty(ctx context.Context, n names) (view, error) {
	select {
	case <-s.waiters:
		defer func() { s.waiters <- struct{}{} }()
	case <-ctx.Done():
		return view{}, context.Cause(ctx)
	}
	return s.look(ctx, n)
}

// look views a semaphore. Those who come while somebody looks share the next look.
func (s *Semaphores) look(ctx context.Context, n names) (view, error) {
	for {
		s.joining.Lock()
		g, mine := s.glances[n], false
		if g == nil {
			g, mine = &glance{done: make(chan struct{})}, true
			s.glances[n] = g
		}
		s.joining.Unlock()
		if mine {
			s.glance(ctx, n, g)
			return g.view, g.err
		}
		select {
		case <-g.done:
			if !errors.Is(g.err, errAbandoned) {
				return g.view, g.err
			}
		case <-ctx.Done():
			return view{}, context.Cause(ctx)
		}
	}
}

// errAbandoned says that the context of the one who looked has ended.
var errAbandoned = errors.New("the look was given up")

// glance looks for all who wait for g.
func (s *Semaphores) glance(ctx context.Context, n names, g *glance) {
	defer close(g.done)
	var err error
	select {
	case <-s.looking:
		defer func() { s.looking <- struct{}{} }()
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	s.joining.Lock()
	delete(s.glances, n) // a caller that comes now needs a later one
	s.joining.Unlock()
	if err == nil {
		g.view, err = look(ctx, s.probeSession, n)
	}
	if err != nil && ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", errAbandoned, err)
	}
	g.err = err
}

// A hint is a slot that came free.
type hint struct {
	slot int
	view view      // of the semaphore, as it was seen
	seen time.Time // then
}

// stale reports whether the view is too old to go by.
func (h *hint) stale() bool { return time.Since(h.seen) > 2*longestWait }

// hint notes a slot that came free, for the one who takes next.
func (s *Semaphores) hint(name string, h *hint) {
	s.waiting.Lock()
	defer s.waiting.Unlock()
	s.hints[name] = h
}

// hinted returns a hint, once, or nil.
func (s *Semaphores) hinted(name string) *hint {
	s.waiting.Lock()
	defer s.waiting.Unlock()
	h := s.hints[name]
	delete(s.hints, name)
	if h == nil || h.stale() {
		return nil
	}
	return h
}
