package testenv

import (
	"testing"

	"onejob/internal/testenv/proxy"
)

// Proxy is a TCP connection's way to a server, which a test can cut. It stands
// for a network that fails: packets are lost, and nobody is told.
type Proxy struct {
	Addr string // where to connect instead

	way *proxy.Proxy
}

// NewProxy leads to target until the test ends.
func NewProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	way, err := proxy.New(target)
	if err != nil {
		t.Fatalf("testenv: proxy: %v", err)
	}
	t.Cleanup(func() { _ = way.Close() })
	return &Proxy{Addr: way.Addr(), way: way}
}

// Cut stops everything on the way, in both directions. Connections stay open
// and new ones are accepted, but nothing comes through.
func (p *Proxy) Cut() { p.way.Cut(proxy.Both) }

// Heal lets everything through again, also what was held up.
func (p *Proxy) Heal() { p.way.Heal(proxy.Both) }
