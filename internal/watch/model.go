package watch

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"

	"onejob/internal/snapshot"
)

// model is what is shown, and where in it the reader is.
type model struct {
	ctx context.Context // ends when nobody looks any more
	cfg Config

	width, height int
	now           time.Time

	seen   *snapshot.Snapshot
	screen Screen
	shown  []Block // the blocks of screen with the rows that pass the filter

	at  place // the selected row
	top int   // the first visible line of the blocks

	filter string
	typing bool // keys go into the filter

	page *page // what is open instead of the blocks; nil: nothing
}

// place is a row of model.shown.
type place struct{ block, row int }

// page is text of which a part is visible: the help, or a row with the story of its task.
type page struct {
	title   string
	block   string   // the name of the row's block; empty: there is no row
	key     string   // the row's
	row     []string // a line for each cell
	notes   []string // what keeps the row from being current
	task    int64    // zero: there is no story
	text    string   // the story
	err     error    // why there is none
	loading bool     // the story is being read
	gone    bool     // the last snapshot has no such row
	top     int
}

func newModel(ctx context.Context, cfg Config) *model {
	return &model{ctx: ctx, cfg: cfg, width: 80, height: 24, now: cfg.Now()}
}

// show takes a snapshot over. The same row stays selected, if it is still there.
func (m *model) show(s *snapshot.Snapshot) {
	if s == m.seen {
		return
	}
	before := m.seen
	m.seen, m.screen, m.now = s, m.cfg.Screen(s), m.cfg.Now()
	m.refresh()
	if m.page != nil {
		m.renewPage(before)
	}
}

// renewPage fills the row of the open page anew. One that is gone stays as it was in the
// snapshot before, and says so: somebody reads it.
func (m *model) renewPage(before *snapshot.Snapshot) {
	p := m.page
	if p.block == "" {
		return
	}
	for _, b := range m.screen.Blocks {
		if name(b.Title) != p.block {
			continue
		}
		if i := slices.IndexFunc(b.Rows, func(r Row) bool { return r.Key == p.key }); i >= 0 {
			p.fill(b, b.Rows[i])
			return
		}
	}
	if !p.gone {
		p.gone = true
		p.notes = []string{fmt.Sprintf("The newest snapshot has no such row. This is of %s.", before.At.Local().Format("15:04:05"))}
	}
}

// fill takes a row over. The story stays that of the task for which the page was opened.
func (p *page) fill(b Block, r Row) {
	if p.task == 0 {
		p.title = b.Title
	}
	p.row, p.notes, p.gone = nil, b.Notes, false
	for i, c := range b.Columns {
		if r.Cells[i] != "" {
			p.row = append(p.row, strings.ToLower(c.Name)+": "+r.Cells[i])
		}
	}
}

// refresh works out which rows pass the filter, and keeps the selection.
func (m *model) refresh() {
	var title, key string
	if r := m.selected(); r != nil {
		title, key = m.shown[m.at.block].Title, r.Key
	}
	before := m.at
	m.shown = nil
	for _, b := range m.screen.Blocks {
		b.Rows = slices.Clone(b.Rows)
		b.Rows = slices.DeleteFunc(b.Rows, func(r Row) bool { return !r.matches(m.filter) })
		if len(b.Rows) > 0 || len(b.Notes) > 0 && m.filter == "" {
			m.shown = append(m.shown, b)
		}
	}
	m.at = place{-1, -1}
	near := place{-1, -1} // the row that took its place
	for i, b := range m.shown {
		for j, r := range b.Rows {
			switch {
			case name(b.Title) == name(title) && r.Key == key:
				m.at = place{i, j}
				return
			case name(b.Title) == name(title) && j <= before.row || near.block < 0:
				near = place{i, j}
			}
		}
	}
	m.at = near
}

// name is the part of a title that stays: "RUNNING" of "RUNNING: 3".
func name(title string) string {
	name, _, _ := strings.Cut(title, ":")
	return name
}

func (r Row) matches(filter string) bool {
	if filter == "" {
		return true
	}
	filter = strings.ToLower(filter)
	return slices.ContainsFunc(r.Cells, func(cell string) bool { return strings.Contains(strings.ToLower(cell), filter) })
}

