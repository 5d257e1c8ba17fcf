package rabbitmq

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"onejob/internal/retry"
	"onejob/lock"
	"onejob/lock/internal/hold"
)

// Semaphores implements lock.Semaphores.
//
// To take slots it must Run. The rest needs no session: it works on a connection
// of its own, which ends with the call.
type Semaphores struct {
	cfg          Config
	log          *zap.Logger
	probeSession *probeSession
	ahead        func() (time.Duration, bool) // of the wall clock; nil but in tests
	farthest     int                          // how far Create and Destroy look for what others have left; less in tests

	present  hold.Present[*session]
	channels int // that a connection may have, as far as is known; Run's own

	looking chan struct{} // holds a token while nobody looks
	waiters chan struct{} // the same of lookouts, of whom one looks at a time: who takes a slot waits for no more than that
	joining sync.Mutex
	glances map[names]*glance

	naming sync.Mutex
	names  []string // that List asks for

	waiting  sync.Mutex
	lookouts map[string]*lookout
	hints    map[string]*hint
}

var _ lock.Semaphores = (*Semaphores)(nil)

// New returns Semaphores, or everything that is wrong with the configuration. It
// does not talk to RabbitMQ.
func New(cfg Config) (*Semaphores, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.WithDefaults()
	s := &Semaphores{cfg: cfg, log: cfg.Log, farthest: lock.MaxSlots, channels: math.MaxUint16, names: slices.Clone(cfg.Names), probeSession: newProbeSession(cfg),
		lookouts: map[string]*lookout{}, hints: map[string]*hint{}, looking: make(chan struct{}, 1), waiters: make(chan struct{}, 1), glances: map[names]*glance{}}
	s.looking <- struct{}{}
	s.waiters <- struct{}{}
	return s, nil
}

// Run keeps a session alive, which is a connection, and begins another when one
// is lost, until ctx ends. It then gives back what is still held and returns nil
// within a few seconds, or 15 s if the broker does not answer. It may be called once.
func (s *Semaphores) Run(ctx context.Context) error {
	defer s.probeSession.close()
	for failures := 0; ctx.Err() == nil; {
		t, err := s.begin(ctx)
		if err != nil {
			if ctx.Err() != nil {
				break
			}
			failures++
			s.present.Fail(err)
			if failures == 1 || failures%30 == 0 {
				s.log.Warn("rabbitmq_unavailable", zap.Error(err), zap.Int("failures", failures))
			}
			retry.Pause(ctx, retry.Backoff(failures))
			continue
		}
		failures = 0
		s.log.Info("rabbitmq_session_started", t.logFields()...)
		s.present.Set(t)
		t.live(ctx)
		s.present.Set(nil)
		if err := t.Lost(); err != nil {
			s.log.Warn("rabbitmq_session_lost", append(t.logFields(), zap.Error(err))...)
		}
		t.end()
	}
	return nil
}

// Ready returns nil as soon as there is a session. If ctx ends before, it returns
// what keeps the session from coming.
func (s *Semaphores) Ready(ctx context.Context) error { return s.present.Wait(ctx, "rabbitmq") }

// Session returns the present session's ID, and "" while there is none.
func (s *Semaphores) Session() string {
	if t := s.current(); t != nil {
		return t.id
	}
	return ""
}

