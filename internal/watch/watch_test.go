package watch

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	tea "charm.land/bubbletea/v2"
	"github.com/mattn/go-runewidth"
	"pgregory.net/rapid"

	"onejob/internal/plaintext"
	"onejob/internal/snapshot"
)

var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.Local)

// screenWith returns two blocks: so many tasks that run, and one replica.
func screenWith(tasks ...int64) Screen {
	running := Block{Title: fmt.Sprintf("RUNNING: %d", len(tasks)), Tasks: true, Columns: []Column{{Name: "ID"}, {Name: "TARGET", Cut: true}, {Name: "FOR"}}}
	for _, id := range tasks {
		running.Rows = append(running.Rows, Row{Key: fmt.Sprint(id), Task: id, Cells: []string{fmt.Sprint(id), fmt.Sprintf("backup --number %d", id), "3 s"}})
	}
	return Screen{
		Level: snapshot.Good, Verdict: fmt.Sprintf("1 replica, %d running, behind 0.0 s, nothing fails, leader one", len(tasks)),
		Blocks: []Block{running, {
			Title: "REPLICAS", Columns: []Column{{Name: "NAME", Cut: true}, {Name: "STATE"}},
			Rows: []Row{{Key: "one", Cells: []string{"one", "working, leads"}}},
		}},
	}
}

// modelOf returns a model that shows s in a terminal of some size.
func modelOf(s Screen, width, height int) *model {
	m := newModel(context.Background(), Config{
		Screen: func(*snapshot.Snapshot) Screen { return s },
		Story:  func(context.Context, int64) (string, error) { return "", nil },
		Now:    func() time.Time { return noon.Add(time.Second) },
	})
	m.show(&snapshot.Snapshot{At: noon})
	m.Update(tea.WindowSizeMsg{Width: width, Height: height})
	return m
}

// then shows another screen, as after a renewal.
func (m *model) then(s Screen) {
	m.cfg.Screen = func(*snapshot.Snapshot) Screen { return s }
	m.show(&snapshot.Snapshot{At: noon.Add(time.Second)})
}

// press sends keys by name; a name of one character types it.
func (m *model) press(names ...string) (cmd tea.Cmd) {
	for _, name := range names {
		text := ""
		if len([]rune(name)) == 1 {
			text = name
		}
		cmd = m.key(name, text)
	}
	return cmd
}

var escape = regexp.MustCompile("\x1b\\[[0-9;]*m")

// text is what is drawn, without styles and spaces at the ends of lines.
func (m *model) textDrawn() string {
	var lines []string
	for l := range strings.SplitSeq(escape.ReplaceAllString(m.draw(), ""), "\n") {
		lines = append(lines, strings.TrimRight(l, " "))
	}
	return strings.Join(lines, "\n")
}

func (m *model) wants(t *testing.T, want string) {
	t.Helper()
	if got := m.textDrawn(); got != want {
		t.Errorf("it shows\n%s\n\nwant\n%s", got, want)
	}
}

func (m *model) wantsSelected(t *testing.T, key string) {
	t.Helper()
	r := m.selected()
	if r == nil || r.Key != key {
		t.Errorf("selected is %+v, want %q", r, key)
		return
	}
	if !regexp.MustCompile(`(?m)^> ` + regexp.QuoteMeta(r.Cells[0])).MatchString(m.textDrawn()) {
		t.Errorf("the selected row %q is not visible:\n%s", key, m.textDrawn())
	}
}

func TestView(t *testing.T) {
	t.Parallel()
	m := modelOf(screenWith(7, 8), 70, 16)
	m.wants(t, `OK: 1 replica, 2 running, behind 0.0 s, nothing fails, leader one

RUNNING: 2
  ID  TARGET             FOR
> 7   backup --number 7  3 s
  8   backup --number 8  3 s

REPLICAS
  NAME  STATE
  one   working, leads





? help  enter open  / filter  q quit                          12:00:00`)
}

