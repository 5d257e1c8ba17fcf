// Package proxy is a TCP connection's way to a server that can be made to fail:
// it holds back, delays, or resets, in either direction.
//
// It stands for a network. What is held back is not lost: TCP sends again until
// it comes through, and a Proxy delivers it, in order, once the way is healed.
// Nobody is told meanwhile; connections stay open and new ones are accepted, as
// by a server whose answers do not arrive.
package proxy

import (
	"net"
	"sync"
	"time"
)

// Direction is one or both of the ways through a Proxy.
type Direction int

// The directions.
const (
	Up   Direction = 1 << iota // from the client to the server
	Down                       // from the server to the client
	Both = Up | Down
)

// Proxy leads from its own address to a server's. Its methods may be called
// from several goroutines.
type Proxy struct {
	listener net.Listener
	running  sync.WaitGroup

	mu     sync.Mutex
	target string
	up     way
	down   way
	conns  map[*net.TCPConn]bool // nil once the proxy is closed
}

// way is one direction.
type way struct {
	healed chan struct{} // closed unless the way is cut or held
	cut    bool
	holds  int
	delay  time.Duration
}

// settle makes healed what cut and holds say.
func (w *way) settle() {
	closed := w.cut || w.holds > 0
	select {
	case <-w.healed:
		if closed {
			w.healed = make(chan struct{})
		}
	default:
		if !closed {
			close(w.healed)
		}
	}
}

// New leads from a free port of 127.0.0.1 to target, a host and port, until
// Close.
func New(target string) (*Proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	open := make(chan struct{})
	close(open)
	p := &Proxy{target: target, listener: l, up: way{healed: open}, down: way{healed: open}, conns: map[*net.TCPConn]bool{}}
	p.running.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			p.running.Go(func() { p.carry(conn.(*net.TCPConn)) })
		}
	})
	return p, nil
}

// Addr is where to connect instead of the target.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// Lead makes new connections go to another target, and resets those that are open.
func (p *Proxy) Lead(target string) {
	p.mu.Lock()
	p.target = target
	p.mu.Unlock()
	p.Reset()
}

// Cut holds back everything that goes in the direction, until Heal.
func (p *Proxy) Cut(d Direction) {
	p.change(d, func(w *way) { w.cut = true })
}

// Hold is a Cut of which there may be several at once: what goes in the direction is held back until
// all have been released. Heal releases none.
func (p *Proxy) Hold(d Direction) (release func()) {
	p.change(d, func(w *way) { w.holds++ })
	return sync.OnceFunc(func() { p.change(d, func(w *way) { w.holds-- }) })
}

// Delay makes everything that goes in the direction arrive so much later. It
// slows a stream down as well: the next piece is read when the last has been
// delivered.
func (p *Proxy) Delay(d Direction, by time.Duration) {
	p.change(d, func(w *way) { w.delay = by })
}

// Heal ends Cut and Delay in the direction. What was held back is delivered.
func (p *Proxy) Heal(d Direction) {
	p.change(d, func(w *way) { w.cut, w.delay = false, 0 })
}

// Reset ends all connections with a TCP reset, towards both ends. What was on
// its way is lost.
func (p *Proxy) Reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		_ = c.SetLinger(0)
		_ = c.Close()
	}
}

// Close ends the proxy and its connections, and returns when all is gone.
func (p *Proxy) Close() error {
	err := p.listener.Close()
	p.mu.Lock()
	for c := range p.conns {
		_ = c.Close()
	}
	p.conns = nil
	for _, w := range []*way{&p.up, &p.down} {
		w.cut, w.delay, w.holds = false, 0, 0
		w.settle()
	}
	p.mu.Unlock()
	p.running.Wait()
	return err
}

func (p *Proxy) change(d Direction, f func(*way)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conns == nil {
		return
	}
	if d&Up != 0 {
		f(&p.up)
		p.up.settle()
	}
	if d&Down != 0 {
		f(&p.down)
		p.down.settle()
	}
}

// pass waits for as long as what was read just now has to.
func (p *Proxy) pass(w *way) {
	p.mu.Lock()
	healed, delay := w.healed, w.delay
	p.mu.Unlock()
	time.Sleep(delay)
	<-healed
}

// carry serves one connection. That one to the server is opened only when the
// way there is.
func (p *Proxy) carry(in *net.TCPConn) {
	defer in.Close()
	if !p.keep(in) {
		return
	}
	defer p.drop(in)
	p.pass(&p.up)
	p.mu.Lock()
	target := p.target
	p.mu.Unlock()
	dialled, err := (&net.Dialer{Timeout: 10 * time.Second}).Dial("tcp", target)
	if err != nil {
		_ = in.SetLinger(0) // as a server that is not there would
		return
	}
	out := dialled.(*net.TCPConn)
	defer out.Close()
	if !p.keep(out) {
		return
	}
	defer p.drop(out)
	var both sync.WaitGroup
	both.Go(func() { p.pump(in, out, &p.down) })
	both.Go(func() { p.pump(out, in, &p.up) })
	both.Wait()
}

// pump copies from one connection to the other, and closes both at its end: a
// connection of which one half is closed is none of a database's or Consul's.
func (p *Proxy) pump(to, from net.Conn, w *way) {
	defer to.Close()
	defer from.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		p.pass(w)
		if n > 0 {
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

func (p *Proxy) keep(c *net.TCPConn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conns == nil {
		return false
	}
	p.conns[c] = true
	return true
}

func (p *Proxy) drop(c *net.TCPConn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
}
