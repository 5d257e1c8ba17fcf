package http

import (
	"context"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"syscall"
	"testing"

	"onejob/tasks"
)

// dialling makes each new connection of k by dial.
func (k *Kind) dialling(dial func(ctx context.Context, network, address string) (net.Conn, error)) *http.Transport {
	transport := k.client.Transport.(*http.Transport)
	transport.DialContext = dial
	return transport
}

// notDialled is how [net.Dialer] fails when a system call does.
func notDialled(call string, errno syscall.Errno, to string) error {
	return &net.OpError{Op: "dial", Net: "tcp", Addr: &net.TCPAddr{IP: net.ParseIP(to), Port: 80}, Err: os.NewSyscallError(call, errno)}
}

// A host that has no files, memory or ports left for a connection sends nothing. That is no fault
// of the task's, and uses up no attempt.
func TestNoConnectionCanBeOpened(t *testing.T) {
	const v4, v6 = "192.0.2.1", "2001:db8::1"
	unresolved := func(why string) error {
		return &net.OpError{Op: "dial", Net: "tcp", Err: &net.DNSError{Err: why, Name: "example.test", Server: "192.0.2.53:53"}}
	}
	for name, test := range map[string]struct {
		err      error
		proxied  bool
		requeued bool
	}{
		"no file":                     {err: notDialled("socket", syscall.EMFILE, v4), requeued: true},
		"no file of the host's":       {err: notDialled("socket", syscall.ENFILE, v6), requeued: true},
		"no buffer":                   {err: notDialled("socket", syscall.ENOBUFS, v4), requeued: true},
		"no memory":                   {err: notDialled("connect", syscall.ENOMEM, v6), requeued: true},
		"no port":                     {err: notDialled("connect", syscall.EADDRNOTAVAIL, v4), requeued: true},
		"no port or no IPv6":          {err: notDialled("connect", syscall.EADDRNOTAVAIL, v6)},
		"no file to ask for the name": {err: unresolved("dial udp 192.0.2.53:53: socket: " + syscall.EMFILE.Error()), requeued: true},
		"no such name":                {err: unresolved("no such host")},
		"no file for the proxy":       {err: notDialled("socket", syscall.EMFILE, v4), proxied: true, requeued: true},
		"no proxy":                    {err: notDialled("connect", syscall.ECONNREFUSED, v4), proxied: true},
		"refused":                     {err: notDialled("connect", syscall.ECONNREFUSED, v4)},
		"not while it was opened":     {err: &net.OpError{Op: "read", Net: "tcp", Err: os.NewSyscallError("read", syscall.ENOMEM)}},
	} {
		t.Run(name, func(t *testing.T) {
			k := newKind(t, Config{Allow: []string{"http://example.test"}})
			transport := k.dialling(func(context.Context, string, string) (net.Conn, error) { return nil, test.err })
			transport.Proxy = nil
			if test.proxied {
				transport.Proxy = http.ProxyURL(&url.URL{Scheme: "http", Host: "proxy.test:3128"})
			}
			_, err := run(t.Context(), k, httpAttempt(t, object{"url": "http://example.test/a?secret"}))
			if err == nil {
				t.Fatal("no error")
			}
			if d, requeued := tasks.RequeueDelay(err); requeued != test.requeued || d != 0 {
				t.Errorf("requeued: %t after %s, want %t: %v", requeued, d, test.requeued, err)
			}
			if !strings.HasPrefix(err.Error(), "GET http://example.test/a: ") || strings.Contains(err.Error(), "secret") {
				t.Errorf("got %q", err)
			}
		})
	}
}

// What fails on the way of a redirect has sent a request already: another one uses up an attempt.
func TestNoConnectionCanBeOpenedForARedirect(t *testing.T) {
	server := serveHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "http://elsewhere.test/", http.StatusTemporaryRedirect)
	})
	k := newKind(t, Config{Allow: []string{server.URL, "http://elsewhere.test"}})
	k.dialling(func(ctx context.Context, network, address string) (net.Conn, error) {
		if address == server.Listener.Addr().String() {
			return new(net.Dialer).DialContext(ctx, network, address)
		}
		return nil, notDialled("socket", syscall.EMFILE, "192.0.2.1")
	}).Proxy = nil
	_, err := run(t.Context(), k, httpAttempt(t, object{"url": server.URL}))
	if err == nil || !strings.Contains(err.Error(), syscall.EMFILE.Error()) {
		t.Fatalf("got %v", err)
	}
	if _, requeued := tasks.RequeueDelay(err); requeued {
		t.Errorf("requeued after a request was sent: %v", err)
	}
}
