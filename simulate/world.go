//go:build simulate

package simulate

import (
	"bytes"
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"onejob/boottime"
	"onejob/simulate/fakeconsul"
	"onejob/simulate/fakestore"
)

// world is one run of a plan. All goroutines of a run take turns on one processor and are
// not preempted, so nothing in here is locked.
type world struct {
	plan   Plan
	rand   *rand.Rand
	began  time.Time
	ids    int
	consul *fakeconsul.Server

	machines []*machine
	active   []*Fault // that take their time now
	past     []Fault  // with At and For as they were

	trace  io.Writer // nil for none
	digest interface {
		io.Writer
		Sum64() uint64
	}
	requests   int
	looked     time.Duration // when checkBusy did
	violations []Violation

	leases
	workers
}

// A Violation is a promise that was broken.
type Violation struct {
	Rule string
	At   time.Duration
	What string
}

func (v Violation) String() string {
	return fmt.Sprintf("%s at %.3fs: %s", v.Rule, v.At.Seconds(), v.What)
}

func newWorld(plan Plan, trace io.Writer) *world {
	w := &world{plan: plan, rand: rand.New(rand.NewPCG(plan.Seed, 2)), began: time.Now(), trace: trace, digest: fnv.New64a()}
	w.consul = fakeconsul.New(fakeconsul.Config{
		Expiry: func(ttl time.Duration) time.Duration { // a third of the sessions end as soon as they may
			return ttl + max(0, time.Duration(w.rand.Int64N(int64(3*ttl/2)+1))-ttl/2)
		},
		Commit: func() time.Duration { return between(w.rand, 100*time.Microsecond, 3*time.Millisecond) },
		Sync:   func() time.Duration { return between(w.rand, 100*time.Microsecond, 3*time.Millisecond) },
		Stale:  func() bool { return w.rand.IntN(4) == 0 },
		NewID:  w.newID,
		Ended:  w.sessionEnded,
		Hold:   7 * time.Second,
	})
	w.db = fakestore.New()
	w.db.Step = 4096 // so that tasks share names in Consul
	w.db.FailCommit = 16
	w.db.Changed = w.rowChanged
	w.deaths = map[string]time.Duration{}
	w.jobs, w.claimed = map[int64]*job{}, map[int64]*job{}
	w.highest, w.running, w.fences, w.backups = map[string]int64{}, map[string]int64{}, map[int64]*handler{}, map[*Fault]fakestore.Backup{}
	w.other = fakeconsul.New(fakeconsul.Config{NewID: w.newID})
	boottime.Simulated.Now = w.clock
	boottime.Simulated.Ahead = w.ahead
	return w
}

// newID returns a UUID.
func (w *world) newID() string {
	w.ids++
	return fmt.Sprintf("%08x-0000-4000-8000-%012x", w.ids, w.plan.Seed&0xffffffffffff)
}

// now returns the true time.
func (w *world) now() time.Duration { return time.Since(w.began) }

func (w *world) note(format string, args ...any) {
	line := fmt.Sprintf("%10.6f ", w.now().Seconds()) + fmt.Sprintf(format, args...) + "\n"
	_, _ = io.WriteString(w.digest, line)
	if w.trace != nil {
		_, _ = io.WriteString(w.trace, line)
	}
}

// detail notes what only a reader of the trace wants to know: the digest is the same with and
// without a trace.
func (w *world) detail(format string, args ...any) {
	if w.trace != nil {
		_, _ = fmt.Fprintf(w.trace, "%10.6f "+format+"\n", append([]any{w.now().Seconds()}, args...)...)
	}
}

func (w *world) violate(rule, format string, args ...any) {
	v := Violation{rule, w.now(), fmt.Sprintf(format, args...)}
	w.note("VIOLATION %v", v)
	w.violations = append(w.violations, v)
}

// checkBusy looks whether a replica asks Consul or Postgres again and again without a pause. It
// asks some 100 times a second when rows with a limit wait for lock keys.
func (w *world) checkBusy() {
	const every, most = 10 * time.Second, 4000
	if w.now()-w.looked < every {
		return
	}
	w.looked = w.now()
	for _, m := range w.machines {
		if m.asked > most {
			w.violate("busy", "replica %d has sent %d requests within %v", m.id, m.asked, every)
		}
		m.asked = 0
	}
}

// is reports whether a fault of the kind is active for the machine, and returns it.
func (w *world) is(kind Kind, who int) *Fault {
	for _, f := range w.active {
		if f.Kind == kind && f.Who == who {
			return f
		}
	}
	return nil
}

