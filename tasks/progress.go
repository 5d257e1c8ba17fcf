package tasks

import (
	"math"
	"strings"
	"unicode"
	"unicode/utf8"

	"onejob/boottime"
)

// Progress is how far a handler is, as it has said itself.
type Progress struct {
	Percent float64 // from 0 to 100; negative if it is not known
	Text    string  // one line; may be empty
	At      boottime.Instant
}

// maxProgressText is how much of the text of a [Progress] is kept, in bytes.
const maxProgressText = 200

// Report says how far the handler is, for people who look: a percentage, or a negative number
// if it is not known, and a line such as "400 of 1000 rows". Only the last one is kept. It is
// in onejob.progress within about a second, as long as the attempt runs.
//
// Report costs little and never waits. Of the text, 200 bytes are kept. It may be called by
// several goroutines at once.
func (a *Attempt) Report(percent float64, text string) {
	if !(percent >= 0) { // or not a number
		percent = -1
	}
	a.progress.Store(&Progress{math.Round(10*min(percent, 100)) / 10, progressText(text), boottime.Now()})
}

// Progress returns what the handler said last, and whether it has said anything.
func (a *Attempt) Progress() (p Progress, said bool) {
	last := a.progress.Load()
	if last == nil {
		return p, false
	}
	return *last, true
}

// progressText returns the beginning of a text as a line that Postgres accepts.
func progressText(s string) string {
	s = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(progressBeginning(s), "\uFFFD"))
	return strings.TrimSpace(progressBeginning(s)) // what stands for a byte that is not UTF-8 is longer
}

// progressBeginning returns of a text what is kept, without a part of a character.
func progressBeginning(s string) string {
	cut := maxProgressText
	if len(s) <= cut {
		return s
	}
	for cut > maxProgressText-utf8.UTFMax && !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut]
}