// Inspect implements lock.Semaphores. Holders are known by their B queue. They
// are asked for the rest, and other clients do not answer, which takes a
// second to find out. A slot that is shut because its holder died is held, too, by
// its delay queue.
func (s *Semaphores) Inspect(ctx context.Context, name string) (lock.Semaphore, error) {
	sem := lock.Semaphore{Name: name, Waiting: -1}
	if err := lock.CheckSemaphore(name, 0); err != nil {
		return sem, err
	}
	if s.current() != nil { // so that a name that is no limit costs no connection
		v, err := count(ctx, s.probeSession, s.cfg.names(name))
		if err == nil && !v.there() {
			err = lock.ErrNoSemaphore
		}
		if err != nil {
			return sem, fmt.Errorf("limit %s: %w", name, err)
		}
	}
	o, err := s.visit(ctx, name)
	if err != nil {
		return sem, err
	}
	defer o.end()
	v, err := o.look(ctx)
	if err != nil {
		return sem, fmt.Errorf("limit %s: %w", name, err)
	}
	sem.Slots = v.slots
	var held []string
	for _, number := range v.taken {
		if !slices.Contains(v.shut, number) {
			held = append(held, o.b(number))
		}
	}
	answers, err := ask(ctx, o.wire, o.probeChannel, s.cfg.Prefix+"/.mail/", held)
	if err != nil {
		return sem, fmt.Errorf("limit %s: ask the holders: %w", name, err)
	}
	for _, queue := range held {
		if _, ok := answers[queue]; !ok && o.shared(queue) {
			sem.Holders = append(sem.Holders, lock.SlotHolder{Session: queue, Value: []byte(notOurs)})
			continue
		}
		sem.Holders = append(sem.Holders, lock.SlotHolder{Session: queue, Value: answers[queue].Value, Since: answers[queue].Since})
	}
	for _, queue := range o.ds(v.shut) {
		// In place of the dead holder's own words.
		died := fmt.Sprintf("its holder died, or lost RabbitMQ, less than %v ago; what it ran may still be dying", s.cfg.delay())
		sem.Holders = append(sem.Holders, lock.SlotHolder{Session: queue, Value: []byte(died)})
	}
	return sem, nil
}

// notOurs is what is shown of a B queue that keeps a slot taken for ever.
const notOurs = "this queue is not exclusive, so it is no holder's: the slot is taken until somebody deletes the queue"

// SetNames replaces the names that List asks for. They must be those of semaphores, as
// lock.CheckSemaphore says.
func (s *Semaphores) SetNames(names []string) {
	s.naming.Lock()
	defer s.naming.Unlock()
	s.names = slices.Clone(names)
}

// List implements lock.Semaphores: of the names in the configuration it returns
// those that exist. Without any it returns lock.ErrCannotList.
func (s *Semaphores) List(ctx context.Context) ([]string, error) {
	s.naming.Lock()
	names := s.names // is not changed, but replaced
	s.naming.Unlock()
	if len(names) == 0 {
		return nil, lock.ErrCannotList
	}
	var o observer = s.probeSession
	if s.current() == nil { // nobody runs it, and a connection of its own would stay open
		visitor, err := s.visit(ctx, "")
		if err != nil {
			return nil, err
		}
		defer visitor.end()
		o = visitor
	}
	list := []string{}
	for _, name := range names {
		v, err := count(ctx, o, s.cfg.names(name))
		if err != nil {
			return nil, fmt.Errorf("limit %s: %w", name, err)
		}
		if v.there() {
			list = append(list, name)
		}
	}
	slices.Sort(list)
	return slices.Compact(list), nil
}

// A reader looks at one semaphore, on a connection of its own.
type reader struct {
	names
	*probeChannel
	*line
	stop func() bool
}

// visit connects for as long as ctx lives, or until the visitor's end.
func (s *Semaphores) visit(ctx context.Context, name string) (*reader, error) {
	w, err := dial(ctx, s.cfg, "visitor")
	if err != nil {
		return nil, err
	}
	v := &reader{names: s.cfg.names(name), line: &line{wire: w, limit: requestTimeout}, stop: context.AfterFunc(ctx, w.cut)}
	err = w.bound(requestTimeout, func() (err error) {
		v.probeChannel, err = newProbeChannel(w)
		return err
	})
	if err != nil {
		v.end()
		return nil, explain("open a channel", err)
	}
	return v, nil
}

// look views the semaphore, which must be there.
func (o *reader) look(ctx context.Context) (view, error) {
	v, err := look(ctx, o, o.names)
	switch {
	case err != nil:
		return v, err
	case !v.there():
		return v, lock.ErrNoSemaphore
	}
	return v, recognise(o.line, o.names, v)
}

func (o *reader) end() {
	o.stop()
	o.wire.close()
}

// current returns the session that we may believe in now, or nil.
func (s *Semaphores) current() *session { return s.present.Current() }

// Changed returns a channel that is closed when a session begins or ends.
func (s *Semaphores) Changed() <-chan struct{} { return s.present.Changed.Next() }
