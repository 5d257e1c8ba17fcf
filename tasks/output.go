package tasks

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"
)

// DefaultOutputLimit is how much of an attempt's output is kept, in bytes,
// half of it from the beginning and half from the end.
const DefaultOutputLimit = 16 << 10

// MaxKept is the most, in bytes, that is kept of an attempt: the output of a command or
// a handler, or the response to a request. Each attempt that runs may hold that much in
// memory.
const MaxKept = 16 << 20

// Output keeps the beginning and the end of what is written to it and counts
// the rest, so that a chatty task costs a fixed amount of memory. Its methods
// may be called by several goroutines at once.
type Output struct {
	mu    sync.Mutex
	limit int // of head and of tail, each
	head  []byte
	tail  []byte // a ring once it is full
	next  int    // where the ring's next byte goes
	total int64
}

// NewOutput returns an Output that keeps at most limit bytes, rounded up to an even number, and no
// more than MaxKept. Zero means DefaultOutputLimit.
func NewOutput(limit int) *Output {
	if limit <= 0 {
		limit = DefaultOutputLimit
	}
	return &Output{limit: half(limit)}
}

// half returns how much of the limit is for the beginning, and how much for the end.
func half(limit int) int { return (min(limit, MaxKept) + 1) / 2 }

// Limit changes how many bytes are kept, MaxKept at most; it must come before the first write.
func (o *Output) Limit(limit int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.total == 0 && limit > 0 {
		o.limit = half(limit)
	}
}

// Write never fails.
func (o *Output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	n := len(p)
	o.total += int64(n)
	if room := o.limit - len(o.head); room > 0 {
		k := min(room, len(p))
		o.head = append(o.head, p[:k]...)
		p = p[k:]
	}
	if len(p) > o.limit {
		p = p[len(p)-o.limit:]
	}
	if room := o.limit - len(o.tail); room > 0 && len(p) > 0 {
		k := min(room, len(p))
		o.tail = append(o.tail, p[:k]...)
		p = p[k:]
	}
	for len(p) > 0 {
		k := copy(o.tail[o.next:], p)
		o.next = (o.next + k) % o.limit
		p = p[k:]
	}
	return n, nil
}

// String returns what was kept as text that Postgres accepts: a NUL byte, or a
// byte that is not UTF-8, is written as \x and two digits. Where something was
// left out, a line in the middle says how many bytes.
func (o *Output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	tail := append(append([]byte(nil), o.tail[o.next:]...), o.tail[:o.next]...)
	left := o.total - int64(len(o.head)) - int64(len(tail))
	if left == 0 {
		return Text(string(o.head) + string(tail))
	}
	return fmt.Sprintf("%s\n... %d bytes left out ...\n%s", Text(string(o.head)), left, Text(string(tail)))
}

// maxLastLine is the most that LastLine returns, in bytes.
const maxLastLine = 300

// LastLine returns the last line of what was kept that is not blank, without the white
// space around it, as text that Postgres accepts. Of a line of more than 300 bytes it
// returns the end. It returns "" if there is no such line.
func (o *Output) LastLine() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	kept := slices.Concat(o.tail[o.next:], o.tail[:o.next])
	if len(kept) < maxLastLine && o.total == int64(len(o.head)+len(kept)) {
		kept = append(slices.Clone(o.head), kept...)
	}
	kept = bytes.TrimSpace(kept)
	kept = bytes.TrimSpace(kept[bytes.LastIndexAny(kept, "\r\n")+1:])
	if cut := len(kept) - maxLastLine; cut > 0 {
		for cut < len(kept) && !utf8.RuneStart(kept[cut]) {
			cut++
		}
		return "... " + Text(string(kept[cut:]))
	}
	return Text(string(kept))
}

// Text returns s as text that Postgres accepts: a NUL byte, or a byte that is
// not UTF-8, is written as \x and two digits. Other text is returned as it is.
func Text(s string) string {
	if utf8.ValidString(s) && !strings.Contains(s, "\x00") {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		if r == 0 || (r == utf8.RuneError && n == 1) {
			fmt.Fprintf(&b, `\x%02x`, s[i])
		} else {
			b.WriteString(s[i : i+n])
		}
		i += n
	}
	return b.String()
}