func TestSmallTerminal(t *testing.T) {
	t.Parallel()
	m := modelOf(screenWith(7, 8, 9), 40, 10)
	m.wants(t, `OK: 1 replica, 3 running, behind 0.0 s,
nothing fails, leader one
RUNNING: 3
  ID  TARGET             FOR
> 7   backup --number 7  3 s
  8   backup --number 8  3 s
  9   backup --number 9  3 s

REPLICAS
? help  enter open  / filter …  12:00:00`)
	m.press("end")
	m.wantsSelected(t, "one")
}

// Whatever the size, there are as many lines as the terminal has, none is wider, and the
// selected row is visible if anything is.
func TestEverySizeFits(t *testing.T) {
	t.Parallel()
	s := screenWith(1, 2, 3, 4, 5, 6, 7, 8, 9)
	s.Blocks[0].Rows[3].Cells[1] = "発送 e\u0301 ✅ \x1b[2J\u202e 👩‍👩‍👧 日本語日本語日本語日本語日本語"
	s.Blocks[1].Notes = []string{"not current: replicas (it was never read): " + strings.Repeat("timeout ", 20)}
	for width := 0; width < 90; width += 1 + width/20*3 { // above all the small ones
		for height := 0; height < 30; height += 1 + height/10 {
			m := modelOf(s, width, height)
			for _, keys := range [][]string{nil, {"end"}, {"home", "down", "down", "down"}, {"enter"}, {"end"}, {"esc", "?"}, {"esc", "/", "x", "日"}} {
				m.press(keys...)
				lines := strings.Split(m.draw(), "\n")
				if want := max(height, 1); len(lines) != want {
					t.Fatalf("%dx%d after %v: %d lines", width, height, keys, len(lines))
				}
				for _, l := range lines {
					if got := runewidth.StringWidth(escape.ReplaceAllString(l, "")); got > width {
						t.Fatalf("%dx%d after %v: %q is %d wide", width, height, keys, l, got)
					}
				}
				if height >= 4 && width >= 4 && m.page == nil && m.selected() != nil && !strings.Contains(m.textDrawn(), "\n> ") {
					t.Fatalf("%dx%d after %v: the selected row is not visible:\n%s", width, height, keys, m.textDrawn())
				}
			}
		}
	}
}

func TestMoves(t *testing.T) {
	t.Parallel()
	m := modelOf(screenWith(1, 2, 3, 4, 5, 6, 7, 8, 9), 60, 10)
	for _, step := range []struct{ key, want string }{
		{"up", "1"},
		{"down", "2"},
		{"j", "3"},
		{"k", "2"},
		{"pgdown", "7"},
		{"pgup", "2"},
		{"tab", "one"},
		{"tab", "1"},
		{"shift+tab", "one"},
		{"shift+tab", "1"},
		{"end", "one"},
		{"down", "one"},
		{"home", "1"},
	} {
		m.press(step.key)
		m.wantsSelected(t, step.want)
	}
}

func TestSelectionSurvivesRenewals(t *testing.T) {
	t.Parallel()
	m := modelOf(screenWith(1, 2, 3), 60, 20)
	m.press("down")
	m.wantsSelected(t, "2")
	m.then(screenWith(0, 1, 2, 3))
	m.wantsSelected(t, "2")
	m.then(screenWith(0, 1, 3, 4)) // it ended: its place is taken
	m.wantsSelected(t, "3")
	m.then(Screen{Level: snapshot.Good, Verdict: "0 replicas"})
	if m.selected() != nil || !strings.Contains(m.textDrawn(), "Nothing runs, waits or fails.") {
		t.Errorf("it shows\n%s", m.textDrawn())
	}
	m.press("down", "tab", "shift+tab", "enter", "home", "pgup")
	m.then(screenWith(5))
	m.wantsSelected(t, "5")
}