// disturbed reports whether anything has kept a replica from hearing of something that
// happened in that time. What restarts has restarted by then.
func (w *world) disturbed(who int, from, to time.Duration) bool {
	const after = 15 * time.Second // a request that was sent then may be waited for
	for _, f := range append(w.past, pointees(w.active)...) {
		switch f.Kind {
		case DestroyByHand, DeleteByHand, Repeat:
			continue
		case NoLeader, Election, Restore:
		default:
			if f.Who != who {
				continue
			}
		}
		if f.At < to && from < f.At+f.For+f.Size+after {
			return true
		}
	}
	return false
}

// repeated reports whether a request of who may be, or was, heard a second time from a moment on. One
// for a lock makes one that nobody works under, until the replica finds it.
func (w *world) repeated(who int, from time.Duration) bool {
	return slices.ContainsFunc(append(w.past, pointees(w.active)...), func(f Fault) bool {
		return f.Kind == Repeat && f.Who == who && from <= f.At+f.For+f.Size
	})
}

func pointees(list []*Fault) (out []Fault) {
	for _, f := range list {
		out = append(out, *f)
	}
	return out
}

// A machine is a computer with one process and one agent of Consul.
type machine struct {
	w        *world
	id       int
	agent    *fakeconsul.Agent
	stranger *fakeconsul.Agent // of another cluster's Consul, to which the process talks instead; or nil
	life     int               // which process this is
	thawed   chan struct{}     // closed when the process goes on; nil while it runs
	frozen   time.Duration     // when it was frozen, or thawed, last
	behind   time.Duration     // by how much its clock was paused
	paused   time.Duration     // since when it is paused; negative if it is not
	resumed  time.Duration     // when its last pause ended
	asked    int               // requests, since checkBusy looked
}

func (w *world) newMachine() *machine {
	m := &machine{w: w, id: len(w.machines), paused: -1, frozen: -time.Hour, resumed: -time.Hour}
	m.agent = w.consul.Agent(fmt.Sprintf("node%d", m.id))
	w.machines = append(w.machines, m)
	return m
}

// process marks the goroutine, and those that it starts, as the machine's present process.
func (m *machine) process() { runtime.SetSimulatedProcess(uintptr(m.life)<<8 | uintptr(m.id+1)) }

// me returns the machine to which the goroutine belongs, nil if it is the world's own, and
// whether its process is the present one.
func (w *world) me() (m *machine, alive bool) {
	p := runtime.SimulatedProcess()
	if p&0xff == 0 {
		return nil, true
	}
	m = w.machines[p&0xff-1]
	return m, int(p>>8) == m.life
}

// gate stops a goroutine while its process is frozen.
func (w *world) gate() *machine {
	for {
		m, alive := w.me()
		if m == nil || !alive || m.thawed == nil {
			return m
		}
		<-m.thawed
	}
}

// freeze stops the process.
func (m *machine) freeze() {
	if m.thawed == nil {
		m.w.strike(m)
		m.thawed = make(chan struct{})
		m.frozen = m.w.now()
	}
}

// thaw lets it go on.
func (m *machine) thaw() {
	if m.thawed != nil {
		m.frozen = m.w.now()
		close(m.thawed)
		m.thawed = nil
	}
}

// stood reports whether the process is frozen, or was until a moment ago: it could not have
// noticed yet what has happened. Of a pause only the wall clock tells, at which a lease looks
// twice a second; no timer of it is due.
func (m *machine) stood() bool {
	const notice, look = 200 * time.Millisecond, 500 * time.Millisecond
	return m.thawed != nil || m.w.now()-m.frozen < notice+handlerGrace || m.w.now()-m.resumed < look+notice+handlerGrace
}

// epoch is what machines' clocks say when the world begins; each says something else.
const epoch = 1000 * time.Hour

// clock is boottime.Now.
func (w *world) clock() boottime.Instant {
	m := w.gate()
	if m == nil {
		return boottime.Instant(epoch + w.now())
	}
	return m.clockAt(w.now())
}

// clockAt returns what the machine's clock says at a true time.
func (m *machine) clockAt(now time.Duration) boottime.Instant {
	behind := m.behind
	if m.paused >= 0 {
		behind += now - m.paused
	}
	return boottime.Instant(epoch + now - behind)
}

// ahead is boottime.Ahead: the wall clock is set right as soon as a pause is over.
func (w *world) ahead() time.Duration {
	m, _ := w.me()
	if m == nil {
		return 0
	}
	return m.behind
}

