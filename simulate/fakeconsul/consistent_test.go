package fakeconsul_test

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"onejob/lock"
	"onejob/lock/consul"
	"onejob/simulate/fakeconsul"
)

// unsure is a network that notes reads which do not ask for consistency.
type unsure struct {
	http.RoundTripper
	paths []string
	reads int
}

func (u *unsure) RoundTrip(r *http.Request) (*http.Response, error) {
	if path := r.URL.Path; r.Method == http.MethodGet && (strings.HasPrefix(path, "/v1/kv/") || strings.HasPrefix(path, "/v1/session/")) {
		u.reads++
		if !r.URL.Query().Has("consistent") {
			u.paths = append(u.paths, path)
		}
	}
	return u.RoundTripper.RoundTrip(r)
}

// A locker reads no key, and no session, from a server that may be the leader no more.
func TestAllReadsAreConsistent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u := &unsure{RoundTripper: fakeconsul.New(fakeconsul.Config{}).Agent("node")}
		l := newServer(t, "127.0.0.1:1", "service/test", u).locker(t, consul.Check)
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- l.Run(ctx, nil) }()
		time.Sleep(time.Second)
		lease, err := l.Acquire(ctx, lock.Request{Session: l.Session(), Key: "k", Value: []byte("{}")})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute) // for all that is looked at from time to time
		_ = lease.Release(ctx)  // the clock of leases has no bubble, so the session is lost now and then
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if u.reads < 10 || len(u.paths) > 0 {
			t.Errorf("of %d reads these do not ask for consistency: %q", u.reads, u.paths)
		}
	})
}
