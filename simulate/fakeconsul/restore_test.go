package fakeconsul_test

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/consul/api"

	consuls "onejob/internal/servers"
	"onejob/internal/testenv"
	"onejob/simulate/fakeconsul"
)

// A restored snapshot brings back what was there, keys with their sessions and indexes, and takes away
// what came since; lock-delays are forgotten, and those who watch are answered.
func TestRestore(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) { restores(t, servers["fake"](t)) })
	})
	t.Run("real", func(t *testing.T) {
		t.Parallel()
		_, kv := testenv.OwnConsul(t, consuls.ConsulConfig{})
		restores(t, newServer(t, kv.Addr, kv.Prefix, nil))
	})
}

func restores(t *testing.T, s *server) {
	kv, consistent := s.api.KV(), &api.QueryOptions{RequireConsistent: true}
	key := func(name string) string { return s.prefix + "/" + name }
	session := func() string {
		t.Helper()
		id, _, err := s.api.Session().CreateNoChecks(&api.SessionEntry{TTL: "60s", Behavior: "delete", LockDelay: time.Minute}, nil)
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	put := func(name, value string) {
		t.Helper()
		if _, err := kv.Put(&api.KVPair{Key: key(name), Value: []byte(value)}, nil); err != nil {
			t.Fatal(err)
		}
	}
	acquire := func(name, session string) bool {
		t.Helper()
		ok, _, err := kv.Acquire(&api.KVPair{Key: key(name), Session: session}, nil)
		if err != nil {
			t.Fatal(err)
		}
		return ok
	}
	get := func(name string) *api.KVPair {
		t.Helper()
		pair, _, err := kv.Get(key(name), consistent)
		if err != nil {
			t.Fatal(err)
		}
		return pair
	}
	list := func() (uint64, int) {
		t.Helper()
		pairs, meta, err := kv.List(s.prefix+"/", consistent)
		if err != nil {
			t.Fatal(err)
		}
		return meta.LastIndex, len(pairs)
	}
	lives := func(session string) bool {
		t.Helper()
		entry, _, err := s.api.Session().Info(session, consistent)
		if err != nil {
			t.Fatal(err)
		}
		return entry != nil
	}

	before, dead := session(), session()
	if !acquire("held", before) || !acquire("delayed", dead) {
		t.Fatal("nothing is locked")
	}
	s.destroy(t, dead)
	if acquire("delayed", before) {
		t.Fatal("there is no lock-delay")
	}
	put("plain", "one")
	put("deleted", "x")
	old := get("plain")
	oldIndex, oldKeys := list()
	snapshot, _, err := s.api.Snapshot().Save(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer snapshot.Close()
	content, err := io.ReadAll(snapshot)
	if err != nil {
		t.Fatal(err)
	}

	put("plain", "two")
	s.remove(t, "deleted")
	s.destroy(t, before)
	after := session()
	if !acquire("later", after) {
		t.Fatal("a new key is not locked")
	}
	last := get("later").ModifyIndex
	changed := get("plain").ModifyIndex
	watched := make(chan string, 1)
	watch := func(wait time.Duration) {
		pair, meta, err := kv.Get(key("plain"), &api.QueryOptions{RequireConsistent: true, WaitIndex: changed, WaitTime: wait})
		if err != nil {
			watched <- err.Error()
			return
		}
		watched <- fmt.Sprint(string(pair.Value), " ", pair.ModifyIndex, " ", meta.LastIndex)
	}
	go watch(5 * time.Minute)
	time.Sleep(3 * time.Second) // nothing shows from outside that a query has begun to wait
	if err := s.api.Snapshot().Restore(nil, bytes.NewReader(content)); err != nil {
		t.Fatal(err)
	}

	hears := func(what, want string) {
		t.Helper()
		select {
		case got := <-watched:
			if got != want {
				t.Errorf("%s: who watches the key got %q, want %q", what, got, want)
			}
		case <-time.After(time.Minute):
			t.Errorf("%s: who watches the key is not answered", what)
		}
	}
	// It is answered at once with what it knew; after that it hears of nothing but a write.
	hears("at once", fmt.Sprint("two ", changed, " ", changed))
	go watch(300 * time.Millisecond)
	hears("after its time", fmt.Sprint("one ", old.ModifyIndex, " ", old.ModifyIndex))
	go watch(5 * time.Minute)
	time.Sleep(100 * time.Millisecond)
	if pair := get("plain"); pair == nil || string(pair.Value) != "one" || pair.ModifyIndex != old.ModifyIndex || pair.CreateIndex != old.CreateIndex {
		t.Errorf("the key that was changed is %+v, want %+v", pair, old)
	}
	if pair := get("deleted"); pair == nil || string(pair.Value) != "x" {
		t.Errorf("the key that was deleted is %+v", pair)
	}
	if pair := get("held"); pair == nil || pair.Session != before || pair.LockIndex != 1 {
		t.Errorf("the key that was locked is %+v, want one of session %s", pair, before)
	}
	if get("later") != nil {
		t.Error("a key is there that was not")
	}
	if !lives(before) || lives(after) {
		t.Errorf("the old session lives %v, want true; the later one %v, want false", lives(before), lives(after))
	}
	if entry, _, err := s.api.Session().Renew(after, nil); entry != nil || err != nil {
		t.Errorf("the later session is renewed: %+v, %v", entry, err)
	}
	if index, keys := list(); keys != oldKeys {
		t.Errorf("there are %d keys, want %d", keys, oldKeys)
	} else {
		t.Logf("the index of all keys was %d, then %d and more, and is %d", oldIndex, last, index)
	}
	if !acquire("delayed", before) {
		t.Error("a lock-delay of before is in force")
	}
	put("plain", "three")
	next := get("plain").ModifyIndex
	if next <= last {
		t.Errorf("the next write has index %d, and there was %d before the snapshot was restored", next, last)
	}
	hears("after a write", fmt.Sprint("three ", next, " ", next))
}

// Servers without a leader write nothing and answer no read, and agents go on. The next leader counts
// the time of every session anew.
func TestElection(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			all := fakeconsul.New(fakeconsul.Config{MinTTL: time.Second})
			s := newServer(t, "127.0.0.1:1", "service/test", all.Agent("node"))
			elections(t, s, func() { all.SetLeader(false) }, func() { all.SetLeader(true) })
		})
	})
	t.Run("real", func(t *testing.T) {
		t.Parallel()
		cluster, err := consuls.StartConsulCluster(t.Context(), consuls.ConsulConfig{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cluster.Close() })
		stays := cluster.Servers[0]
		elections(t, newServer(t, stays.Addr(), "service/test", nil), func() {
			for _, c := range cluster.Servers[1:] {
				c.Kill()
			}
		}, func() {
			if err := cluster.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
		})
	})
}

