package testenv

import (
	"bytes"
	"fmt"
	"html"
	"image/color"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	uv "github.com/charmbracelet/ultraviolet"
	"github.com/charmbracelet/x/vt"
	"golang.org/x/sys/unix"
)

// Terminal is a pseudo-terminal with an emulator behind it: what a program writes is on a
// screen that a test can read, and queries of the program are answered.
type Terminal struct {
	// File is the side of the program. The program must not close it.
	File *os.File

	t      testing.TB
	master *os.File

	mu       sync.Mutex
	screen   *vt.Emulator
	received bytes.Buffer
}

// NewTerminal opens a terminal, which is closed when the test ends.
func NewTerminal(t testing.TB, columns, rows int) *Terminal {
	t.Helper()
	// Not by os.OpenFile: os.File.Fd would make reads block that Close must end.
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatalf("testenv: open a pseudo-terminal: %v; is /dev/pts mounted?", err)
	}
	term := &Terminal{t: t, master: os.NewFile(uintptr(fd), "/dev/ptmx"), screen: vt.NewEmulator(columns, rows)}
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatalf("testenv: unlock a pseudo-terminal: %v", err)
	}
	n, err := unix.IoctlGetUint32(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatalf("testenv: number of a pseudo-terminal: %v", err)
	}
	if term.File, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0); err != nil {
		t.Fatalf("testenv: %v", err)
	}
	term.Resize(columns, rows)

	var copying sync.WaitGroup
	copying.Go(func() { // what the program writes
		buf := make([]byte, 4096)
		for {
			n, err := term.master.Read(buf)
			if err != nil {
				return
			}
			term.mu.Lock()
			term.received.Write(buf[:n])
			_, _ = term.screen.Write(buf[:n])
			term.mu.Unlock()
		}
	})
	copying.Go(func() { _, _ = io.Copy(term.master, term.screen) }) // answers to queries
	t.Cleanup(func() {
		_ = term.screen.InputPipe().(io.Closer).Close() // Close of the emulator races with its Read
		_ = term.File.Close()
		_ = term.master.Close()
		copying.Wait()
	})
	return term
}

// Attach makes the terminal that of a command which has not started.
func (term *Terminal) Attach(c *exec.Cmd) {
	c.Stdin, c.Stdout, c.Stderr = term.File, term.File, term.File
	c.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
}

// Type sends what somebody types.
func (term *Terminal) Type(keys string) {
	term.t.Helper()
	if _, err := term.master.WriteString(keys); err != nil {
		term.t.Fatalf("testenv: type: %v", err)
	}
}

// Resize changes the size, and tells the program on the terminal.
func (term *Terminal) Resize(columns, rows int) {
	term.t.Helper()
	term.mu.Lock()
	term.screen.Resize(columns, rows)
	term.mu.Unlock()
	if err := unix.IoctlSetWinsize(int(term.File.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: uint16(rows), Col: uint16(columns)}); err != nil {
		term.t.Fatalf("testenv: resize a terminal: %v", err)
	}
}

// Screen returns what is visible, without spaces at the ends of lines.
func (term *Terminal) Screen() string {
	term.mu.Lock()
	defer term.mu.Unlock()
	var b strings.Builder
	for y := range term.screen.Height() {
		var line strings.Builder
		for x := range term.screen.Width() {
			line.WriteString(textOf(term.screen.CellAt(x, y)))
		}
		b.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
	return b.String()
}

// textOf returns a cell's text, or "" for the second half of a wide one.
func textOf(c *uv.Cell) string {
	switch {
	case c == nil || c.Content == "" && c.Width != 0:
		return " "
	}
	return c.Content
}

// Await waits until the screen is as it should be, and returns it.
func (term *Terminal) Await(what string, condition func(screen string) bool) string {
	term.t.Helper()
	const patience = 3 * time.Minute
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		screen := term.Screen()
		switch {
		case condition(screen):
			return screen
		case time.Now().After(deadline):
			term.t.Fatalf("not within %v: %s; the screen is\n%s", patience, what, screen)
		}
	}
}

