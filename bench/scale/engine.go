package scale

import "container/heap"

// A clock runs what is to happen in the order of its time, in µs, and in the
// order in which it was asked for where that is the same.
type clock struct {
	now    float64
	number int
	events events
}

type event struct {
	at     float64
	number int
	f      func()
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].number < e[j].number
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

// after calls f when so much time has passed. No time at all lets everything
// else of this moment go first, as runtime.Gosched does.
func (c *clock) after(wait float64, f func()) {
	c.number++
	heap.Push(&c.events, event{c.now + wait, c.number, f})
}

// run lets time pass until done, and reports whether that came.
func (c *clock) run(done func() bool) bool {
	for len(c.events) > 0 && !done() {
		e := heap.Pop(&c.events).(event)
		c.now = e.at
		e.f()
	}
	return done()
}

// cores are processors that share their time fairly among what runs. Jobs run on
// one of them at most.
type cores struct {
	clock *clock
	n     float64
	used  float64 // processor time so far

	progress float64 // of each job, since the beginning
	at       float64 // when that was reckoned
	jobs     events  // at: the progress at which a job is done
	started  int
	version  int // of the event that waits for the next job to be done
}

func (c *cores) advance() {
	if len(c.jobs) > 0 {
		done := (c.clock.now - c.at) * min(1, c.n/float64(len(c.jobs)))
		c.progress += done
		c.used += done * float64(len(c.jobs))
	}
	c.at = c.clock.now
}

// do calls then when a job of so many µs is done.
func (c *cores) do(work float64, then func()) {
	c.advance()
	c.started++
	heap.Push(&c.jobs, event{c.progress + work, c.started, then})
	c.await()
}

func (c *cores) await() {
	c.version++
	if len(c.jobs) == 0 {
		return
	}
	version := c.version
	left := (c.jobs[0].at - c.progress) / min(1, c.n/float64(len(c.jobs)))
	c.clock.after(max(0, left), func() {
		if version != c.version {
			return
		}
		c.advance()
		job := heap.Pop(&c.jobs).(event)
		c.await()
		job.f()
	})
}

// turns is what only one can have at a time; the others wait in a row.
type turns struct {
	clock   *clock
	taken   bool
	waiting []func()
	since   float64
	busy    float64 // how long it was taken, so far
}

func (t *turns) take(f func()) {
	if t.taken {
		t.waiting = append(t.waiting, f)
		return
	}
	t.taken, t.since = true, t.clock.now
	f()
}

func (t *turns) leave() {
	t.busy += t.clock.now - t.since
	if len(t.waiting) > 0 {
		next := t.waiting[0]
		t.waiting = t.waiting[1:]
		t.since = t.clock.now
		next()
		return
	}
	t.taken = false
}

// group is internal/batch: what arrives while a commit is under way goes together
// in the next. Items are only counted.
type group struct {
	clock    *clock
	most     int // in one commit
	parallel int // commits
	commit   func(n int, done func())

	waiting, active int
}

func (g *group) add(n int) {
	g.waiting += n
	for free := min(n, g.parallel-g.active); free > 0; free-- {
		g.active++
		g.clock.after(0, g.lead)
	}
}

func (g *group) lead() {
	n := min(g.most, g.waiting)
	if n == 0 {
		g.active--
		return
	}
	g.waiting -= n
	g.commit(n, func() { g.clock.after(0, g.lead) })
}
