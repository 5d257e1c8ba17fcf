// Package watch shows a cluster in a terminal, and renews what it shows. It only reads.
//
// A Source gives the snapshots, a function of the caller turns each into a Screen of plain
// cells, and the model decides which lines of it are visible. What is drawn passes
// plaintext.Printable at the last moment, so nothing that a row holds can control the
// terminal.
//
// Run leaves the terminal as it was, whether it ends by a key, by its context or by an error.
// A process that is killed with SIGKILL cannot do that: then "reset" does.
package watch

import (
	"context"
	"fmt"
	"io"
	"time"

	tea "charm.land/bubbletea/v2"

	"onejob/internal/retry"
	"onejob/internal/snapshot"
)

// Config says what to show, and where.
type Config struct {
	Source Source

	// Screen says what to show of a snapshot.
	Screen func(*snapshot.Snapshot) Screen

	// Story returns the story of a task, in lines.
	Story func(ctx context.Context, task int64) (string, error)

	// In and Out are a terminal. Without In it is stdin or, if that is no terminal, /dev/tty.
	In  io.Reader
	Out io.Writer

	// Colour is whether to use colours. Bold and reversed text are used in any case.
	Colour bool

	// Now is the clock of this machine. Default: time.Now.
	Now func() time.Time
}

// Source gives snapshots. Errors are those of ctx.
type Source interface {
	// After waits for a snapshot other than seen.
	After(ctx context.Context, seen *snapshot.Snapshot) (*snapshot.Snapshot, error)

	// Renew returns a snapshot that was taken after the call, or was being taken.
	Renew(ctx context.Context) (*snapshot.Snapshot, error)
}

// Screen is what is shown of a cluster at one moment.
type Screen struct {
	Level   snapshot.Level
	Verdict string
	Blocks  []Block
}

// Block is a table under a title. One without rows and notes is not shown.
type Block struct {
	Title   string
	Notes   []string // such as that the block is not current
	Columns []Column
	Rows    []Row
	Tasks   bool // each row is a task, whose story says all that the row does
}

// Column is a column of a block.
type Column struct {
	Name string
	Cut  bool // its cells may be cut where there is no room
}

// Row is a row of a block.
type Row struct {
	Key   string // no other row of the block has it, and it stays the same between snapshots
	Cells []string
	Task  int64 // the task whose story belongs to the row; zero: none
	Level snapshot.Level
}

// Run shows the cluster until somebody quits or ctx ends, which is no error. If the first
// snapshot finds no Postgres, Run returns why, and has not touched the terminal.
func Run(ctx context.Context, cfg Config) error {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	first, err := cfg.Source.After(ctx, nil)
	switch {
	case ctx.Err() != nil:
		return nil
	case err != nil:
		return err
	case first.Err != nil:
		return first.Err
	}
	m := newModel(ctx, cfg)
	m.show(first)
	options := []tea.ProgramOption{tea.WithOutput(cfg.Out), tea.WithoutSignalHandler()}
	if cfg.In != nil {
		options = append(options, tea.WithInput(cfg.In))
	}
	p := tea.NewProgram(m, options...)
	// Quit, unlike the end of a context that the program knows, waits for the last frame.
	defer context.AfterFunc(ctx, p.Quit)()
	if _, err := p.Run(); err != nil {
		return fmt.Errorf("terminal: %w", err)
	}
	return nil
}

type (
	// renewed is the next snapshot. With again, the one after it is to be waited for.
	renewed struct {
		snapshot *snapshot.Snapshot
		again    bool
	}

	// told is the story of a task.
	told struct {
		task int64
		text string
		err  error
	}

	// ticked comes once a second, so that the age of what is shown is right.
	ticked struct{}
)

func (m *model) after() tea.Cmd {
	source, seen := m.cfg.Source, m.seen
	return m.fetch(true, func(ctx context.Context) (*snapshot.Snapshot, error) { return source.After(ctx, seen) })
}

func (m *model) renew() tea.Cmd { return m.fetch(false, m.cfg.Source.Renew) }

func (m *model) fetch(again bool, take func(context.Context) (*snapshot.Snapshot, error)) tea.Cmd {
	ctx := m.ctx
	return func() tea.Msg {
		s, err := take(ctx)
		if err != nil {
			return tea.Quit()
		}
		return renewed{s, again}
	}
}

func (m *model) tell(task int64) tea.Cmd {
	ctx, story := m.ctx, m.cfg.Story
	return func() tea.Msg {
		text, err := story(ctx, task)
		return told{task, text, err}
	}
}

// tick ends with ctx, as the other commands do: the program does not wait for them.
func (m *model) tick() tea.Cmd {
	ctx := m.ctx
	return func() tea.Msg {
		retry.Pause(ctx, time.Second)
		return ticked{}
	}
}

// Init is called once by the program.
func (m *model) Init() tea.Cmd { return tea.Batch(m.after(), m.tick()) }

// Update is called by the program with each message, one at a time.
func (m *model) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.width, m.height = msg.Width, msg.Height
	case tea.PasteMsg:
		if m.typing {
			m.setFilter(m.filter + msg.Content)
		}
	case tea.KeyPressMsg:
		return m, m.key(msg.String(), msg.Text)
	case ticked:
		m.now = m.cfg.Now()
		return m, m.tick()
	case told:
		if m.page != nil && m.page.task == msg.task {
			m.page.text, m.page.err, m.page.loading = msg.text, msg.err, false
		}
	case renewed:
		m.show(msg.snapshot)
		var cmds []tea.Cmd
		if msg.again {
			cmds = append(cmds, m.after())
		}
		if p := m.page; p != nil && p.task != 0 && !p.loading {
			p.loading = true
			cmds = append(cmds, m.tell(p.task))
		}
		return m, tea.Batch(cmds...)
	}
	return m, nil
}

// View is called by the program when something may have changed.
func (m *model) View() tea.View {
	v := tea.NewView(m.draw())
	v.AltScreen = true
	return v
}
