package worker

import (
	"context"
	"strconv"
	"sync"

	"onejob/lock"
	"onejob/tasks"
)

// ahead asks for locks while the claim that takes their tasks commits: Consul's disk and
// Postgres' are slow at the same time, and not one after the other.
//
// It is safe because a lock without a running row only keeps others from the key. The
// handler starts when both are there: the lock is granted under the record of the database
// and under the session, as after the claim.
type ahead struct {
	mu    sync.Mutex
	locks map[int64]chan locked // by fence
	over  bool                  // the claim has returned
}

// locked is the answer to a request for a lock.
type locked struct {
	request lock.Request
	lease   lock.Lease
	err     error
}

// mostAhead is how many locks of one claim are asked for ahead. A replica that claims more
// at once has enough to do anyway.
const mostAhead = 32

// lock asks for the locks of rows that a claim like c takes.
func (a *ahead) lock(w *Worker, c tasks.Claim, rows []tasks.Taken) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.over || len(rows) > mostAhead {
		return
	}
	for _, r := range rows {
		t := &tasks.Task{ID: r.ID, Fence: r.Fence, LockKey: strconv.FormatInt(r.ID, 10), Session: c.Session, Server: c.Server}
		answer := make(chan locked, 1)
		if a.locks == nil {
			a.locks = map[int64]chan locked{}
		}
		a.locks[t.Fence] = answer
		go func() { answer <- w.askLock(t, ownLock(t)) }()
	}
}

// end says that the claim has returned.
func (a *ahead) end() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.over = true
}

// take returns where the answer comes for a task, and nil if nobody has asked. The caller
// then has to release the lease.
func (a *ahead) take(t *tasks.Task) <-chan locked {
	answer, asked := a.locks[t.Fence]
	if !asked {
		return nil
	}
	delete(a.locks, t.Fence)
	return answer
}

// release releases what nobody has taken.
func (a *ahead) release() {
	for _, answer := range a.locks {
		go func() {
			if l := <-answer; l.err == nil {
				_ = l.lease.Release(context.Background()) // or it ends with the session
			}
		}()
	}
}

// ownLock is the request for the lock of a task without a lock_key. Most locks are of this
// sort: short values keep Consul small.
func ownLock(t *tasks.Task) lock.Request {
	value := strconv.AppendInt(append(make([]byte, 0, 64), `{"task_id":`...), t.ID, 10)
	value = strconv.AppendInt(append(value, `,"fence":`...), t.Fence, 10)
	return lock.Request{Session: t.Session, Key: t.LockKey, Task: t.ID, Value: append(value, '}')}
}

// askLock asks once for a lock, under the record of the database that covers the task.
func (w *Worker) askLock(t *tasks.Task, request lock.Request) locked {
	var err error
	if request.Database, err = w.database.cover(w.shutdown.giveUp, t); err != nil {
		return locked{err: err}
	}
	lease, err := w.cfg.Locks.Acquire(context.Background(), request)
	return locked{request, lease, err}
}

// sinceClaimed returns the answer to a request that was made while the task was claimed. If
// the record of the database is another one by now, the lock is asked for again: it must be
// granted under the record during which the claim was committed.
func (w *Worker) sinceClaimed(t *tasks.Task, l locked) locked {
	if l.err != nil {
		return l
	}
	if version, err := w.database.cover(w.shutdown.giveUp, t); err == nil && version == l.request.Database {
		return l
	}
	_ = l.lease.Release(context.Background())
	return w.askLock(t, ownLock(t))
}
