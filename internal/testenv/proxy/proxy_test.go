package proxy_test

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"onejob/internal/testenv/proxy"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const maxWait = 30 * time.Second

// echo starts a server that answers every line with the same line, and tells on
// heard of each before it answers.
func echo(t *testing.T) (addr string, heard chan string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	heard = make(chan string, 100)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer conn.Close()
				lines := bufio.NewScanner(conn)
				for lines.Scan() {
					heard <- lines.Text()
					fmt.Fprintln(conn, lines.Text())
				}
			})
		}
	})
	t.Cleanup(func() { l.Close(); wg.Wait() })
	return l.Addr().String(), heard
}

// client is a connection through a proxy to an echo.
type client struct {
	net.Conn
	lines chan string // what comes back; closed with the connection
	err   error       // why it was closed; read it then
}

func dial(t *testing.T, p *proxy.Proxy) *client {
	t.Helper()
	conn, err := net.Dial("tcp", p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	c := &client{Conn: conn, lines: make(chan string, 100)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer close(c.lines)
		read := bufio.NewScanner(conn)
		for read.Scan() {
			c.lines <- read.Text()
		}
		c.err = read.Err()
	}()
	t.Cleanup(func() { conn.Close(); <-done })
	return c
}

func (c *client) say(t *testing.T, line string) {
	t.Helper()
	if _, err := fmt.Fprintln(c, line); err != nil {
		t.Fatal(err)
	}
}

func expect(t *testing.T, from chan string, want string) {
	t.Helper()
	select {
	case got := <-from:
		if got != want {
			t.Fatalf("got %q, want %q", got, want)
		}
	case <-time.After(maxWait):
		t.Fatalf("%q did not come through", want)
	}
}

// silence looks for a moment whether something comes through that must not. It
// cannot fail a proxy that works, however slow the machine.
func silence(t *testing.T, from chan string) {
	t.Helper()
	select {
	case got := <-from:
		t.Fatalf("%q came through", got)
	case <-time.After(100 * time.Millisecond):
	}
}

func open(t *testing.T, target string) *proxy.Proxy {
	t.Helper()
	p, err := proxy.New(target)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

func TestCutHoldsBackAndHealDelivers(t *testing.T) {
	for name, c := range map[string]struct {
		cut         proxy.Direction
		serverHears bool
	}{
		"up":   {proxy.Up, false},
		"down": {proxy.Down, true},
		"both": {proxy.Both, false},
	} {
		t.Run(name, func(t *testing.T) {
			addr, heard := echo(t)
			p := open(t, addr)
			a := dial(t, p)
			a.say(t, "before")
			expect(t, heard, "before")
			expect(t, a.lines, "before")

			p.Cut(c.cut)
			a.say(t, "during")
			if c.serverHears {
				expect(t, heard, "during")
			} else {
				silence(t, heard)
			}
			silence(t, a.lines)

			p.Heal(c.cut)
			if !c.serverHears {
				expect(t, heard, "during")
			}
			expect(t, a.lines, "during")
		})
	}
}

func TestConnectionsMadeDuringACutComeThroughLater(t *testing.T) {
	addr, heard := echo(t)
	p := open(t, addr)
	p.Cut(proxy.Both)
	a := dial(t, p)
	a.say(t, "patient")
	silence(t, heard)
	p.Heal(proxy.Both)
	expect(t, a.lines, "patient")
}

// Of two that hold a way the first to end does not open it.
func TestHold(t *testing.T) {
	addr, heard := echo(t)
	p := open(t, addr)
	first, second := p.Hold(proxy.Both), p.Hold(proxy.Up)
	a := dial(t, p)
	a.say(t, "patient")
	silence(t, heard)
	first()
	first()
	p.Heal(proxy.Both)
	silence(t, heard)
	second()
	expect(t, a.lines, "patient")
}

func TestDelay(t *testing.T) {
	addr, _ := echo(t)
	p := open(t, addr)
	a := dial(t, p)
	a.say(t, "before")
	expect(t, a.lines, "before")
	p.Delay(proxy.Up, 150*time.Millisecond)
	p.Delay(proxy.Down, 150*time.Millisecond)
	began := time.Now()
	a.say(t, "late")
	expect(t, a.lines, "late")
	if took := time.Since(began); took < 300*time.Millisecond {
		t.Errorf("it took %v, less than both delays", took)
	}
}

func TestResetIsSeenByTheClient(t *testing.T) {
	addr, _ := echo(t)
	p := open(t, addr)
	a := dial(t, p)
	a.say(t, "before")
	expect(t, a.lines, "before")
	p.Reset()
	select {
	case _, more := <-a.lines:
		if more {
			t.Fatal("something came through")
		}
	case <-time.After(maxWait):
		t.Fatal("the connection lives on")
	}
	if !errors.Is(a.err, syscall.ECONNRESET) {
		t.Errorf("the connection ended with %v, want a reset", a.err)
	}
	b := dial(t, p)
	b.say(t, "again")
	expect(t, b.lines, "again")
}

func TestCloseEndsWhatIsCut(t *testing.T) {
	addr, _ := echo(t)
	p := open(t, addr)
	a := dial(t, p)
	p.Cut(proxy.Both)
	a.say(t, "never")
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestLeadGoesElsewhere(t *testing.T) {
	first, atFirst := echo(t)
	second, atSecond := echo(t)
	p := open(t, first)
	a := dial(t, p)
	a.say(t, "one")
	expect(t, atFirst, "one")
	expect(t, a.lines, "one")
	p.Lead(second)
	select {
	case _, more := <-a.lines:
		if more {
			t.Fatal("something came through")
		}
	case <-time.After(maxWait):
		t.Fatal("the connection to the first target lives on")
	}
	b := dial(t, p)
	b.say(t, "two")
	expect(t, atSecond, "two")
	expect(t, b.lines, "two")
}
