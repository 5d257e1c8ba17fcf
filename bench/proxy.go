package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
)

// proxy stands between a replica and Consul, and counts.
type proxy struct {
	address  string
	requests atomic.Int64
	server   *http.Server
	done     chan struct{}
}

// startProxy starts a proxy before an address. If see is not nil, it is shown
// every transaction with its answer.
func startProxy(address string, see func(request []byte, status int, answer []byte)) (*proxy, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("proxy for Consul: %w", err)
	}
	p := &proxy{address: listener.Addr().String(), done: make(chan struct{})}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.Proxy = nil
	transport.MaxIdleConnsPerHost = 100
	onward := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: address})
	onward.Transport = transport
	onward.ErrorLog = log.New(io.Discard, "", 0) // it would tell of every watch that is given up
	handler := func(w http.ResponseWriter, r *http.Request) {
		p.requests.Add(1)
		if see == nil || r.URL.Path != "/v1/txn" {
			onward.ServeHTTP(w, r)
			return
		}
		request, err := io.ReadAll(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(request))
		copied := &recorder{ResponseWriter: w, status: http.StatusOK}
		onward.ServeHTTP(copied, r)
		see(request, copied.status, copied.body.Bytes())
	}
	p.server = &http.Server{Handler: http.HandlerFunc(handler)}
	go func() {
		defer close(p.done)
		_ = p.server.Serve(listener)
		transport.CloseIdleConnections()
	}()
	return p, nil
}

func (p *proxy) close() {
	_ = p.server.Close()
	<-p.done
}

// recorder keeps a copy of what is answered.
type recorder struct {
	http.ResponseWriter
	status int
	body   bytes.Buffer
}

func (r *recorder) WriteHeader(status int) {
	r.status = status
	r.ResponseWriter.WriteHeader(status)
}

func (r *recorder) Write(b []byte) (int, error) {
	r.body.Write(b)
	return r.ResponseWriter.Write(b)
}

// lockCount is what became of attempts at locks of tasks, as they go to Consul.
type lockCount struct {
	Attempts int `json:"attempts"` // operations that ask for a lock
	Refused  int `json:"refused"`  // those that Consul refused, by name
	Vain     int `json:"in_vain"`  // those that got no lock: refused, or sent along with one that was
}

// lockCounter counts the locks of the transactions that it is shown.
type lockCounter struct {
	mu sync.Mutex
	lockCount
}

func (c *lockCounter) see(request []byte, status int, answer []byte) {
	seen := countLocks(request, status, answer)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.Attempts += seen.Attempts
	c.Refused += seen.Refused
	c.Vain += seen.Vain
}

// countLocks counts in one transaction. A lock is refused by its own operation,
// or by a check of its key that goes with it. Bids for leadership are not counted:
// all but one of the replicas are refused at the start.
func countLocks(request []byte, status int, answer []byte) (c lockCount) {
	var ops []struct{ KV *struct{ Verb, Key string } }
	if json.Unmarshal(request, &ops) != nil {
		return c
	}
	refused := map[string]bool{} // by key
	for _, op := range ops {
		if op.KV != nil && op.KV.Verb == "lock" && (strings.Contains(op.KV.Key, "/running/") || strings.Contains(op.KV.Key, "/tasks/")) {
			refused[op.KV.Key] = false
			c.Attempts++
		}
	}
	if status == http.StatusOK {
		return c
	}
	c.Vain = c.Attempts
	var body struct{ Errors []struct{ OpIndex int } }
	if status == http.StatusConflict && json.Unmarshal(answer, &body) == nil {
		for _, e := range body.Errors {
			if e.OpIndex >= len(ops) || ops[e.OpIndex].KV == nil {
				continue
			}
			key := ops[e.OpIndex].KV.Key
			if told, locked := refused[key]; locked && !told {
				refused[key] = true
				c.Refused++
			}
		}
	}
	return c
}
