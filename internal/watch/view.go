package watch

import (
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/mattn/go-runewidth"

	"onejob/internal/plaintext"
	"onejob/internal/snapshot"
)

// style is how a piece of text looks: parameters of the escape sequence SGR.
type style string

const (
	plain    style = ""
	strong   style = "1"
	faint    style = "2"
	reversed style = "7"
)

// colours are used only where colours are wanted.
var colours = map[snapshot.Level]style{snapshot.Good: "32", snapshot.Warning: "33", snapshot.Bad: "31"}

// line is a line of the screen.
type line struct {
	text  string
	style style
}

// draw returns the screen: as many lines as it is high, none wider than it.
func (m *model) draw() string {
	lines := m.lines()
	lines = lines[:min(len(lines), m.height)]
	var b strings.Builder
	for i, l := range lines {
		if i > 0 {
			b.WriteByte('\n')
		}
		text := fit(l.text, m.width)
		if l.style == plain {
			b.WriteString(text)
		} else {
			fmt.Fprintf(&b, "\x1b[%sm%s\x1b[m", l.style, text)
		}
	}
	return b.String()
}

// fit returns the beginning of a text that is as wide as there is room. Whatever is drawn
// passes here.
func fit(text string, width int) string {
	if width <= 0 {
		return ""
	}
	return runewidth.Truncate(plaintext.Printable(text), width, "…")
}

// of returns a style with the colour of a level.
func (m *model) of(l snapshot.Level, s style) style {
	c := colours[l]
	switch {
	case !m.cfg.Colour || c == "" || l == snapshot.Good && s != strong:
		return s
	case s == plain:
		return c
	}
	return s + ";" + c
}

func (m *model) lines() []line {
	head := m.head()
	room := max(m.height-len(head)-1, 0)
	var body []line
	if m.page != nil {
		body = m.pageBody(room)
	} else {
		body = m.body(room)
	}
	for len(body) < room {
		body = append(body, line{})
	}
	return append(append(head, body[:room]...), m.foot())
}

// head is the verdict, in at most a quarter of the screen, and a blank line if there is room.
func (m *model) head() []line {
	word := map[snapshot.Level]string{snapshot.Good: "OK", snapshot.Warning: "LOOK", snapshot.Bad: "BAD"}[m.screen.Level]
	lines := wrap(word+": "+m.screen.Verdict, m.width)
	if most := max(1, m.height/4); len(lines) > most {
		lines[most-1] += " " + lines[most]
		lines = lines[:most]
	}
	var head []line
	for _, l := range lines {
		head = append(head, line{l, m.of(m.screen.Level, strong)})
	}
	if m.height >= 16 {
		head = append(head, line{})
	}
	return head
}

// body is the part of the blocks that is visible: the selected row is.
func (m *model) body(room int) []line {
	var all []line
	first, last := 0, 0 // lines that should be visible
	for i, b := range m.shown {
		if i > 0 {
			all = append(all, line{})
		}
		start := len(all)
		all = append(all, line{b.Title, strong})
		for _, note := range b.Notes {
			for _, l := range wrap(note, m.width-2) {
				all = append(all, line{"  " + l, m.of(snapshot.Warning, plain)})
			}
		}
		if len(b.Rows) == 0 {
			continue
		}
		lines := b.Lines(max(m.width-2, 1))
		all = append(all, line{"  " + lines[0], faint})
		for j, text := range lines[1:] {
			l := line{"  " + text, m.of(b.Rows[j].Level, plain)}
			if m.at == (place{i, j}) {
				l = line{"> " + runewidth.FillRight(text, max(m.width-2, 0)), m.of(b.Rows[j].Level, reversed)}
				first, last = len(all), len(all)
				if j == 0 {
					first = start
				}
			}
			all = append(all, l)
		}
	}
	if len(all) == 0 {
		text := "Nothing runs, waits or fails."
		if m.filter != "" {
			text = fmt.Sprintf("No row contains %q.", m.filter)
		}
		all = append(all, line{text, plain})
	}
	m.top = min(m.top, first)
	m.top = max(m.top, last-room+1, 0)
	m.top = min(m.top, max(len(all)-room, 0))
	all = all[m.top:]
	return all[:min(len(all), room)]
}

