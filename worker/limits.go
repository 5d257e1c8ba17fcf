package worker

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"onejob/internal/retry"
	"onejob/lock"
	"onejob/tasks"
)

// findEvery is how often limits that are not known yet are looked for, and
// missingFor how long one that was not there is left alone.
const (
	findEvery  = time.Second
	findPart   = 40               // a fortieth of the time is for looks of Postgres, where there are many names
	findAtMost = 30 * time.Second // from one to the next in any case
	findAnyway = 10 * time.Second // where no row had a limit, and nothing has happened since
	missingFor = 30 * time.Second
	maxTold    = 1000
	findFew    = 20 // how many are looked for at once
	fewLimits  = 8  // more are asked for only if some row has a limit: each costs a look into an index

	slowLook    = 100 * time.Millisecond // a look for due limits that takes longer is followed by a rest,
	servePart   = 20                     // so many times as long,
	serveAtMost = 30 * time.Second       // and no longer than this
)

// limits serves the rows with a limit. Each limit that has due rows
// is served by a goroutine of its own, which waits for a slot so that the others
// need not. Names that rows have and limits have not cost them nothing: only known
// ones are asked for.
type limits struct {
	semaphores  lock.Semaphores // nil if this replica serves no limits
	store       limitStore
	log         *zap.Logger
	replica     string
	queues      []string
	concurrency int
	config      func() *serving
	running     *running
	lookups     *lookups
	ours        func() error // why slots must not be taken: others keep limits elsewhere
	wake        func()       // triggers a claim, of rows with a limit as well
	hears       func() bool  // whether soon is called when tasks are enqueued

	// claim claims one task under a limit, and attempt works on it.
	claim   func(ctx context.Context, limit string, c tasks.Claim) (t *tasks.Task, more bool)
	attempt func(t *tasks.Task, slot lock.Lease)

	fresh chan struct{} // rows with a limit may have come

	named sync.Map    // by limit: whether the row that was claimed last under it names it
	held  atomic.Bool // slots were not taken because of ours

	wg     sync.WaitGroup
	news   atomic.Bool // rows with a limit may have come due, or got room, since we looked
	due    bool        // some were when we looked last; only claim's own
	first  int         // which of them came first then; the same
	rested time.Time   // when to look again, after a look that took long; the same

	mu      sync.Mutex
	known   map[string]bool          // limits that are there, or that we make
	missing map[string]time.Time     // names that were no limit, and since when
	served  map[string]bool          // whether somebody asked for it again meanwhile
	pauses  map[string]time.Duration // the last pause of those under which nothing could be claimed
	rests   map[string]time.Duration // the last rest of those whose backend failed
	stirred chan struct{}            // is closed, and replaced, when a lock key has come free
	came    chan struct{}            // the same when tasks may have come
	told    map[string]string        // what was said last of a limit that cannot be served

	askedUpTo string   // of missing
	unknown   reported // names that are no limit
}

// limitStore is what limits need of the database, besides claims.
type limitStore interface {
	Limited(context.Context) (bool, error)
	DueLimits(ctx context.Context, c tasks.Claim, names []string) ([]string, error)
	UnknownLimits(ctx context.Context, known []string, n int) ([]string, error)
	DueKinds(context.Context, tasks.Claim) ([]string, error)
}

// know notes limits that we make if they are not there.
func (l *limits) know(slots map[string]int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for name := range slots {
		l.known[name] = true
		delete(l.missing, name)
		delete(l.told, name)
		delete(l.rests, name)
		l.unknown.forget(name)
	}
}

// names returns the known limits.
func (l *limits) names() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Sorted(maps.Keys(l.known))
}

// note notes whether there is such a limit. It reports whether that is new.
func (l *limits) note(name string, there bool) (news bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	news = l.known[name] != there
	if there {
		l.known[name] = true
		delete(l.missing, name)
	} else {
		delete(l.known, name)
		if _, before := l.missing[name]; !before {
			l.missing[name] = time.Now()
		}
	}
	return news
}

// missed returns up to n names that have lately been found missing, others each time. They may be
// there by now.
func (l *limits) missed(n int) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	names := slices.Sorted(maps.Keys(l.missing))
	i := 0
	if len(names) > n {
		i, _ = slices.BinarySearch(names, l.askedUpTo)
	}
	names = slices.Concat(names[i:], names[:i])
	names = names[:min(n, len(names))]
	if len(names) > 0 {
		l.askedUpTo = names[len(names)-1] + "\x00" // behind it
	}
	return names
}

// passedOver returns the names that need not be looked for: known ones, and those
// that have lately been found missing.
func (l *limits) passedOver() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(l.missing, func(_ string, at time.Time) bool { return time.Since(at) > missingFor })
	return slices.AppendSeq(slices.Collect(maps.Keys(l.known)), maps.Keys(l.missing))
}

// find looks for limits that waiting rows name and that are not known, a few at
// a time and all of them in turn, until ctx ends.
func (l *limits) find(ctx context.Context) {
	for ctx.Err() == nil {
		began := time.Now()
		some, err := l.store.Limited(ctx)
		l.lookups.saw("limits_waiting", err)
		took := time.Since(began)
		if err == nil && some {
			took += l.findSome(ctx)
		}
		retry.Pause(ctx, max(findEvery, min(findPart*took, findAtMost)))
		if err != nil || some || !l.hears() {
			continue
		}
		select {
		case <-l.fresh:
		case <-time.After(findAnyway - time.Since(began)):
		case <-ctx.Done():
		}
	}
}

// soon says that rows with a limit may have come, or come due.
func (l *limits) soon() {
	l.news.Store(true)
	notify(l.fresh)
}

