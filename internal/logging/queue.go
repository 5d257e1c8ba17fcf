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
// there is no room are dropped and counted. It is a zapcore.WriteSyncer.
type Queue struct {
	Out io.Writer

	mu       sync.Mutex
	tell     func(lines int) // may be nil
	waiting  []byte
	spare    []byte
	draining chan struct{} // nil unless a goroutine writes; closed when nothing waits any more
	dropped  int           // and not told yet
	total    uint64

	torn bool // Out ends in a part of a line; of the goroutine that writes
}

// OnDrop sets what is called after lines were dropped, once others can be written again. It may
// write lines.
func (q *Queue) OnDrop(f func(lines int)) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.tell = f
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
		tell := q.tell
		if cap(batch) <= keptBytes {
			q.spare = batch
		}
		q.mu.Unlock()
		if dropped > 0 && tell != nil {
			tell(dropped)
		}
	}
}

// write writes lines to Out, the first at the beginning of a line, and returns how much it has
// written. No more goes out at once than a pipe takes as a whole, or one line: this process may be
// killed meanwhile, and others write to the same pipe.
func (q *Queue) write(lines []byte) (written int, err error) {
	for written < len(lines) {
		if q.torn {
			if _, err := q.Out.Write(newline); err != nil {
				return written, err
			}
			q.torn = false
		}
		some := firstLines(lines[written:], pipeBuf)
		n, err := q.Out.Write(some)
		written += n
		if err != nil {
			q.torn = n > 0 && some[n-1] != '\n'
			return written, err
		}
	}
	return written, nil
}

// pipeBuf is Linux' PIPE_BUF: a write of up to so many bytes to a pipe is not mixed with others.
const pipeBuf = 4096

// firstLines returns as many whole lines as most bytes hold, and one at least.
func firstLines(lines []byte, most int) []byte {
	if len(lines) <= most {
		return lines
	}
	if end := bytes.LastIndexByte(lines[:most], '\n'); end >= 0 {
		return lines[:end+1]
	}
	if end := bytes.IndexByte(lines, '\n'); end >= 0 {
		return lines[:end+1]
	}
	return lines
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

// lastMaxWait is how long the end of a process waits for the reader of its last words.
const lastMaxWait = 5 * time.Second

// Last writes why a process ends. A reader that has stopped reading does not keep it from ending.
func Last(out io.Writer, text string) {
	written := make(chan struct{})
	go func() {
		defer close(written)
		_, _ = io.WriteString(out, text+"\n")
	}()
	select {
	case <-written:
	case <-time.After(lastMaxWait):
	}
}