func TestFilter(t *testing.T) {
	t.Parallel()
	m := modelOf(screenWith(11, 12, 23), 60, 20)
	m.press("/", "N", "u", "m", "b", "e", "r", " ", "1", "x", "backspace")
	text := m.textDrawn()
	if strings.Contains(text, "23") || strings.Contains(text, "REPLICAS") || !strings.Contains(text, "number 11") || !strings.Contains(text, "/Number 1_") {
		t.Errorf("it shows\n%s", text)
	}
	m.press("down")
	m.wantsSelected(t, "12")
	m.press("enter")
	if m.page != nil || m.typing {
		t.Error("enter does not end typing alone")
	}
	m.then(screenWith(11, 12, 13, 24))
	m.wantsSelected(t, "12")
	if text = m.textDrawn(); strings.Contains(text, "24") || !strings.Contains(text, `only rows with "Number 1"`) {
		t.Errorf("it shows\n%s", text)
	}
	m.press("/", "z", "q") // here q is a letter
	if text = m.textDrawn(); !strings.Contains(text, `No row contains "Number 1zq".`) {
		t.Errorf("it shows\n%s", text)
	}
	m.press("esc")
	if text = m.textDrawn(); !strings.Contains(text, "24") || !strings.Contains(text, "REPLICAS") {
		t.Errorf("it shows\n%s", text)
	}
}

func TestStory(t *testing.T) {
	t.Parallel()
	var asked []int64
	m := modelOf(screenWith(7, 8), 60, 12)
	m.cfg.Story = func(_ context.Context, id int64) (string, error) {
		asked = append(asked, id)
		if len(asked) > 1 {
			return "", errors.New("task 8: there is no such task")
		}
		return "kind  exec\nerror  " + strings.Repeat("word ", 30) + "\n" + strings.Repeat("line\n", 20) + "the end", nil
	}
	cmd := m.press("down", "enter")
	if !strings.Contains(m.textDrawn(), "TASK 8\nreading ...") {
		t.Errorf("it shows\n%s", m.textDrawn())
	}
	m.Update(told{7, "of another task", nil})
	m.Update(cmd())
	if text := m.textDrawn(); !strings.Contains(text, "TASK 8\nkind  exec\nerror  word ") || strings.Contains(text, "another") {
		t.Errorf("it shows\n%s", text)
	}
	m.press("end")
	if !strings.Contains(m.textDrawn(), "the end") {
		t.Errorf("it shows\n%s", m.textDrawn())
	}
	m.press("up", "home")
	if !strings.Contains(m.textDrawn(), "TASK 8") {
		t.Errorf("it shows\n%s", m.textDrawn())
	}
	// It is renewed with each snapshot, where it is.
	m.press("end")
	_, cmd = m.Update(renewed{&snapshot.Snapshot{At: noon.Add(2 * time.Second)}, false})
	if text := m.textDrawn(); cmd == nil || !strings.Contains(text, "the end") {
		t.Fatalf("it shows\n%s", text)
	}
	m.Update(cmd())
	if text := m.textDrawn(); !strings.Contains(text, "there is no such task") {
		t.Errorf("it shows\n%s", text)
	}
	m.press("esc")
	m.wantsSelected(t, "8")
	if fmt.Sprint(asked) != "[8 8]" {
		t.Errorf("stories were asked for of %v", asked)
	}
}

// A row without a task is shown in full, as its cells may be cut in the table.
func TestRowInFull(t *testing.T) {
	t.Parallel()
	s := screenWith()
	s.Blocks[1].Rows[0].Cells[0] = strings.Repeat("long ", 20) + "name"
	m := modelOf(s, 40, 14)
	if strings.Contains(m.textDrawn(), "long name") {
		t.Errorf("nothing is cut:\n%s", m.textDrawn())
	}
	if cmd := m.press("enter"); cmd != nil {
		t.Error("it asks for the story of a task")
	}
	if text := m.textDrawn(); !strings.Contains(text, "long name") || !strings.Contains(text, "state: working, leads") {
		t.Errorf("it shows\n%s", text)
	}
}

