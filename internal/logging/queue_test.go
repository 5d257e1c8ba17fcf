package logging

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

// synced waits until what was written before is handed on, for longer than Sync does.
func synced(t *testing.T, q *Queue) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for err := q.Sync(); err != nil; err = q.Sync() {
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// notifying closes a channel when the first Write begins.
type notifying struct {
	io.Writer
	once  sync.Once
	begun chan struct{}
}

func (w *notifying) Write(p []byte) (int, error) {
	w.once.Do(func() { close(w.begun) })
	return w.Writer.Write(p)
}

// A reader who does not read delays nobody. What there was no room for is counted, and the
// reader learns of it when it reads again.
func TestQueueWithoutAReader(t *testing.T) {
	t.Parallel()
	in, out := io.Pipe() // which has no buffer
	defer in.Close()
	stuck := &notifying{Writer: out, begun: make(chan struct{})}
	q := &Queue{Out: stuck}
	q.OnDrop(func(lines int) { fmt.Fprintf(q, "dropped %d\n", lines) })
	const lines, pad = 20_000, 1000 // some 20 MB
	for i := range lines {
		fmt.Fprintf(q, "%d%*s\n", i, pad, "end")
		if i == 0 {
			<-stuck.begun // or lines may be dropped that come before some that are kept
		}
	}
	if err := q.Sync(); !errors.Is(err, errStalled) {
		t.Errorf("Sync returns %v while nobody reads", err)
	}

	read := make(chan []string)
	go func() {
		var all []string
		for scan := bufio.NewScanner(in); scan.Scan(); {
			all = append(all, scan.Text())
		}
		read <- all
	}()
	synced(t, q)
	fmt.Fprintln(q, "afterwards")
	synced(t, q)
	out.Close()
	all := <-read
	if len(all) < 1000 {
		t.Fatalf("%d lines were kept of some 20 MB", len(all))
	}
	kept := all[:len(all)-2]
	for i, line := range kept {
		if want := fmt.Sprintf("%d%*s", i, pad, "end"); line != want {
			t.Fatalf("line %d is %q", i, line)
		}
	}
	if got, want := all[len(all)-2], fmt.Sprintf("dropped %d", lines-len(kept)); got != want {
		t.Errorf("after %d lines it says %q, want %q", len(kept), got, want)
	}
	if all[len(all)-1] != "afterwards" {
		t.Errorf("the last line is %q", all[len(all)-1])
	}
	if got := q.Lost(); got != uint64(lines-len(kept)) {
		t.Errorf("%d lines were lost, it counts %d", lines-len(kept), got)
	}
}

// fullDisk takes so many bytes, and then none until it is emptied.
type fullDisk struct {
	mu   sync.Mutex
	room int
	has  strings.Builder
}

func (d *fullDisk) Write(p []byte) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := min(len(p), d.room)
	d.room -= n
	d.has.Write(p[:n])
	if n < len(p) {
		return n, io.ErrShortWrite
	}
	return n, nil
}

// Lines that cannot be written are counted, and what comes after a part of a line begins a
// line of its own.
func TestQueueOnAFullDisk(t *testing.T) {
	t.Parallel()
	d := &fullDisk{room: 10}
	q := &Queue{Out: d}
	q.OnDrop(func(lines int) { fmt.Fprintf(q, "dropped %d\n", lines) })
	write := func(lines ...string) {
		for _, l := range lines {
			fmt.Fprintln(q, l)
			synced(t, q)
		}
	}
	write("first", "second", "third", "fourth")
	d.mu.Lock()
	d.room = 1000
	d.mu.Unlock()
	write("fifth")
	if got, want := d.has.String(), "first\nseco\nfifth\ndropped 3\n"; got != want {
		t.Errorf("it has %q, want %q", got, want)
	}
}

// Lines of many goroutines stay whole, and those of each in order.
func TestQueueOfMany(t *testing.T) {
	t.Parallel()
	d := &fullDisk{room: 1 << 30}
	q := &Queue{Out: d}
	var writers sync.WaitGroup
	for w := range 8 {
		writers.Go(func() {
			for i := range 500 {
				fmt.Fprintf(q, "%d %d\n", w, i)
			}
		})
	}
	writers.Wait()
	synced(t, q)
	var next [8]int
	for line := range strings.Lines(d.has.String()) {
		var w, i int
		if _, err := fmt.Sscanf(line, "%d %d\n", &w, &i); err != nil || next[w] != i {
			t.Fatalf("after %d lines of writer %d comes %q (%v)", next[w], w, line, err)
		}
		next[w]++
	}
	for w, n := range next {
		if n != 500 {
			t.Errorf("%d lines of writer %d", n, w)
		}
	}
}

func TestLastWithoutAReader(t *testing.T) {
	t.Parallel()
	in, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	Last(out, "read")
	line, err := bufio.NewReader(in).ReadString('\n')
	if line != "read\n" || err != nil {
		t.Errorf("%q, %v", line, err)
	}
	done := make(chan struct{})
	go func() { defer close(done); Last(out, strings.Repeat("x", 1<<20)) }() // more than a pipe holds
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Error("it waits for a reader")
	}
	in.Close() // the writer goes on
	<-done
	out.Close()
}
