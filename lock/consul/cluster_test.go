package consul

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/internal/servers"
	"onejob/internal/testenv"
	"onejob/lock"
)

// A token that may see the sessions of its own node alone gets no answer about
// others, and Consul says so. That is no proof of a death. When the session has ended
// there is nothing to leave out, and that is one.
func TestFilteredIsNotEnded(t *testing.T) {
	t.Parallel()
	server, kv := testenv.OwnConsul(t, servers.ConsulConfig{ManagementToken: "8b1b7f3e-52b0-4a8e-9f0e-7c2f4a1d9a31"})
	agent, err := servers.StartConsulAgent(t.Context(), server)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = agent.Close() })
	node, err := agent.Client().Agent().NodeName()
	if err != nil {
		t.Fatal(err)
	}
	full := config(t, kv)
	full.Client.Token = "8b1b7f3e-52b0-4a8e-9f0e-7c2f4a1d9a31"
	victim := start(t, full)
	session := victim.Session()

	policy, _, err := kv.Client.ACL().PolicyCreate(&api.ACLPolicy{Name: "own-node", Rules: fmt.Sprintf(
		"key_prefix %q { policy = \"write\" }\nsession %q { policy = \"write\" }\nservice_prefix \"\" { policy = \"write\" }", kv.Prefix+"/", node)}, nil)
	if err != nil {
		t.Fatal(err)
	}
	token, _, err := kv.Client.ACL().TokenCreate(&api.ACLToken{Policies: []*api.ACLLink{{ID: policy.ID}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	narrow := config(t, &testenv.KV{Addr: agent.Addr(), Prefix: kv.Prefix, Client: agent.Client()})
	narrow.Client.Token = token.SecretID
	observer := start(t, narrow)

	if entry, err := observer.lookAt(t.Context(), observer.keys, session); entry != nil || !errors.Is(err, errBlind) {
		t.Errorf("it is %v, %v; want %v", entry, err, errBlind)
	}
	testenv.Eventually(t, maxWait, "it cannot judge", func() bool {
		observer.membership.update(t.Context(), map[string]uint64{observer.Session(): 1}) // its key is out of sight, until the watch sees it
		dead, err := observer.Dead(t.Context(), []string{session})
		if len(dead) > 0 {
			t.Fatalf("dead are %v, %v", dead, err)
		}
		return errors.Is(err, errBlind)
	})
	if err := observer.end(t.Context(), session); !errors.Is(err, errBlind) {
		t.Errorf("it ends the session: %v", err)
	}
	if _, err := kv.Client.Session().Destroy(session, nil); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, maxWait, "the session is dead", func() bool {
		dead, err := observer.Dead(t.Context(), []string{session})
		return err == nil && len(dead) == 1
	})
	if err := observer.end(t.Context(), session); err != nil {
		t.Errorf("after the session's end: %v", err)
	}
}

// A replica whose token was narrowed cannot see its own sessions. It still has them:
// nothing is lost until a deadline passes, and everything goes on if the token gets its
// rights back before. What has really ended is lost at once.
func TestNarrowedTokenLosesNoSession(t *testing.T) {
	t.Parallel()
	server, kv := testenv.OwnConsul(t, servers.ConsulConfig{ManagementToken: "2c1e7a54-6a0f-4d53-9a53-0f0f5b0b7a11"})
	cfg := config(t, kv)
	rules := cfg.WithDefaults().rules(server.Node())
	cfg.SessionTTL = 5 * time.Minute // no deadline comes into it
	cfg.CheckTTL = cfg.SessionTTL
	policy, _, err := kv.Client.ACL().PolicyCreate(&api.ACLPolicy{Name: "replica", Rules: strings.Join(rules, "\n")}, nil)
	if err != nil {
		t.Fatal(err)
	}
	token, _, err := kv.Client.ACL().TokenCreate(&api.ACLToken{Policies: []*api.ACLLink{{ID: policy.ID}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	grant := func(rules []string) {
		t.Helper()
		if _, _, err := kv.Client.ACL().PolicyUpdate(&api.ACLPolicy{ID: policy.ID, Name: policy.Name, Rules: strings.Join(rules, "\n")}, nil); err != nil {
			t.Fatal(err)
		}
	}
	cfg.Client.Token = token.SecretID
	l := start(t, cfg)
	lease := acquire(t, l, "k")
	if err := l.Semaphores().Create(t.Context(), "s", 2); err != nil {
		t.Fatal(err)
	}
	slot := takeOne(t, l, "s").(*slot)
	live := l.current()

	var keysOnly []string
	for _, rule := range rules {
		if strings.HasPrefix(rule, "key_prefix") {
			keysOnly = append(keysOnly, rule)
		}
	}
	grant(keysOnly)
	for what, lives := range map[string]func() (bool, error){
		"its own session":  func() (bool, error) { return live.lives(t.Context()) },
		"a slot's session": func() (bool, error) { return slot.session.lives(t.Context()) },
	} {
		testenv.Eventually(t, maxWait, "it cannot see "+what, func() bool {
			alive, err := lives()
			if !alive && err == nil {
				t.Fatalf("that it cannot see %s counts as its end", what)
			}
			return !alive && errors.Is(err, errBlind)
		})
	}
	for what, ctx := range map[string]context.Context{"the lease": lease.Context(), "the slot": slot.Context()} {
		if ctx.Err() != nil {
			t.Errorf("%s was lost: %v", what, context.Cause(ctx))
		}
	}

	grant(rules)
	testenv.Eventually(t, maxWait, "it sees them again", func() bool {
		alive, _ := live.lives(t.Context())
		slotAlive, _ := slot.session.lives(t.Context())
		return alive && slotAlive
	})
	if _, err := kv.Client.Session().Destroy(slot.session.id, nil); err != nil {
		t.Fatal(err)
	}
	if alive, err := slot.session.lives(t.Context()); alive || err != nil {
		t.Errorf("the slot's session, which has ended: alive %t, %v", alive, err)
	}
	ended(t, slot, lock.ErrLost)
	if _, err := kv.Client.Session().Destroy(live.id, nil); err != nil {
		t.Fatal(err)
	}
	if alive, err := live.lives(t.Context()); alive || err != nil {
		t.Errorf("its own session, which has ended: alive %t, %v", alive, err)
	}
	ended(t, lease, lock.ErrLost)
	_, _ = slot.Release(t.Context()), lease.Release(t.Context())
}

// What told that a session had ended was wrong if that session holds its key: a
// restored Consul, an answer of another one. The verdict does not last.
func TestWrongDeathIsTakenBack(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	l, observer := start(t, config(t, kv)), start(t, config(t, kv))
	session := l.Session()
	testenv.Eventually(t, maxWait, "it is in sight", func() bool {
		observer.membership.mu.Lock()
		defer observer.membership.mu.Unlock()
		return observer.membership.alive[session] != 0
	})
	testenv.Eventually(t, maxWait, "the verdict counts", func() bool { // unless a sign of life comes in between
		observer.membership.buried(session)
		dead, _ := observer.Dead(t.Context(), []string{session})
		return len(dead) == 1
	})
	if err := l.current().appear(t.Context()); err != nil { // a sign of life
		t.Fatal(err)
	}
	testenv.Eventually(t, maxWait, "it is alive", func() bool {
		dead, err := observer.Dead(t.Context(), []string{session})
		return err == nil && len(dead) == 0
	})
}

// A key below replicas/ that its own session does not hold says nothing of it.
func TestKeyOfNoSession(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	cfg := config(t, kv)
	cfg.Replica.Process = "5b1f1c64-4a0b-4b57-9c7e-31a1f2f7c1de"
	l := start(t, cfg)
	start(t, config(t, kv)) // a command, which is no replica
	const session = "0f794b9c-ef66-4f56-a44c-02db121a7a85"
	if _, err := kv.Client.KV().Put(&api.KVPair{Key: kv.Prefix + "/replicas/" + session, Value: []byte("{}")}, nil); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, maxWait, "it is dead", func() bool {
		dead, err := l.Dead(t.Context(), []string{session})
		return err == nil && len(dead) == 1
	})
	if present, err := l.Present(t.Context()); err != nil || !slices.Equal(present, []string{l.Session()}) {
		t.Errorf("present are %v, %v; want %s", present, err, l.Session())
	}
}

// ReportDeath ends what a dead process has left, at once: its locks and slots are free, and are
// not in their lock-delay.
func TestReportDeath(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	cfg := config(t, kv)
	cfg.Replica.Process = "p1"
	cfg.CheckTTL, cfg.LockDelay = time.Minute, time.Minute
	l, other := start(t, cfg), start(t, config(t, kv))
	session := l.Session()
	lease := acquire(t, l, "k")
	if err := l.Semaphores().Create(t.Context(), "s", 3); err != nil {
		t.Fatal(err)
	}
	slots, err := l.Semaphores().Take(t.Context(), "s", 2, nil)
	if err != nil {
		t.Fatal(err)
	}
	mine := takeOne(t, other, "s")
	sessions, err := other.ReportDeath(t.Context(), "p1")
	if err != nil || len(sessions) != 1 || sessions[0] != session {
		t.Fatalf("buried %v, %v", sessions, err)
	}
	release(t, acquire(t, other, "k"))
	again, err := other.Semaphores().Take(t.Context(), "s", 2, nil)
	if err != nil {
		t.Errorf("the slots: %v", err)
	}
	notOne(t, other, "s", lock.ErrFull)
	if v := look(t, other, "s"); len(v.Holders) != 3 {
		t.Errorf("the holders are %v", v.Holders)
	}
	for _, s := range append(again, mine) {
		release(t, s)
	}
	if sessions, err := other.ReportDeath(t.Context(), "p1"); err != nil || len(sessions) > 0 && sessions[0] == session {
		t.Errorf("buried again %v, %v", sessions, err)
	}
	for _, dead := range append(slots, lease) {
		_ = dead.Release(t.Context())
	}
}