// selected returns the selected row, or nil.
func (m *model) selected() *Row {
	if m.at.block < 0 || m.at.block >= len(m.shown) || m.at.row < 0 || m.at.row >= len(m.shown[m.at.block].Rows) {
		return nil
	}
	return &m.shown[m.at.block].Rows[m.at.row]
}

// places lists all rows.
func (m *model) places() (all []place) {
	for i, b := range m.shown {
		for j := range b.Rows {
			all = append(all, place{i, j})
		}
	}
	return all
}

// move selects the row that is n rows further down, or the last one on the way.
func (m *model) move(n int) {
	all := m.places()
	if len(all) == 0 {
		return
	}
	i := slices.Index(all, m.at) + n
	m.at = all[min(max(i, 0), len(all)-1)]
}

// jump selects the first row of the next block that has rows, or of the one before.
func (m *model) jump(step int) {
	for i, n := m.at.block, len(m.shown); n > 0; {
		i = (i + step + n) % n
		if len(m.shown[i].Rows) > 0 {
			m.at = place{i, 0}
			return
		}
		if i == m.at.block || m.at.block < 0 {
			return
		}
	}
}

func (m *model) setFilter(text string) {
	m.filter = text
	m.refresh()
}

// open shows the selected row in full, with the story of its task.
func (m *model) open() tea.Cmd {
	r := m.selected()
	if r == nil {
		return nil
	}
	b := m.shown[m.at.block]
	p := &page{title: b.Title, task: r.Task, loading: r.Task != 0}
	if r.Task != 0 {
		p.title = fmt.Sprintf("TASK %d", r.Task)
	}
	if !b.Tasks {
		p.block, p.key = name(b.Title), r.Key
		p.fill(b, *r)
	}
	m.page = p
	if p.task == 0 {
		return nil
	}
	return m.tell(p.task)
}

// key does what a key asks for. text is what the key types, if anything.
func (m *model) key(key, text string) tea.Cmd {
	switch {
	case key == "ctrl+c":
		return tea.Quit
	case m.page != nil:
		return m.keyOfPage(key)
	case m.typing:
		return m.keyOfFilter(key, text)
	}
	switch key {
	case "q":
		return tea.Quit
	case "r":
		return m.renew()
	case "/":
		m.typing = true
	case "esc":
		m.setFilter("")
	case "?":
		m.page = &page{title: "KEYS", text: keys}
	case "enter":
		return m.open()
	case "tab":
		m.jump(1)
	case "shift+tab":
		m.jump(-1)
	default:
		m.moveBy(key)
	}
	return nil
}

// moveBy moves the selection, if that is what the key is for.
func (m *model) moveBy(key string) {
	if n, ok := m.distance(key); ok {
		m.move(n)
	}
}

// distance returns by how many lines a key moves.
func (m *model) distance(key string) (int, bool) {
	const all = 1 << 30
	n, ok := map[string]int{
		"up": -1, "k": -1, "down": 1, "j": 1,
		"pgup": -max(1, m.height/2), "pgdown": max(1, m.height/2),
		"home": -all, "end": all,
	}[key]
	return n, ok
}

func (m *model) keyOfFilter(key, text string) tea.Cmd {
	switch key {
	case "esc":
		m.typing = false
		m.setFilter("")
	case "enter":
		m.typing = false
	case "backspace":
		if runes := []rune(m.filter); len(runes) > 0 {
			m.setFilter(string(runes[:len(runes)-1]))
		}
	default:
		if text != "" {
			m.setFilter(m.filter + text)
		} else {
			m.moveBy(key)
		}
	}
	return nil
}

func (m *model) keyOfPage(key string) tea.Cmd {
	switch key {
	case "q":
		return tea.Quit
	case "esc":
		m.page = nil
	case "?":
		if m.page.title == "KEYS" {
			m.page = nil
		}
	case "r":
		return m.renew()
	default:
		if n, ok := m.distance(key); ok {
			m.page.top += n // draw corrects it
		}
	}
	return nil
}

const keys = `up, k        one row up
down, j      one row down
PgUp, PgDn   half a screen
Home, End    the first row, the last row
tab          the next block
shift-tab    the block before
enter        the row in full, and the story of its task
esc          back; clears the filter
/            show only rows that contain a text
r            renew now; otherwise every 2 s
?            this page
q, Ctrl-C    quit

Nothing here changes a task. To do that: onejob tasks, queues, limits and schedules.`
