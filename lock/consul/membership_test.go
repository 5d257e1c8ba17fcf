package consul

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/boottime"
	"onejob/internal/testenv"
	"onejob/lock"
)

// However often the keys of many replicas change, a replica lists them about twice a second: N
// replicas that list N keys N times a second would be too much for Consul.
func TestLooksAtManyReplicas(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	p := newProxy(t, kv.Addr)
	cfg := config(t, kv)
	cfg.Client.Address = p.Addr
	start(t, cfg)
	write := func(i int) {
		t.Helper()
		if _, err := kv.Client.KV().Put(&api.KVPair{Key: fmt.Sprintf("%s/replicas/%d", kv.Prefix, i%100), Value: fmt.Append(nil, i)}, nil); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 100 {
		write(i)
	}
	looks := func() int {
		return p.count(func(s seen) bool { return s.method == "GET" && strings.HasSuffix(s.path, "/replicas/") })
	}
	before, began := looks(), time.Now()
	for i := 0; time.Since(began) < 5*time.Second; i++ {
		write(i)
	}
	took := time.Since(began)
	if n, most := looks()-before, 3+int(took/pauseMost); n < 2 || n > most {
		t.Errorf("%d looks in %v, want at most %d", n, took, most)
	}
}

// alone is a list that knows nobody, and hears nothing unless a test says so.
type alone struct {
	id    string
	hears bool
	asked int // how often it was asked whether a session is silent
}

func (a *alone) Process() string                            { return "5d8a1bb1-6f5e-4c2b-8f0e-2d6a3b0c9e77" }
func (a *alone) ID(context.Context) (string, error)         { return a.id, nil }
func (a *alone) Join(context.Context, string, string) error { return nil }
func (a *alone) Leave(context.Context, string, bool) error  { return nil }
func (a *alone) Silent(context.Context, string) (bool, error) {
	a.asked++
	return !a.hears, nil
}
func (a *alone) Adopt(ctx context.Context, _ string, _ lock.Known, write func(context.Context, string) error) error {
	a.id = "1f0a7c5e-9a53-4be2-8d5e-0a3f4f0d7a11"
	return write(ctx, a.id)
}

// A replica whose key has looked the same for long is alive for all that anybody knows who has not
// looked often: a snapshot that was restored may have taken back its signs of life.
func TestSilenceIsWatched(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	l := create(t, config(t, kv))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	list := &alone{hears: true}
	go func() { done <- l.Run(ctx, list) }()
	defer func() { cancel(); <-done }()
	ready(t, l)

	// One that is silent. Its key is there, and its session lives.
	session, _, err := kv.Client.Session().Create(&api.SessionEntry{TTL: "60s", Behavior: "delete"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	sign := func() {
		t.Helper()
		pair := &api.KVPair{Key: kv.Prefix + "/replicas/" + session, Value: fmt.Appendf(nil, `{"signs": %d}`, time.Now().UnixNano()), Session: session}
		if ok, _, err := kv.Client.KV().Acquire(pair, nil); err != nil || !ok {
			t.Fatalf("acquired: %t, %v", ok, err)
		}
	}
	sign()
	known := func() bool {
		l.membership.mu.Lock()
		defer l.membership.mu.Unlock()
		return l.membership.alive[session] != 0
	}
	testenv.Eventually(t, maxWait, "it is known", known)
	long := func() {
		l.membership.mu.Lock()
		defer l.membership.mu.Unlock()
		l.membership.signs[session] = oldSign(l.membership.signs[session])
	}
	end := func() lock.End {
		t.Helper()
		how, err := l.End(t.Context(), session, lock.Silence)
		if err != nil {
			t.Fatal(err)
		}
		return how
	}
	look := func() {
		t.Helper()
		if dead, err := l.Dead(t.Context(), []string{session}); err != nil || len(dead) > 0 {
			t.Fatalf("dead: %v, %v", dead, err)
		}
	}

	long()
	if end() != lock.Alive {
		t.Fatal("it was ended, and nobody had looked")
	}
	look()
	if long(); end() != lock.Alive {
		t.Fatal("it was ended after one look")
	}
	time.Sleep(looksApart + 100*time.Millisecond) // a gap, in which signs may have come and gone
	began := boottime.Now()
	for long(); end() == lock.Alive && list.asked == 0; long() {
		time.Sleep(100 * time.Millisecond)
		look()
		if boottime.Now().Sub(began) > maxWait {
			t.Fatalf("it is alive after looks for %v", maxWait)
		}
	}
	if took := boottime.Now().Sub(began); took < lock.Silence-lock.Unwatched {
		t.Errorf("it was ended after looks for %v", took)
	}

	// The list is asked when Consul has heard nothing for long, and may have heard something since.
	if entry, _, err := kv.Client.Session().Info(session, nil); err != nil || entry == nil {
		t.Fatalf("the list had heard of the session, and it was ended: %v, %v", entry, err)
	}
	list.hears = false
	for look(); end() == lock.Alive; look() {
		if long(); boottime.Now().Sub(began) > 2*maxWait {
			t.Fatal("it is alive, and nobody hears it")
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// A look sees signs of life that the blocking query misses.
func TestLooksSeeSigns(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	l := start(t, config(t, kv))
	other := start(t, config(t, kv))
	session := other.Session()
	testenv.Eventually(t, maxWait, "it is known", func() bool {
		l.membership.mu.Lock()
		defer l.membership.mu.Unlock()
		return l.membership.alive[session] != 0
	})
	l.membership.mu.Lock()
	index := l.membership.alive[session]
	l.membership.signs[session] = oldSign(sign{index: index - 1}) // what it has missed
	l.membership.mu.Unlock()
	if _, err := l.Dead(t.Context(), []string{session}); err != nil {
		t.Fatal(err)
	}
	if quiet := l.membership.quiet(session, index-1, boottime.Now()); quiet != 0 {
		t.Errorf("back at the index of before it has been silent for %v", quiet)
	}
}

func oldSign(s sign) sign { return sign{s.index, boottime.Now().Add(-time.Hour)} }