// An open row is renewed with each snapshot, whatever the filter. One that is gone says so.
func TestOpenRowIsRenewed(t *testing.T) {
	t.Parallel()
	replica := func(state string, notes ...string) Screen {
		s := screenWith(1)
		s.Blocks[1].Notes = notes
		s.Blocks[1].Rows[0].Cells[1] = state
		return s
	}
	m := modelOf(replica("working, leads"), 80, 16)
	m.press("/", "o", "n", "e", "enter", "enter")
	shows := func(s Screen, after time.Duration, want string) {
		t.Helper()
		m.cfg.Screen = func(*snapshot.Snapshot) Screen { return s }
		m.show(&snapshot.Snapshot{At: noon.Add(after)})
		if text := m.textDrawn(); !strings.Contains(text, want) {
			t.Errorf("it shows\n%s\n\nwant\n%s", text, want)
		}
	}
	shows(replica("stopping"), 2*time.Second, "REPLICAS\nname: one\nstate: stopping\n\n")
	shows(replica("stopping", "not current: replicas"), 4*time.Second, "REPLICAS\nnot current: replicas\nname: one\nstate: stopping\n\n")
	none := screenWith(1)
	none.Blocks[1].Rows = nil
	const gone = "REPLICAS\nThe newest snapshot has no such row. This is of 12:00:04.\nname: one\nstate: stopping\n\n"
	shows(none, 6*time.Second, gone)
	shows(none, 8*time.Second, gone)
	shows(replica("working"), 10*time.Second, "REPLICAS\nname: one\nstate: working\n\n")

	// The page of a task has its story alone, and that of the keys no row.
	m = modelOf(screenWith(7), 80, 16)
	m.press("enter")
	shows(screenWith(), 2*time.Second, "TASK 7\nreading ...\n\n")
	m.press("esc", "?")
	shows(screenWith(), 4*time.Second, "KEYS\nup, k ")
}

func TestHelp(t *testing.T) {
	t.Parallel()
	m := modelOf(screenWith(1), 80, 24)
	m.press("?")
	if text := m.textDrawn(); !strings.Contains(text, "shift-tab") || !strings.Contains(text, "Ctrl-C") {
		t.Errorf("it shows\n%s", text)
	}
	m.press("?")
	m.wantsSelected(t, "1")
}

func TestQuit(t *testing.T) {
	t.Parallel()
	for _, keys := range [][]string{{"q"}, {"ctrl+c"}, {"/", "ctrl+c"}, {"?", "q"}, {"enter", "ctrl+c"}} {
		cmd := modelOf(screenWith(1), 80, 24).press(keys...)
		if cmd == nil {
			t.Errorf("%v do nothing", keys)
		} else if _, ok := cmd().(tea.QuitMsg); !ok {
			t.Errorf("%v do not quit", keys)
		}
	}
}

// Neither what a row holds nor what somebody types or pastes controls the terminal.
func TestHostileText(t *testing.T) {
	t.Parallel()
	const hostile = "\x1b[2J\x1b]52;c;ZXZpbA==\x07\u202e\u009b31m\r\n\x00\xff"
	s := screenWith(1)
	s.Verdict = hostile
	b := &s.Blocks[0]
	b.Title, b.Notes, b.Columns[1].Name = hostile, []string{hostile}, hostile
	b.Rows[0].Cells[1] = hostile
	m := modelOf(s, 100, 30)
	m.cfg.Colour = true
	m.cfg.Story = func(context.Context, int64) (string, error) { return hostile, errors.New(hostile) }
	check := func(where string) {
		t.Helper()
		for l := range strings.SplitSeq(escape.ReplaceAllString(m.draw(), ""), "\n") {
			if !utf8.ValidString(l) || strings.ContainsAny(l, "\x1b\x07\u202e\u009b\r\x00") {
				t.Errorf("%s: %q", where, l)
			}
		}
	}
	check("blocks")
	cmd := m.press("enter")
	m.Update(cmd())
	check("error of a story")
	m.page.err, m.page.text = nil, hostile
	check("story")
	m.press("esc", "tab", "enter")
	check("row")
	m.press("esc", "/")
	m.Update(tea.PasteMsg{Content: hostile})
	check("filter")
	m.press("enter")
	check("filter that holds")
}