// RoundTrip implements http.RoundTripper: it is the network between a process and its agent,
// and beyond.
func (m *machine) RoundTrip(r *http.Request) (*http.Response, error) {
	w := m.w
	_, alive := w.me()
	w.gate()
	request, err := fakeconsul.Read(r)
	if err != nil {
		return nil, err
	}
	w.requests++
	m.asked++
	if !alive { // nothing comes from the dead
		<-r.Context().Done()
		return nil, r.Context().Err()
	}
	if w.is(Refuse, m.id) != nil {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
	}
	request.Blind = w.is(Blind, m.id) != nil
	agent := m.agent
	if m.stranger != nil {
		agent = m.stranger
	}
	type result struct {
		answer fakeconsul.Answer
		err    error
	}
	done := make(chan result, 2)
	life := m.life
	deliver := func(first bool) func() {
		return func() {
			if w.is(Refuse, m.id) != nil {
				done <- result{err: io.ErrUnexpectedEOF}
				return
			}
			agent.Serve(request, func(answer fakeconsul.Answer) {
				if w.trace != nil {
					w.detail("replica %d: %s %s %s -> %d %s", m.id, request.Method, request.Path, brief(request.Body), answer.Status, brief(answer.Body))
				}
				if !first || m.life != life {
					return
				}
				delay, heard := m.way(SlowAnswers, DropAnswers)
				if heard {
					time.AfterFunc(delay, func() { done <- result{answer: answer} })
				}
			})
		}
	}
	delay, heard := m.way(Slow, DropRequests)
	if f := w.is(Doubt, m.id); f != nil && request.Method == http.MethodPut && w.rand.IntN(100) < f.Part {
		applied := w.rand.IntN(2) == 0
		if applied {
			time.AfterFunc(delay, deliver(false))
		}
		time.AfterFunc(delay+20*time.Millisecond, func() {
			done <- result{answer: fakeconsul.Answer{Status: http.StatusInternalServerError, Body: []byte("leadership lost while committing log")}}
		})
	} else if heard {
		time.AfterFunc(delay, deliver(true))
		if f := w.is(Repeat, m.id); f != nil && w.rand.IntN(100) < f.Part && repeatable(request) {
			time.AfterFunc(delay+between(w.rand, 0, f.Size), deliver(false))
		}
	}
	select {
	case result := <-done:
		w.gate()
		if result.err != nil {
			return nil, result.err
		}
		return result.answer.Response(r), nil
	case <-r.Context().Done():
		w.gate()
		return nil, r.Context().Err()
	}
}

// repeatable reports whether a request may be heard twice. A deletion that names no index may
// not, nor may the unlocking of a reused name: nobody repeats it but the client itself, which
// then keeps the key reserved until it must have arrived.
func repeatable(r fakeconsul.Request) bool {
	return !bytes.Contains(r.Body, []byte(`"Verb":"delete"`)) && !bytes.Contains(r.Body, []byte(`"Verb":"unlock"`))
}

// way returns how long a message takes, and whether it arrives.
func (m *machine) way(slow, drop Kind) (delay time.Duration, arrives bool) {
	w := m.w
	delay = between(w.rand, 50*time.Microsecond, 500*time.Microsecond)
	if w.is(Cut, m.id) != nil || w.is(CutBoth, m.id) != nil {
		return delay, false
	}
	if f := w.is(drop, m.id); f != nil && w.rand.IntN(100) < f.Part {
		return delay, false
	}
	f := w.is(Slow, m.id)
	if f == nil {
		f = w.is(slow, m.id)
	}
	if f != nil && w.rand.IntN(100) < f.Part {
		delay += between(w.rand, 0, f.Size)
	}
	return delay, true
}

func brief(b []byte) string {
	s := strings.TrimSpace(string(b))
	if len(s) > 300 {
		s = s[:300] + "..."
	}
	return s
}

// logger returns the log of a replica, which is part of the trace.
func (w *world) logger(name string) *zap.Logger {
	if w.trace == nil {
		return zap.NewNop()
	}
	encoder := zapcore.NewJSONEncoder(zapcore.EncoderConfig{MessageKey: "event"})
	return zap.New(traceCore{zapcore.NewCore(encoder, logWriter{w, name}, zap.DebugLevel)})
}

// traceCore takes every event, and says that it takes none below info: a worker that logs
// below it starts other timers, and a schedule must be the same without a trace.
type traceCore struct{ zapcore.Core }

func (traceCore) Level() zapcore.Level { return zap.InfoLevel }

func (c traceCore) With(fields []zapcore.Field) zapcore.Core { return traceCore{c.Core.With(fields)} }

type logWriter struct {
	w    *world
	name string
}

func (l logWriter) Write(b []byte) (int, error) {
	l.w.detail("%s: %s", l.name, strings.TrimSpace(string(b)))
	return len(b), nil
}

func (logWriter) Sync() error { return nil }
