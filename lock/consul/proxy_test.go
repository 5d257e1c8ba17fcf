package consul

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/hashicorp/consul/api"

	"onejob/internal/testenv"
)

// A proxy stands between a locker and a real Consul server, for the faults that
// a real server does not show on demand: a reply that is lost after the request
// was applied, a busy answer, silence.
type proxy struct {
	Addr    string
	server  *httptest.Server
	forward http.Handler

	mu     sync.Mutex
	target string
	fault  fault
	seen   []seen
}

// seen is a request that came by.
type seen struct {
	method, path string
	verbs        []string // of the operations, if it is a transaction
	keys         []string
}

// A fault answers a request in the server's place, or does not: it may call
// forward.
type fault func(w http.ResponseWriter, r *http.Request, forward http.HandlerFunc)

func newProxy(t testing.TB, addr string) *proxy {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	p := &proxy{target: addr}
	p.forward = &httputil.ReverseProxy{
		Transport: transport,
		Rewrite: func(r *httputil.ProxyRequest) {
			p.mu.Lock()
			defer p.mu.Unlock()
			r.SetURL(&url.URL{Scheme: "http", Host: p.target})
		},
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}
	p.server = httptest.NewServer(http.HandlerFunc(p.serve))
	p.Addr = p.server.Listener.Addr().String()
	t.Cleanup(func() { p.server.Close(); transport.CloseIdleConnections() })
	return p
}

// lead cuts all connections, and leads to another server from now on.
func (p *proxy) lead(addr string) {
	p.mu.Lock()
	p.target = addr
	p.mu.Unlock()
	p.server.CloseClientConnections()
}

func (p *proxy) serve(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	s := seen{method: r.Method, path: r.URL.Path}
	if r.URL.Path == "/v1/txn" {
		var ops api.TxnOps
		if json.Unmarshal(body, &ops) == nil {
			for _, op := range ops {
				s.verbs, s.keys = append(s.verbs, string(op.KV.Verb)), append(s.keys, op.KV.Key)
			}
		}
	}
	p.mu.Lock()
	p.seen = append(p.seen, s)
	f := p.fault
	p.mu.Unlock()
	if f == nil {
		p.forward.ServeHTTP(w, r)
		return
	}
	f(w, r, p.forward.ServeHTTP)
}

// inject makes f answer from now on; nil is no fault.
// behindProxy starts a locker whose way to Consul leads through a proxy.
func behindProxy(t testing.TB) (*Locker, *proxy, Config) {
	t.Helper()
	kv := testenv.Consul(t)
	p := newProxy(t, kv.Addr)
	cfg := config(t, kv)
	cfg.Client.Address = p.Addr
	return start(t, cfg), p, cfg
}

func (p *proxy) inject(f fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fault = f
}

// count returns how many requests came by that match.
func (p *proxy) count(match func(seen) bool) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.seen {
		if match(s) {
			n++
		}
	}
	return n
}

// with matches transactions with an operation of that verb on a lock's key.
func with(verb api.KVOp) func(seen) bool {
	return func(s seen) bool {
		for i, v := range s.verbs {
			if v == string(verb) && strings.Contains(s.keys[i], "/tasks/") {
				return true
			}
		}
		return false
	}
}

// silence answers nothing, and leaves the connection open.
func silence(_ http.ResponseWriter, r *http.Request, _ http.HandlerFunc) {
	<-r.Context().Done()
	panic(http.ErrAbortHandler)
}

// swallow lets the server apply the request, and cuts the connection instead of
// replying.
func swallow(_ http.ResponseWriter, r *http.Request, forward http.HandlerFunc) {
	swallowed(r, forward)
	panic(http.ErrAbortHandler)
}

// swallowed lets the server apply a request even if its sender has gone.
func swallowed(r *http.Request, forward http.HandlerFunc) {
	forward(httptest.NewRecorder(), r.WithContext(context.WithoutCancel(r.Context())))
}

// answering returns a fault that answers so.
func answering(code int, body string) fault {
	return func(w http.ResponseWriter, _ *http.Request, _ http.HandlerFunc) { http.Error(w, body, code) }
}

// on restricts a fault to requests that match, the first n of them if n is
// above zero.
func on(match func(*http.Request) bool, n int, f fault) fault {
	var mu sync.Mutex
	done := 0
	return func(w http.ResponseWriter, r *http.Request, forward http.HandlerFunc) {
		hit := match(r)
		if hit && n > 0 {
			mu.Lock()
			hit = done < n
			done++
			mu.Unlock()
		}
		if hit {
			f(w, r, forward)
		} else {
			forward(w, r)
		}
	}
}

// writes matches transactions that are not just looks.
func writes(r *http.Request) bool { return r.URL.Path == "/v1/txn" && !r.URL.Query().Has("consistent") }

// heartbeatRequests matches what keeps a session alive.
func heartbeatRequests(r *http.Request) bool {
	return strings.HasPrefix(r.URL.Path, "/v1/session/renew/") || strings.HasPrefix(r.URL.Path, "/v1/agent/check/update/")
}

// transacts reports whether a request is a transaction with an operation of that verb on
// a reused name.
func transacts(r *http.Request, verb api.KVOp) bool {
	body, err := io.ReadAll(r.Body)
	r.Body = io.NopCloser(bytes.NewReader(body))
	var ops api.TxnOps
	if err != nil || json.Unmarshal(body, &ops) != nil {
		return false
	}
	return slices.ContainsFunc(ops, func(o *api.TxnOp) bool {
		return o.KV != nil && o.KV.Verb == verb && strings.Contains(o.KV.Key, "/running/")
	})
}