// AwaitText waits until a text is on the screen, and returns the screen.
func (term *Terminal) AwaitText(text string) string {
	term.t.Helper()
	return term.Await(fmt.Sprintf("%q is on the screen", text), func(screen string) bool { return strings.Contains(screen, text) })
}

// Alternate reports whether a program uses the alternate screen, and whether the cursor is
// hidden.
func (term *Terminal) Alternate() (screen, hidden bool) {
	term.mu.Lock()
	defer term.mu.Unlock()
	return term.screen.IsAltScreen(), term.screen.CursorHidden()
}

// Received returns all that programs have written.
func (term *Terminal) Received() string {
	term.mu.Lock()
	defer term.mu.Unlock()
	return term.received.String()
}

// Settings returns the settings of the terminal driver, such as echo.
func (term *Terminal) Settings() unix.Termios {
	term.t.Helper()
	s, err := unix.IoctlGetTermios(int(term.File.Fd()), unix.TCGETS)
	if err != nil {
		term.t.Fatalf("testenv: settings of a terminal: %v", err)
	}
	return *s
}

// SVG returns a picture of the screen.
func (term *Terminal) SVG() string {
	const (
		cellWidth, cellHeight = 8, 17
		margin                = 12
		front, back           = "#d8dee9", "#171b22"
	)
	term.mu.Lock()
	defer term.mu.Unlock()
	columns, rows := term.screen.Width(), term.screen.Height()
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace" font-size="13">`+"\n",
		columns*cellWidth+2*margin, rows*cellHeight+2*margin)
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" rx="6" fill="%s"/>`+"\n", back)
	for y := range rows {
		for x := 0; x < columns; {
			// Blank cells have whatever style they were drawn with last, which depends on when:
			// they go on with that of the text before them, and end none.
			style, from := styleOf(term.screen.CellAt(x, y)), x
			if isBlank(term.screen.CellAt(x, y)) {
				x++
				continue
			}
			var text strings.Builder
			for end := x; end < columns; end++ {
				c := term.screen.CellAt(end, y)
				if !isBlank(c) && styleOf(c) != style {
					break
				}
				if !isBlank(c) {
					for ; x <= end; x++ {
						text.WriteString(textOf(term.screen.CellAt(x, y)))
					}
				}
			}
			fill, ground := front, ""
			if style.colour != "" {
				fill = style.colour
			}
			if style.attrs&uv.AttrReverse != 0 {
				fill, ground = back, fill
			}
			left, top, width := margin+from*cellWidth, margin+y*cellHeight, (x-from)*cellWidth
			if ground != "" {
				fmt.Fprintf(&b, `<rect x="%d" y="%d" width="%d" height="%d" fill="%s"/>`+"\n", left, top, width, cellHeight, ground)
			}
			shown := text.String()
			more := ""
			if style.attrs&uv.AttrBold != 0 {
				more += ` font-weight="bold"`
			}
			if style.attrs&uv.AttrFaint != 0 {
				more += ` opacity="0.65"`
			}
			fmt.Fprintf(&b, `<text x="%d" y="%d" textLength="%d" lengthAdjust="spacingAndGlyphs" fill="%s"%s xml:space="preserve">%s</text>`+"\n",
				left, top+13, width, fill, more, html.EscapeString(shown))
		}
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// isBlank reports whether a cell shows nothing, not even a ground.
func isBlank(c *uv.Cell) bool {
	return strings.TrimSpace(textOf(c)) == "" && styleOf(c).attrs&uv.AttrReverse == 0
}

type cellStyle struct {
	colour string
	attrs  uint8
}

func styleOf(c *uv.Cell) (s cellStyle) {
	if c == nil {
		return s
	}
	s.attrs = c.Style.Attrs
	if c.Style.Fg != nil {
		r, g, b, _ := color.RGBAModel.Convert(c.Style.Fg).RGBA()
		s.colour = softer(fmt.Sprintf("#%02x%02x%02x", r>>8, g>>8, b>>8))
	}
	return s
}

// softer replaces the colours of old terminals, which are hard to read on a dark ground.
func softer(colour string) string {
	if c, ok := map[string]string{"#800000": "#e5737d", "#008000": "#8fbf7f", "#808000": "#e0b860"}[colour]; ok {
		return c
	}
	return colour
}
