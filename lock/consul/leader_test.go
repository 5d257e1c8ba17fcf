package consul

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"testing"
	"time"

	"onejob/internal/testenv"
	"onejob/lock"
)

// An outsider takes part in the election as Consul's documentation says, by
// plain HTTP and with nothing of ours.
type outsider struct {
	t    testing.TB
	http *http.Client
	base string // of the agent
	key  string
}

func newOutsider(t testing.TB, kv *testenv.KV) *outsider {
	o := &outsider{t: t, http: &http.Client{Transport: &http.Transport{}}, base: "http://" + kv.Addr + "/v1", key: "/kv/" + kv.Prefix + "/leader"}
	t.Cleanup(o.http.CloseIdleConnections)
	return o
}

// entry is a key as Consul tells it.
type entry struct {
	Value       []byte // base64 on the wire
	Session     string
	ModifyIndex uint64
}

func (o *outsider) do(method, path, body string) []byte {
	o.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), maxWait)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, o.base+path, bytes.NewReader([]byte(body)))
	if err != nil {
		o.t.Fatal(err)
	}
	resp, err := o.http.Do(req)
	if err != nil {
		o.t.Fatal(err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK && resp.StatusCode != http.StatusNotFound {
		o.t.Fatalf("%s %s: %s %s %v", method, path, resp.Status, answer, err)
	}
	if resp.StatusCode == http.StatusNotFound {
		return nil
	}
	return bytes.TrimSpace(answer)
}

// session makes a session that does not end by itself.
func (o *outsider) session() string {
	o.t.Helper()
	var made struct{ ID string }
	if err := json.Unmarshal(o.do(http.MethodPut, "/session/create", `{"Name": "hashicups-db-0"}`), &made); err != nil {
		o.t.Fatal(err)
	}
	o.t.Cleanup(func() { o.do(http.MethodPut, "/session/destroy/"+made.ID, "") })
	return made.ID
}

func (o *outsider) acquire(session, value string) bool {
	o.t.Helper()
	return string(o.do(http.MethodPut, o.key+"?acquire="+session, value)) == "true"
}

func (o *outsider) release(session string) {
	o.t.Helper()
	if answer := o.do(http.MethodPut, o.key+"?release="+session, ""); string(answer) != "true" {
		o.t.Fatalf("release: %s", answer)
	}
}

// get returns the key, nil if there is none, as soon as it differs from index. It does not wait
// for so long that Consul answers without a change.
func (o *outsider) get(index uint64) *entry {
	o.t.Helper()
	answer := o.do(http.MethodGet, o.key+"?"+url.Values{"index": {strconv.FormatUint(index, 10)}, "wait": {(2 * maxWait).String()}}.Encode(), "")
	if answer == nil {
		return nil
	}
	var entries []entry
	if err := json.Unmarshal(answer, &entries); err != nil || len(entries) != 1 {
		o.t.Fatalf("get: %s, %v", answer, err)
	}
	return &entries[0]
}

// campaign stands for election until the test ends or cancel is called.
func campaign(t testing.TB, l *Locker) (led <-chan lock.Lease, cancel func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ch, done := make(chan lock.Lease, 1), make(chan struct{})
	go func() {
		defer close(done)
		if lease, err := l.Campaign(ctx); err == nil {
			ch <- lease
		}
	}()
	t.Cleanup(func() { cancel(); <-done })
	return ch, cancel
}

func elected(t testing.TB, led <-chan lock.Lease) lock.Lease {
	t.Helper()
	select {
	case lease := <-led:
		return lease
	case <-time.After(maxWait):
		t.Fatalf("it does not lead within %v", maxWait)
		return nil
	}
}

// leaders follows who leads; the channel tells each change.
func leaders(t testing.TB, l *Locker) <-chan *Leader {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ch, done := make(chan *Leader, 100), make(chan struct{})
	go func() {
		defer close(done)
		if err := l.WatchLeader(ctx, func(leader *Leader) { ch <- leader }); err != nil {
			t.Errorf("watch the leader: %v", err)
		}
	}()
	t.Cleanup(func() { cancel(); <-done })
	return ch
}

// told waits until the change to a leader with this session is told; nil is told
// when the session is empty. What came before may be told or not.
func told(t testing.TB, ch <-chan *Leader, session string) *Leader {
	t.Helper()
	late := time.After(maxWait)
	for {
		select {
		case leader := <-ch:
			if leader == nil && session == "" || leader != nil && leader.Session == session {
				return leader
			}
		case <-late:
			t.Fatalf("it was not told within %v that session %q leads", maxWait, session)
			return nil
		}
	}
}

// TestOutsiderLeads lets a program lead that follows Consul's procedure, with
// what it likes as the key's value: a replica waits for it, and can tell that it
// leads. When the program lets go, the key stays, without a session.
func TestOutsiderLeads(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	o := newOutsider(t, kv)
	l := start(t, config(t, kv))
	changes := leaders(t, l)
	told(t, changes, "")
	for _, value := range []string{`{"Node": "db-0", "Port": 8080}`, "db-0", ""} {
		session := o.session()
		if !o.acquire(session, value) {
			t.Fatal("the outsider was refused a free key")
		}
		if leader := told(t, changes, session); leader.Name != "" || string(leader.Value) != value {
			t.Errorf("told %+v", leader)
		}
		leader, err := l.Leader(t.Context())
		if err != nil || leader == nil || leader.Session != session || string(leader.Value) != value {
			t.Errorf("the leader is %+v, %v", leader, err)
		}
		led, _ := campaign(t, l)
		select {
		case <-led:
			t.Fatal("both lead")
		case <-time.After(300 * time.Millisecond): // nothing tells that it waits
		}
		o.release(session)
		released := time.Now()
		lease := elected(t, led)
		took := time.Since(released)
		t.Logf("after %q: it led %v after the outsider's release", value, took)
		told(t, changes, l.Session())
		release(t, lease)
	}
}

// TestOutsiderFollows lets a program watch our election by HTTP alone.
func TestOutsiderFollows(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	o := newOutsider(t, kv)
	cfg := config(t, kv)
	cfg.Replica.Name, cfg.Replica.HTTP = "one", "127.0.0.1:7677"
	l := start(t, cfg)
	led, _ := campaign(t, l)
	lease := elected(t, led)

	e := o.get(0)
	var value struct {
		Name, Host, HTTP, Session string
		PID                       int
		Since                     time.Time
	}
	if err := json.Unmarshal(e.Value, &value); err != nil {
		t.Fatalf("%s: %v", e.Value, err)
	}
	if e.Session != l.Session() || value.Session != e.Session || value.Name != "one" || value.HTTP != "127.0.0.1:7677" || value.PID == 0 || time.Since(value.Since) > time.Minute {
		t.Errorf("the key holds %s, for session %s", e.Value, e.Session)
	}
	session := o.session()
	if o.acquire(session, "me") {
		t.Error("the key was given to the outsider while we lead")
	}

	// Its blocking query returns when we resign, and then the key can be had.
	resigned := make(chan time.Time, 1)
	time.AfterFunc(300*time.Millisecond, func() { // it waits by then, unless the machine is busy
		at := time.Now()
		release(t, lease)
		resigned <- at
	})
	if e := o.get(e.ModifyIndex); e != nil && e.Session != "" {
		t.Errorf("the outsider saw session %s with the key after our resignation", e.Session)
	}
	t.Logf("the outsider saw our resignation after %v", time.Since(<-resigned))
	if !o.acquire(session, "me") {
		t.Error("the outsider was refused after our resignation")
	}
}

// TestLeaderDeposed takes the key away from the leader, as an operator does, or a
// program that leads next: the lease ends long before the next look at all held
// keys.
func TestLeaderDeposed(t *testing.T) {
	t.Parallel()
	for name, depose := range map[string]func(o *outsider, session string){
		"Released": func(o *outsider, session string) { o.release(session) },
		"Deleted":  func(o *outsider, session string) { o.do(http.MethodDelete, o.key, "") },
		"Replaced": func(o *outsider, session string) {
			o.release(session)
			if !o.acquire(o.session(), "me") {
				o.t.Error("the outsider was refused")
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			kv := testenv.Consul(t)
			cfg := config(t, kv)
			cfg.Verify = time.Minute
			l := start(t, cfg)
			o := newOutsider(t, kv)
			led, _ := campaign(t, l)
			lease := elected(t, led)
			deposed := time.Now()
			depose(o, l.Session())
			took := ended(t, lease, lock.ErrRevoked).Sub(deposed)
			t.Logf("the lease ended %v later", took)
			if took > cfg.Verify/2 { // sooner than by looking now and then
				t.Errorf("the lease ended only %v later", took)
			}
			_ = lease.Release(t.Context())
			if name == "Replaced" {
				if e := o.get(0); e == nil || string(e.Value) != "me" {
					t.Errorf("letting go of what was lost took it from the next leader: %+v", e)
				}
			}
		})
	}
}

// TestResignations counts the time from a clean resignation to the next leader,
// and looks whether there is ever more than one.
func TestResignations(t *testing.T) {
	t.Parallel()
	const resignations = 20
	kv := testenv.Consul(t)
	type reign struct {
		leader int
		lease  lock.Lease
		began  time.Time
	}
	began := make(chan reign, 3)
	stand := make([]chan struct{}, 3) // stand again
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{}, len(stand))
	cfg := config(t, kv)
	cfg.LockDelay = time.Minute // a resignation leaves none
	for i := range stand {
		l := start(t, cfg)
		stand[i] = make(chan struct{}, 1)
		stand[i] <- struct{}{}
		go func() {
			defer func() { done <- struct{}{} }()
			for {
				select {
				case <-stand[i]:
				case <-ctx.Done():
					return
				}
				lease, err := l.Campaign(ctx)
				if err != nil {
					return
				}
				began <- reign{i, lease, time.Now()}
			}
		}()
	}
	defer func() {
		cancel()
		for range stand {
			<-done
		}
	}()
	next := func() reign {
		t.Helper()
		select {
		case r := <-began:
			return r
		case <-time.After(cfg.LockDelay / 2):
			t.Fatal("nobody leads")
			return reign{}
		}
	}

	var took []time.Duration
	r := next()
	for range resignations {
		select {
		case other := <-began:
			t.Fatalf("%d and %d lead at once", r.leader, other.leader)
		default:
		}
		resigned := time.Now()
		release(t, r.lease)
		before := r.leader
		r = next()
		if r.leader == before {
			t.Errorf("%d leads again without having stood", before)
		}
		took = append(took, r.began.Sub(resigned))
		stand[before] <- struct{}{}
	}
	release(t, r.lease)
	slices.Sort(took)
	p50 := took[len(took)/2]
	t.Logf("from a resignation to the next leader: p50 %v, max %v", p50, took[len(took)-1])
	if p50 > watchWait/2 { // sooner than by looking again
		t.Errorf("half of the resignations took %v or more to the next leader", p50)
	}
}