// again lets slots be taken at once that were not, if they may be taken now.
func (l *limits) again() {
	if l.held.Load() && l.ours() == nil {
		l.held.Store(false)
		l.wake()
	}
}

// findSome asks for names that rows have and that are not known. Where there are no new ones, nobody is
// asked for all limits: there may be many, and RabbitMQ would have to be asked for each. It returns how
// long Postgres took.
func (l *limits) findSome(ctx context.Context) (took time.Duration) {
	began := time.Now()
	names, err := l.store.UnknownLimits(ctx, l.passedOver(), findFew)
	took = time.Since(began)
	l.lookups.saw("limits_unknown", err)
	if err != nil {
		return took
	}
	some := len(names) > 0
	if names = append(names, l.missed(findFew)...); l.semaphores != nil && some {
		if list, err := l.semaphores.List(ctx); err == nil { // all of them, where the backend can tell
			for _, name := range list {
				if l.note(name, true) {
					l.wake()
				}
			}
			names = slices.DeleteFunc(names, func(name string) bool { return slices.Contains(list, name) })
		}
	}
	unanswered := 0
	for _, name := range names {
		if l.semaphores == nil {
			l.note(name, false)
			l.logOnce(name, "limit_unsupported", errors.New("this replica serves no limits"))
			continue
		}
		switch _, err := l.semaphores.Inspect(ctx, name); {
		case errors.Is(err, lock.ErrNoSemaphore):
			l.note(name, false)
			l.logOnce(name, "limit_unknown", err)
		case err == nil, errors.Is(err, lock.ErrForeign): // which those who take a slot report
			l.note(name, true)
			l.wake()
		default: // nobody knows, and the next look asks again; what is wrong may be about this name alone
			if unanswered++; unanswered > 1 {
				return took
			}
		}
	}
	return took
}

// serve sees to it that every limit with due rows is served. It asks only when there is
// news, so that clusters without limits pay nothing. The end of an attempt is no news, unless
// rows with a limit are waiting for its room. It reports whether it has taken any.
func (l *limits) serve(ctx context.Context) (some bool) {
	if time.Now().Before(l.rested) || !l.news.Swap(false) {
		return false
	}
	began := time.Now()
	s := l.config()
	var due []string
	var err error
	known, any := l.names(), true
	if len(known) > fewLimits {
		any, err = l.store.Limited(ctx)
	}
	ready, _ := s.ready(s.kinds.Names(), 1)
	if err == nil && any && len(known) > 0 {
		due, err = l.store.DueLimits(ctx, tasks.Claim{Kinds: ready, Queues: l.queues}, known)
	}
	if err == nil && len(s.under) > 0 {
		limited := slices.DeleteFunc(slices.Clone(ready), func(kind string) bool { return s.limitOf[kind] == "" })
		var kinds []string
		kinds, err = l.store.DueKinds(ctx, tasks.Claim{Kinds: limited, Queues: l.queues})
		for _, k := range kinds {
			due = append(due, s.limitOf[k])
		}
		slices.Sort(due)
		due = slices.Compact(due) // several kinds may have one limit, and rows may name it as well
	}
	l.lookups.saw("limits_due", err)
	if took := time.Since(began); took > slowLook { // claims of tasks without a limit wait for it
		rest := min(servePart*took, serveAtMost)
		l.rested = time.Now().Add(rest)
		time.AfterFunc(rest, l.wake)
	}
	if err != nil {
		return false // the next tick asks again
	}
	l.due = len(due) > 0
	if len(due) > 0 { // another one is first each time: there may be room for one alone
		l.first = (l.first + 1) % len(due)
		due = slices.Concat(due[l.first:], due[:l.first])
	}
	for _, name := range due {
		if l.semaphores == nil {
			l.logOnce(name, "limit_unsupported", errors.New("this replica serves no limits"))
			continue
		}
		l.mu.Lock()
		_, serving := l.served[name]
		begin := !serving && l.running.take(1, l.concurrency) == 1
		if begin || serving {
			l.served[name] = serving
		}
		l.mu.Unlock()
		if !begin && !serving {
			l.news.Store(true) // who leaves wakes us
		}
		if !begin {
			continue
		}
		some = true
		l.wg.Go(func() {
			l.serveOne(ctx, name)
			l.mu.Lock()
			defer l.mu.Unlock()
			if l.served[name] {
				l.wake()
			} else {
				delete(l.pauses, name)
			}
			delete(l.served, name)
		})
	}
	return some
}

// logOnce logs what keeps a limit from being served, once until it changes, and of
// names that are no limit only so many an hour.
func (l *limits) logOnce(name, event string, err error) {
	l.mu.Lock()
	news := l.told[name] != event
	if len(l.told) > maxTold { // somebody invents names
		maps.DeleteFunc(l.told, func(name, _ string) bool { return !l.known[name] })
	}
	if l.told[name] = event; event == "" {
		delete(l.told, name)
	}
	l.mu.Unlock()
	if !news {
		return
	}
	logOutcome, more := true, false
	switch event {
	case "":
		l.unknown.forget(name)
	case "limit_unknown", "limit_unsupported":
		logOutcome, more = l.unknown.first(name)
	}
	switch {
	case more:
		l.log.Warn("limits_unknown", zap.Int("reported", maxReported))
	case !logOutcome:
	case event == "limit_unknown":
		l.log.Warn("limit_unknown", zap.String("limit", name), zap.Error(err))
	case event == "limit_unsupported":
		l.log.Warn("limit_unsupported", zap.String("limit", name), zap.Error(err))
	case event == "limit_failed":
		l.log.Warn("limit_failed", zap.String("limit", name), zap.Error(err))
	}
}