func TestColours(t *testing.T) {
	t.Parallel()
	s := screenWith(1)
	s.Level = snapshot.Bad
	s.Blocks[0].Rows[0].Level = snapshot.Warning
	m := modelOf(s, 80, 24)
	if drawn := m.draw(); regexp.MustCompile(`\x1b\[[0-9;]*3[0-9]m`).MatchString(drawn) || !strings.Contains(drawn, "\x1b[7m> 1") {
		t.Errorf("without colours it is %q", drawn)
	}
	m.cfg.Colour = true
	if drawn := m.draw(); !strings.Contains(drawn, "\x1b[1;31mBAD: ") || !strings.Contains(drawn, "\x1b[7;33m> 1") {
		t.Errorf("with colours it is %q", drawn)
	}
}

func TestWhatIsNotCurrent(t *testing.T) {
	t.Parallel()
	s := screenWith(1)
	s.Blocks[0].Notes = []string{"not current: running (it was never read): too slow"}
	s.Blocks[0].Rows = nil
	m := modelOf(s, 80, 24)
	if text := m.textDrawn(); !strings.Contains(text, "RUNNING: 1\n  not current: running (it was never read): too slow\n\nREPLICAS") {
		t.Errorf("it shows\n%s", text)
	}
	m.cfg.Now = func() time.Time { return noon.Add(20 * time.Second) }
	m.Update(ticked{})
	if text := m.textDrawn(); !strings.HasSuffix(text, "12:00:00, 20 s ago") {
		t.Errorf("it shows\n%s", text)
	}
}

// source gives one snapshot, or an error, and nothing after it.
type source struct {
	first *snapshot.Snapshot
}

func (s source) After(ctx context.Context, seen *snapshot.Snapshot) (*snapshot.Snapshot, error) {
	if seen == nil {
		return s.first, nil
	}
	<-ctx.Done()
	return nil, ctx.Err()
}

func (s source) Renew(context.Context) (*snapshot.Snapshot, error) { return s.first, nil }

// Without Postgres there is nothing to show: the terminal is not touched.
func TestRunWithoutPostgres(t *testing.T) {
	t.Parallel()
	down := errors.New("connection refused")
	var out strings.Builder
	if err := Run(t.Context(), Config{Source: source{&snapshot.Snapshot{Err: down}}, Out: &out}); !errors.Is(err, down) || out.Len() > 0 {
		t.Errorf("%v, %q", err, out.String())
	}
}

// The lines of a text are those that measuring all of it each time would make.
func TestWrap(t *testing.T) {
	t.Parallel()
	measured := func(text string, width int) (lines []string) {
		width = max(width, 2)
		indent := text[:len(text)-len(strings.TrimLeft(text, " "))]
		for runewidth.StringWidth(text) > width {
			head := runewidth.Truncate(text, width, "")
			if head == "" {
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
	rapid.Check(t, func(t *rapid.T) {
		parts := rapid.SliceOfN(rapid.SampledFrom([]string{"a", "word ", "é", "日本", "e\u0301", strings.Repeat("\u0301", 70), "👨\u200d👩\u200d👧", "🇩🇪", " ", "   "}), 0, 200).Draw(t, "parts")
		text, width := plaintext.Printable(strings.Join(parts, "")), rapid.IntRange(0, 40).Draw(t, "width")
		got, want := wrap(text, width), measured(text, width)
		if !slices.Equal(got, want) {
			t.Fatalf("got  %q\nwant %q", got, want)
		}
	})
}

// A long text is shown at once, and not after the many minutes that it takes to measure what
// is left of it for each of its lines.
func TestWrapOfALongText(t *testing.T) {
	t.Parallel()
	done := make(chan int, 1)
	go func() { done <- len(wrap(strings.Repeat("日本", 1<<20), 80)) }()
	select {
	case n := <-done:
		if want := (4<<20 + 79) / 80; n != want {
			t.Errorf("%d lines, want %d", n, want)
		}
	case <-time.After(2 * time.Minute):
		t.Error("it is not done after two minutes")
	}
}