func elections(t *testing.T, s *server, lose, elect func()) {
	ask := func(method, path, body string) (int, string) {
		r, err := http.NewRequestWithContext(t.Context(), method, "http://"+s.addr+"/v1/"+path, strings.NewReader(body))
		if err != nil {
			return 0, err.Error()
		}
		transport := s.transport
		if transport == nil {
			transport = http.DefaultTransport
		}
		response, err := transport.RoundTrip(r)
		if err != nil {
			return 0, err.Error()
		}
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		if err != nil {
			return 0, err.Error()
		}
		return response.StatusCode, strings.TrimSpace(string(text))
	}
	const ttl = 10 * time.Second
	create := func() string {
		t.Helper()
		id, _, err := s.api.Session().CreateNoChecks(&api.SessionEntry{TTL: ttl.String(), Behavior: "delete", LockDelay: time.Millisecond}, nil)
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	if code, text := ask("PUT", "agent/service/register", `{"ID":"one","Name":"one","Check":{"CheckID":"service:one","TTL":"60s","Status":"passing"}}`); code != 200 {
		t.Fatal(code, text)
	}
	key := s.prefix + "/k"
	session := create()
	if code, text := ask("PUT", "kv/"+key+"?acquire="+session, "v"); code != 200 || text != "true" {
		t.Fatal(code, text)
	}

	lose()
	testenv.Eventually(t, time.Minute, "there is no leader", func() bool {
		code, text := ask("GET", "status/leader", "")
		return code == 200 && text == `""`
	})
	began := time.Now()
	var all sync.WaitGroup
	for _, e := range []struct{ method, path, body string }{
		{"PUT", "kv/" + key, "other"},
		{"PUT", "txn", `[{"KV":{"Verb":"set","Key":"` + key + `","Value":"eA=="}}]`},
		{"PUT", "txn", `[{"KV":{"Verb":"get","Key":"` + key + `"}}]`},
		{"GET", "kv/" + key + "?consistent", ""},
		{"GET", "kv/" + key, ""},
		{"GET", "session/info/" + session + "?consistent", ""},
		{"PUT", "session/renew/" + session, ""},
		{"PUT", "session/create", `{"TTL":"60s"}`},
		{"PUT", "session/destroy/" + session, ""},
	} {
		all.Go(func() {
			code, text := ask(e.method, e.path, e.body)
			if code != 500 || !strings.Contains(text, "No cluster leader") {
				t.Errorf("without a leader %s %s is answered with %d %s", e.method, e.path, code, text)
			}
			if took := time.Since(began); took < time.Second || took > 10*time.Second+s.late() {
				t.Errorf("without a leader %s %s took %v", e.method, e.path, took)
			}
		})
	}
	all.Wait()
	if code, text := ask("PUT", "agent/check/update/service:one", `{"Status":"passing"}`); code != 200 {
		t.Errorf("without a leader the agent answers %d %s", code, text)
	}

	time.Sleep(2*ttl + time.Second - time.Since(began)) // the session would have ended
	again := time.Now()
	elect()
	var code int
	var text string
	testenv.Eventually(t, time.Minute, "there is a leader", func() bool {
		code, text = ask("GET", "kv/"+key+"?consistent", "")
		return code == 200 || code == 404
	})
	if time.Since(again) < ttl && (code != 200 || !strings.Contains(text, session)) {
		t.Errorf("with a new leader the key is %d %s, want it to be held by session %s", code, text, session)
	}
	testenv.Eventually(t, 2*time.Minute, "the session ends", func() bool {
		entry, _, err := s.api.Session().Info(session, &api.QueryOptions{RequireConsistent: true})
		return err == nil && entry == nil
	})
	if took := time.Since(again); took < ttl {
		t.Errorf("the session ended %v after there was a leader, want %v at least", took, ttl)
	}
	if code, _ := ask("GET", "kv/"+key+"?consistent", ""); code != 404 {
		t.Errorf("the key of a session that has ended is left: %d", code)
	}
}
