package store

import (
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"onejob/internal/pgerror"
)

// A trigger of the user's may wait for a lock of an application's, for as long as that likes,
// or be slow. Rows are written together, and some statements hold the turn of claims: so
// statements that write rows give up soon, and are tried again without the row that is to
// blame, as if Postgres had refused it.
//
// Each such row costs a wait. Where there are many, waits are shorter: down to a sixteenth.
const (
	lockPatience     = 500 * time.Millisecond
	mostVain         = 4
	patienceReturns  = 10 * time.Second // after the last wait in vain
	rowStatementPart = 2                // of the time that a statement may take, for one that waits for triggers
)

// bounded follows the settings of a statement that writes rows. $1 and $2 are what
// patience.bounds returns.
const bounded = `,
       pg_catalog.set_config('lock_timeout', $1, true), pg_catalog.set_config('statement_timeout', $2, true)`

// boundedWrites comes before statements that write rows.
const boundedWrites = indexesOnly + bounded

// patience is how long statements wait for the triggers of rows. The zero value is ready.
type patience struct {
	mu   sync.Mutex
	vain int // waits in vain, up to mostVain
	last time.Time
	most int // rows that the next claim takes; 0: as many as it likes
}

// inVain notes that a statement for n rows has waited in vain, and returns how often that was
// lately, up to mostVain. The next claim takes one row, to find one that is to blame. Where there are
// many, every other one takes many, to come to what is behind them.
func (p *patience) inVain(n int) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.vain, p.last = min(p.recent()+1, mostVain), time.Now()
	if p.most = 1; n == 1 && p.vain > fewVain {
		p.most = maxDoubled
	}
	return p.vain
}

// fewVain is how many waits in vain are for rows that are tried one by one.
const fewVain = 2

func (p *patience) recent() int {
	if p.vain > 0 && time.Since(p.last) > patienceReturns {
		p.vain = 0
	}
	return p.vain
}

// bounds returns how long a statement that writes n rows may wait for a lock, and take,
// of the time that a statement may take: in ms, as arguments. Only what waits for one row is cut
// short, as one statement for many may need its time.
func (p *patience) bounds(n int, timeout time.Duration) []any {
	p.mu.Lock()
	defer p.mu.Unlock()
	vain := p.recent()
	lock, all := min(lockPatience, timeout/4)>>vain, timeout/rowStatementPart
	if n == 1 {
		all >>= vain
	}
	return []any{fmt.Sprint(lock.Milliseconds()), fmt.Sprint(all.Milliseconds())}
}

// rows returns how many rows a claim of up to n is to take.
func (p *patience) rows(n int) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.most == 0 {
		return n
	}
	return min(p.most, n)
}

// took notes that a claim has taken rows: the next one may take twice as many.
func (p *patience) took(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.most == 0:
	case n >= p.most && p.most >= maxDoubled:
		p.most = 0
	case n >= p.most:
		p.most *= 2
	}
}

// maxDoubled is after which size claims take as many rows as they like again.
const maxDoubled = 256

// waitedInVain reports whether Postgres ended a statement that had waited too long for a lock, or
// taken too long. If it writes rows, the trigger of one alone may be why.
func waitedInVain(err error) bool { return pgerror.Is(err, lockTimeout, queryCanceled) }

// mayBeARow reports whether one row alone may be why Postgres did not execute a statement that
// is bounded: it refuses that row, or waited for it in vain.
func mayBeARow(err error) bool { return aboutARow(err) || waitedInVain(err) }

// apart are rows that were waited for in vain a short while ago, or whose trigger needed another
// server. They are written one by one, while others are written together: so waiting for one of them
// again delays no others. The zero value is ready.
type apart struct {
	some  atomic.Bool // or else nothing of the rest is looked at
	mu    sync.Mutex
	until map[int64]time.Time
	last  time.Time // the latest of these
	turn  sync.Mutex
}

const (
	apartFor = time.Minute
	maxApart = 4096
)

func (a *apart) add(id int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	maps.DeleteFunc(a.until, func(_ int64, until time.Time) bool { return now.After(until) })
	if a.until == nil {
		a.until = map[int64]time.Time{}
	}
	if len(a.until) < maxApart {
		a.last = now.Add(apartFor)
		a.until[id] = a.last
	}
	a.some.Store(true)
}

// has reports whether the row is one of them.
func (a *apart) has(id int64) bool {
	if !a.some.Load() {
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	if now.After(a.last) {
		a.some.Store(false)
	}
	return now.Before(a.until[id])
}

// do writes one of them.
func (a *apart) do(write func()) {
	a.turn.Lock()
	defer a.turn.Unlock()
	write()
}
