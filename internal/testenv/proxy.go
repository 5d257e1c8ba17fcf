package testenv

import (
	"net"
	"sync"
	"testing"
)

// Proxy is a TCP connection's way to a server, which a test can cut. It stands
// for a network that fails: packets are lost, and nobody is told.
type Proxy struct {
	Addr string // where to connect instead

	target string
	mu     sync.Mutex
	healed chan struct{} // closed unless the way is cut
	conns  map[net.Conn]bool
}

// NewProxy leads to target until the test ends.
func NewProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("testenv: proxy: %v", err)
	}
	p := &Proxy{Addr: l.Addr().String(), target: target, healed: make(chan struct{}), conns: map[net.Conn]bool{}}
	close(p.healed)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { p.carry(conn) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		p.Heal()
		p.mu.Lock()
		for c := range p.conns {
			_ = c.Close()
		}
		p.conns = nil
		p.mu.Unlock()
		wg.Wait()
	})
	return p
}

// Cut stops everything on the way, in both directions. Connections stay open
// and new ones are accepted, but nothing comes through.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.healed:
		p.healed = make(chan struct{})
	default:
	}
}

// Heal lets everything through again, also what was held up.
func (p *Proxy) Heal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.healed:
	default:
		close(p.healed)
	}
}

// open waits until the way is not cut.
func (p *Proxy) open() {
	p.mu.Lock()
	healed := p.healed
	p.mu.Unlock()
	<-healed
}

func (p *Proxy) carry(in net.Conn) {
	defer in.Close()
	if !p.keep(in) {
		return
	}
	defer p.drop(in)
	p.open()
	out, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	defer out.Close()
	if !p.keep(out) {
		return
	}
	defer p.drop(out)
	var wg sync.WaitGroup
	wg.Go(func() { p.pump(in, out) })
	p.pump(out, in)
	wg.Wait()
}

// pump copies from one connection to the other, and closes both at its end.
func (p *Proxy) pump(to, from net.Conn) {
	defer to.Close()
	defer from.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		p.open()
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

func (p *Proxy) keep(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conns == nil {
		return false
	}
	p.conns[c] = true
	return true
}

func (p *Proxy) drop(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
}
