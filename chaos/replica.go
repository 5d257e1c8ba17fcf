package main

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"onejob/chaos/checker"
	"onejob/chaos/harness"
	"onejob/chaos/observer"
	"onejob/internal/testenv/proxy"
)

// replica is one process of a subject, with its own ways to the servers. It is
// started again when it ends, as a service manager would, unless a fault wants
// it down.
type replica struct {
	place
	c        *cluster
	subject  subject
	host     *host
	consul   *proxy.Proxy   // to the host's agent
	postgres []*proxy.Proxy // to each server
	pooler   *proxy.Proxy   // to the host's pooler; nil without one
	rabbitmq *proxy.Proxy   // nil unless limits are kept there
	tokens   tokens

	mu     sync.Mutex
	proc   *harness.Process
	frozen int             // the mark's ID; zero if it is not frozen
	down   int             // how many want it down
	exits  []checker.Crash // when it ended by itself
	ended  bool            // it is not to be started any more

	runsOld bool // it was started as the old version

	suspended int   // the mark's ID; zero if its guards and commands go on
	stopped   []int // they, if not
}

// ways are all that it has.
func (r *replica) ways() []*proxy.Proxy {
	return slices.DeleteFunc(append([]*proxy.Proxy{r.consul, r.rabbitmq}, r.toPostgres()...), func(p *proxy.Proxy) bool { return p == nil })
}

// toPostgres are all its ways to Postgres.
func (r *replica) toPostgres() []*proxy.Proxy {
	if r.pooler == nil {
		return r.postgres
	}
	return append([]*proxy.Proxy{r.pooler}, r.postgres...)
}

// log is where everything goes that it prints.
func (r *replica) log() string { return filepath.Join(r.host.logs(), r.name+".log") }

// start starts it, unless it runs or somebody wants it down.
func (r *replica) start() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended || r.down > 0 || r.proc.Running() {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(r.log()), 0o755); err != nil {
		return err
	}
	r.tokens.starts()
	proc, err := harness.Start(r.subject.command(r.place), r.log())
	if err != nil {
		return err
	}
	r.proc, r.runsOld = proc, r.place.old
	go r.mind(proc)
	return nil
}

// mind starts the replica again when it has ended and nobody meant it to.
func (r *replica) mind(proc *harness.Process) {
	<-proc.Exited
	r.mu.Lock()
	r.thawed()
	unmeant := !r.ended && r.down == 0 && r.proc == proc
	if unmeant {
		r.exits = append(r.exits, checker.Crash{Replica: r.name, At: observer.At(time.Now()), How: proc.Cmd.ProcessState.String(), Said: lastWords(r.log()), Whole: true})
	}
	r.mu.Unlock()
	if unmeant {
		time.Sleep(time.Second)
		_ = r.start() // it worked before
	}
}

// hold keeps the replica down once it has ended, until the func that it returns
// is called.
func (r *replica) hold() (letGo func() error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.down++
	return func() error {
		r.mu.Lock()
		r.down--
		r.mu.Unlock()
		return r.start()
	}
}

func (r *replica) process() *harness.Process {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.proc
}

// freeze stops it with SIGSTOP, and its guards and commands not. It reports
// whether it could: one that is down or frozen already cannot be.
func (r *replica) freeze() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.frozen != 0 || !r.proc.Running() {
		return false
	}
	m := observer.Mark{ID: r.c.nextMark(), Kind: checker.Frozen, Target: r.name}
	if r.c.observer.Begin(m) != nil {
		return false
	}
	r.frozen = m.ID
	r.proc.Signal(syscall.SIGSTOP)
	return true
}

// suspend is freeze, and stops its guards and commands too, as a virtual machine's host does
// with all that is in it.
func (r *replica) suspend() bool {
	if !r.freeze() {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.frozen == 0 { // somebody has killed it meanwhile
		return false
	}
	m := observer.Mark{ID: r.c.nextMark(), Kind: checker.Suspended, Target: r.name}
	if r.c.observer.Begin(m) != nil {
		r.proc.Signal(syscall.SIGCONT)
		r.thawed()
		return false
	}
	r.suspended, r.stopped = m.ID, stopAll([]*harness.Process{r.proc})
	return true
}

// thaw ends a freeze, or what suspend has done.
func (r *replica) thaw() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.frozen != 0 {
		r.proc.Signal(syscall.SIGCONT)
		r.thawed()
	}
}

// thawed notes that it is not frozen any more, and continues what suspend has stopped: a command
// before its guard, which is the worst order. r.mu is held.
func (r *replica) thawed() {
	for _, pid := range slices.Backward(r.stopped) {
		_ = syscall.Kill(pid, syscall.SIGCONT)
	}
	r.stopped = nil
	if r.suspended != 0 {
		_ = r.c.observer.End(observer.Mark{ID: r.suspended})
		r.suspended = 0
	}
	if r.frozen != 0 {
		_ = r.c.observer.End(observer.Mark{ID: r.frozen})
		r.frozen = 0
	}
}

// end stops the replica for good, and reports whether it stopped in time.
func (r *replica) end() (bool, error) {
	r.mu.Lock()
	r.ended = true
	proc := r.proc
	r.mu.Unlock()
	r.thaw()
	killed, err := r.c.stop(r.name, proc, 45*time.Second)
	return !killed, err
}

// stopMaxWait is how long a service manager waits for the end of a replica, as the documentation
// asks for.
const stopMaxWait = shutdownGrace + 30*time.Second

// stop ends a replica's process with SIGTERM. One that has not ended after maxWait is killed. The
// observer gets a mark of that: a stop uses up no attempt, and a kill may.
func (c *cluster) stop(name string, proc *harness.Process, maxWait time.Duration) (killed bool, err error) {
	if !proc.Running() {
		return false, nil
	}
	asked := observer.At(time.Now())
	ended := proc.Terminate(maxWait)
	c.stopping.Lock()
	c.stops = append(c.stops, checker.Stop{Replica: name, Asked: asked, Ended: observer.At(time.Now()), Killed: !ended})
	c.stopping.Unlock()
	if ended {
		return false, nil
	}
	c.say("%s had not stopped after %v and is killed", name, maxWait)
	over, err := c.also(checker.Kill, name)
	proc.Kill()
	return true, errors.Join(err, over())
}
