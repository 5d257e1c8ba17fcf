package logging

import (
	"bytes"
	"errors"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

const (
	queueBytes = 4 << 20     // of lines that wait for a reader; more than that are dropped
	syncWait   = time.Second // for a reader, at the end of the process
	keptBytes  = 64 << 10    // a buffer larger than this is not kept for the next lines
)

// A Queue hands lines on to Out in a goroutine of its own, so that a reader who has stopped
// reading (Ctrl-S in a terminal, a stuck log driver) delays nobody who writes. Lines for which
// there is no room are dropped and counted. It is a zapcore.WriteSyncer; set its fields before
// the first Write.
type Queue struct {
	Out     io.Writer
	Dropped func(lines int) // may be nil; called after a Write to Out has succeeded again. It may write lines

	mu       sync.Mutex
	waiting  []byte
	spare    []byte
	draining chan struct{} // nil unless a goroutine writes; closed when nothing waits any more
	dropped  int           // since Dropped was called
	total    uint64

	torn bool // Out ends in a part of a line; of the goroutine that writes
}

// Write takes a line, or drops it. It never waits for Out, and returns no error.
func (q *Queue) Write(line []byte) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting)+len(line) > queueBytes {
		q.drop(1)
		return len(line), nil
	}
	q.waiting = append(q.waiting, line...)
	if q.draining == nil {
		q.draining = make(chan struct{})
		go q.drain(q.draining)
	}
	return len(line), nil
}

// drop counts lines. The mutex is held.
func (q *Queue) drop(lines int) {
	q.dropped += lines
	q.total += uint64(lines)
}

// drain writes until nothing waits.
func (q *Queue) drain(done chan struct{}) {
	for {
		q.mu.Lock()
		if len(q.waiting) == 0 {
			q.draining = nil
			close(done)
			q.mu.Unlock()
			return
		}
		batch := q.waiting
		q.waiting, q.spare = q.spare[:0], nil
		q.mu.Unlock()

		n, err := q.write(batch)

		q.mu.Lock()
		dropped := 0
		if err != nil {
			q.drop(bytes.Count(batch[n:], newline))
		} else {
			dropped, q.dropped = q.dropped, 0
		}
		if cap(batch) <= keptBytes {
			q.spare = batch
		}
		q.mu.Unlock()
		if dropped > 0 && q.Dropped != nil {
			q.Dropped(dropped)
		}
	}
}

// write writes lines to Out, the first at the beginning of a line.
func (q *Queue) write(lines []byte) (n int, err error) {
	if q.torn {
		if _, err := q.Out.Write(newline); err != nil {
			return 0, err
		}
		q.torn = false
	}
	n, err = q.Out.Write(lines)
	q.torn = err != nil && n > 0 && lines[n-1] != '\n'
	return n, err
}

var newline = []byte{'\n'}

// errStalled is what Sync returns when lines still wait.
var errStalled = errors.New("logging: nobody reads the log")

// Sync waits until what was written before has been handed on, a second at most.
func (q *Queue) Sync() error {
	q.mu.Lock()
	done := q.draining
	q.mu.Unlock()
	if done == nil {
		return nil
	}
	select {
	case <-done:
		return nil
	case <-time.After(syncWait):
		return errStalled
	}
}

// Lost returns how many lines were dropped since the process started.
func (q *Queue) Lost() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.total
}

// SurviveReaders lets the process outlive a reader of its stdout or stderr that has ended:
// a write fails then, where the signal SIGPIPE would end the process. Programs that this one
// starts are not affected, as they would be if it ignored the signal.
func SurviveReaders() {
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
}