// Lines returns the names of the columns, and the rows, aligned. Cells that may be cut are as narrow as they
// must be to fit into width; zero is any width.
func (b Block) Lines(width int) []string {
	var names []string
	var cut []bool
	for _, c := range b.Columns {
		names, cut = append(names, c.Name), append(cut, c.Cut)
	}
	table := [][]string{names}
	for _, r := range b.Rows {
		cells := make([]string, len(names))
		for i := range cells {
			cells[i] = plaintext.Printable(r.Cells[i])
		}
		table = append(table, cells)
	}
	return plaintext.Columns(table, cut, width)
}

// pageBody is the part of the open page that is visible.
func (m *model) pageBody(room int) []line {
	p := m.page
	all := []line{{p.title, strong}}
	add := func(text string, s style) {
		for _, l := range wrap(text, m.width) {
			all = append(all, line{l, s})
		}
	}
	for _, note := range p.notes {
		add(note, m.of(snapshot.Warning, plain))
	}
	for _, cell := range p.row {
		add(cell, plain)
	}
	if p.task != 0 && len(p.row) > 0 {
		add("", plain)
	}
	switch {
	case p.err != nil:
		add(p.err.Error(), m.of(snapshot.Bad, plain))
	case p.text == "" && p.loading:
		add("reading ...", faint)
	case p.text != "":
		for _, l := range strings.Split(strings.TrimRight(p.text, "\n"), "\n") {
			add(l, plain)
		}
	}
	p.top = max(min(p.top, len(all)-room), 0)
	all = all[p.top:]
	return all[:min(len(all), room)]
}

// foot is what the keys do, or the filter; and when the snapshot was taken.
func (m *model) foot() line {
	left := "? help  enter open  / filter  q quit"
	switch {
	case m.page != nil:
		left = "esc back  j/k scroll  q quit"
	case m.typing:
		left = "/" + m.filter + "_"
	case m.filter != "":
		left = fmt.Sprintf("only rows with %q; esc shows all", m.filter)
	}
	var right string
	foot := faint
	if m.seen != nil {
		right = m.seen.At.Local().Format("15:04:05")
		if age := m.now.Sub(m.seen.At); age > late {
			right += fmt.Sprintf(", %v ago", snapshot.Seconds(age.Round(time.Second)))
			foot = m.of(snapshot.Warning, plain)
		}
	}
	room := m.width - runewidth.StringWidth(right) - 2
	if room < 12 && !m.typing && m.filter == "" {
		return line{right, foot}
	}
	if room < 12 {
		return line{left, foot}
	}
	return line{runewidth.FillRight(fit(left, room), room) + "  " + right, foot}
}

// late is when a snapshot should have been renewed, and more than once.
const late = 3 * snapshot.Every

// wrap breaks a text into lines, at spaces where it can.
func wrap(text string, width int) (lines []string) {
	width = max(width, 2)
	text = plaintext.Printable(text)
	indent := text[:len(text)-len(strings.TrimLeft(text, " "))]
	for {
		begin := beginning(text, width)
		if runewidth.StringWidth(begin) <= width {
			break
		}
		head := runewidth.Truncate(begin, width, "")
		if head == "" { // one character that is wider
			break
		}
		if space := strings.LastIndexByte(text[:min(len(head)+1, len(text))], ' '); space > len(indent) {
			head = text[:space]
		}
		lines = append(lines, strings.TrimRight(head, " "))
		text = strings.TrimLeft(text[len(head):], " ")
	}
	return append(lines, text)
}

// beginning returns so much of a text that it is wider than width, or all of it: to measure
// all that is left of a long text for each of its lines takes seconds.
func beginning(text string, width int) string {
	for n := 8 * width; n < len(text); n *= 2 { // characters may have no width
		end := n
		for !utf8.RuneStart(text[end]) {
			end--
		}
		if runewidth.StringWidth(text[:end]) > width {
			return text[:end]
		}
	}
	return text
}
