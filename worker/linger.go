package worker

import (
	"sync"
	"time"
)

// lingerFor is how long the lock of a finished task may wait for others', so that they are released
// in one transaction: without it nearly each task that comes alone costs an entry of Consul's log of
// its own for that. Nobody waits for such a lock: no other task has its key, and the task is not
// claimed again.
const lingerFor = 20 * time.Millisecond

// linger lets those who come within lingerFor go on together. The zero value is ready.
type linger struct {
	mu   sync.Mutex
	next chan struct{} // closed when they go on; nil if nobody waits
}

// wait returns at most lingerFor later.
func (l *linger) wait() {
	l.mu.Lock()
	if l.next == nil {
		next := make(chan struct{})
		l.next = next
		time.AfterFunc(lingerFor, func() {
			l.mu.Lock()
			l.next = nil
			l.mu.Unlock()
			close(next)
		})
	}
	next := l.next
	l.mu.Unlock()
	<-next
}
