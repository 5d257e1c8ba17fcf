// Package plaintext makes text that others chose safe to write to a terminal, and fits
// columns of it into a width.
package plaintext

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/mattn/go-runewidth"
)

// Printable returns s in a form that is safe to write to a terminal. Users that may
// insert a row, and commands that a task runs, choose text that an operator reads.
// Escape sequences could rewrite the screen or fill the clipboard, line breaks could
// forge a row of a table, and bidirectional marks could reorder the text. So
// everything but letters, marks, digits, punctuation, symbols and spaces is written
// as in a Go string literal, such as \x1b or \u202e.
func Printable(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case unicode.IsGraphic(r):
			b.WriteString(s[i : i+n])
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\t':
			b.WriteString(`\t`)
		case r == '\r':
			b.WriteString(`\r`)
		case r < 0x80:
			fmt.Fprintf(&b, `\x%02x`, r)
		case r < 0x10000:
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			fmt.Fprintf(&b, `\U%08x`, r)
		}
		i += n
	}
	return b.String()
}

// Plural returns a number of things in words.
func Plural[N int | int64](n N, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// Lines is Printable for text of several lines, such as a command's
// output: line breaks stay, and a tab becomes four spaces.
func Lines(s string) string {
	s = strings.ReplaceAll(strings.ReplaceAll(s, "\r\n", "\n"), "\t", "    ")
	lines := strings.Split(s, "\n")
	for i, line := range lines {
		lines[i] = Printable(line)
	}
	return strings.Join(lines, "\n")
}

// FirstLine returns the beginning of the first line of s, at most n characters of it. It is no safer
// than s.
func FirstLine(s string, n int) string {
	s, _, more := strings.Cut(s, "\n")
	if r := []rune(s); len(r) > n {
		s, more = string(r[:n]), true
	}
	if more {
		s += " ..."
	}
	return s
}

// Word returns s as one word of a command that an operator copies into a shell: as it is if a shell
// leaves it so, or else quoted. Users that may insert a row choose the names of queues and limits.
func Word(s string) string {
	plain := func(r rune) bool {
		return r < utf8.RuneSelf && (r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-_./:@%+,", r))
	}
	if s != "" && !strings.ContainsFunc(s, func(r rune) bool { return !plain(r) }) {
		return s
	}
	return Quoted(s)
}

// Quoted is Word in quotes in any case.
func Quoted(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// Argument is Word for an argument that is no flag, even if it looks like one.
func Argument(s string) string {
	if strings.HasPrefix(s, "-") {
		return "-- " + Word(s)
	}
	return Word(s)
}

// Columns returns rows of printable cells as lines in which the cells of a column are aligned. Cells of
// columns that may be cut are, so that a line fits into width; zero is any width. Then nothing is cut,
// and cells wider than 200 are not aligned: one long cell would make all lines as long.
func Columns(rows [][]string, cut []bool, width int) []string {
	var widths []int
	for _, row := range rows {
		for i, cell := range row {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], runewidth.StringWidth(cell))
		}
	}
	if width > 0 {
		narrow(widths, cut, width)
	} else {
		for i, w := range widths {
			widths[i] = min(w, widestAligned)
		}
	}
	lines := make([]string, len(rows))
	for i, row := range rows {
		for j, cell := range row {
			if width > 0 {
				cell = runewidth.Truncate(cell, widths[j], "…")
			}
			lines[i] += runewidth.FillRight(cell, widths[j]) + gap
		}
		lines[i] = strings.TrimRight(lines[i], " ")
	}
	return lines
}

const (
	gap           = "  " // between columns
	widestAligned = 200  // if no width is given
)

// narrow makes columns that may be cut narrower until all fit into total, the widest
// first. None gets narrower than 8.
func narrow(widths []int, cut []bool, total int) {
	sum := len(gap) * (len(widths) - 1)
	for _, w := range widths {
		sum += w
	}
	for ; sum > total; sum-- {
		widest := -1
		for i, w := range widths {
			if cut[i] && w > 8 && (widest < 0 || w > widths[widest]) {
				widest = i
			}
		}
		if widest < 0 {
			return
		}
		widths[widest]--
	}
}
