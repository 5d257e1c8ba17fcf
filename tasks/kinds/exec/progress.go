package exec

import (
	"bytes"
	"io"
	"math"
	"strconv"
	"strings"
)

// progressPrefix begins a line of a command's output that says how far it is:
//
//	::progress 40%
//	::progress 400/1000 rows copied
//	::progress waits for the mirror
const progressPrefix = "::progress "

// maxProgressLine is how much of such a line is read, in bytes.
const maxProgressLine = 512

// progressFilter passes on what is written to it, without the lines that say how far the
// command is; those it reports. One goroutine at a time may use it.
type progressFilter struct {
	to     io.Writer
	report func(percent float64, text string)

	inside bool   // the next byte is not the first of a line
	held   []byte // of the present line, if that is a report or may become one
}

// Write returns the errors of to.
func (f *progressFilter) Write(p []byte) (int, error) {
	for rest := p; len(rest) > 0; {
		switch n := len(f.held); {
		case n == 0:
			i := f.next(rest)
			if i == 0 {
				f.held, rest = append(f.held, rest[0]), rest[1:]
				continue
			}
			if _, err := f.to.Write(rest[:i]); err != nil {
				return 0, err
			}
			f.inside, rest = rest[i-1] != '\n', rest[i:]
		case n < len(progressPrefix):
			if rest[0] != progressPrefix[n] {
				if err := f.passOn(); err != nil {
					return 0, err
				}
				continue
			}
			f.held, rest = append(f.held, rest[0]), rest[1:]
		default:
			line, after, ended := bytes.Cut(rest, []byte("\n"))
			f.held = append(f.held, line[:min(len(line), maxProgressLine-min(n, maxProgressLine))]...)
			if rest = after; ended {
				f.tell()
			}
		}
	}
	return len(p), nil
}

// next returns where the next line begins in p that may be a report; len(p) if none does.
func (f *progressFilter) next(p []byte) int {
	if !f.inside && p[0] == progressPrefix[0] {
		return 0
	}
	for i := 0; ; {
		end := bytes.IndexByte(p[i:], '\n')
		if end < 0 {
			return len(p)
		}
		if i += end + 1; i == len(p) || p[i] == progressPrefix[0] {
			return i
		}
	}
}

// passOn ends the present line's being held.
func (f *progressFilter) passOn() error {
	_, err := f.to.Write(f.held)
	f.held, f.inside = f.held[:0], true
	return err
}

// tell reports the line that is held.
func (f *progressFilter) tell() {
	f.report(parseProgress(string(f.held[len(progressPrefix):])))
	f.held, f.inside = f.held[:0], false
}

// Close reports or passes on a last line that has no end.
func (f *progressFilter) Close() error {
	switch {
	case len(f.held) >= len(progressPrefix):
		f.tell()
	case len(f.held) > 0:
		return f.passOn()
	}
	return nil
}

// parseProgress reads what follows the prefix. The percentage is negative if there is none.
func parseProgress(s string) (percent float64, text string) {
	s = strings.TrimSpace(s)
	first, rest, _ := strings.Cut(s, " ")
	if number, is := strings.CutSuffix(first, "%"); is {
		if percent, ok := amount(number); ok {
			return percent, strings.TrimSpace(rest)
		}
	}
	if done, all, is := strings.Cut(first, "/"); is {
		done, ok := amount(done)
		all, ok2 := amount(all)
		if ok && ok2 && all > 0 {
			return 100 * done / all, s
		}
	}
	return -1, s
}

// amount reads a finite number that is not negative.
func amount(s string) (float64, bool) {
	n, err := strconv.ParseFloat(s, 64)
	return n, err == nil && n >= 0 && !math.IsInf(n, 0)
}
