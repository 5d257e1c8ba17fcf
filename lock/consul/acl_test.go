package consul

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hashicorp/consul/api"

	"onejob/internal/servers"
	"onejob/internal/testenv"
	"onejob/lock"
)

// TestRights lives with tokens that may do too little, and exactly enough.
func TestRights(t *testing.T) {
	t.Parallel()
	server, kv := testenv.OwnConsul(t, servers.ConsulConfig{ManagementToken: "6d2d0b1e-5b6c-4b1c-9d3a-0c8f8a1f6f10"})
	// token makes a token with these rules.
	token := func(t *testing.T, rules ...string) string {
		t.Helper()
		entry := &api.ACLToken{}
		if len(rules) > 0 {
			name := strings.NewReplacer("/", "-", "#", "-").Replace(t.Name())
			policy, _, err := kv.Client.ACL().PolicyCreate(&api.ACLPolicy{Name: name, Rules: strings.Join(rules, "\n")}, nil)
			if err != nil {
				t.Fatal(err)
			}
			entry.Policies = []*api.ACLLink{{ID: policy.ID}}
		}
		created, _, err := kv.Client.ACL().TokenCreate(entry, nil)
		if err != nil {
			t.Fatal(err)
		}
		return created.SecretID
	}
	with := func(t *testing.T, liveness Liveness, token string) Config {
		cfg := config(t, kv)
		cfg.Liveness, cfg.Client.Token = liveness, token
		return cfg
	}
	// trouble starts a locker that is not to get a session, and returns why.
	trouble := func(t *testing.T, cfg Config) error {
		t.Helper()
		l := create(t, cfg)
		run(t, l)
		err := refusal(t, l)
		if err == nil {
			t.Error("a session could be had")
		}
		return err
	}

	for _, liveness := range []Liveness{Check, TTL} {
		t.Run("without rights the error lists the rules/"+string(liveness), func(t *testing.T) {
			t.Parallel()
			cfg := with(t, liveness, token(t))
			err := trouble(t, cfg)
			for _, rule := range cfg.WithDefaults().rules("NODE") {
				if err == nil || !strings.Contains(err.Error(), rule) {
					t.Errorf("the error does not list %s: %v", rule, err)
				}
			}
			if err != nil && strings.Contains(err.Error(), cfg.Client.Token) {
				t.Errorf("the token is in: %v", err)
			}
		})
		t.Run("the rules are enough/"+string(liveness), func(t *testing.T) {
			t.Parallel()
			cfg := config(t, kv)
			cfg.Liveness = liveness
			cfg = with(t, liveness, token(t, cfg.WithDefaults().rules(server.Node())...))
			l, other := start(t, cfg), start(t, cfg)
			session := l.Session()
			key := "held-" + string(liveness)
			lease, deleted := acquire(t, l, key), acquire(t, l, key+"-deleted")
			deleteKey(t, kv, "tasks/"+key+"-deleted")
			ended(t, deleted, lock.ErrRevoked)
			before := lease.Deadline()
			testenv.Eventually(t, maxWait, "the lease is extended", func() bool { return before.Before(lease.Deadline()) })
			if s, _, err := other.Holder(t.Context(), key); s != session || err != nil {
				t.Errorf("the holder is %q (%v), want %s", s, err, session)
			}
			release(t, lease)
			_ = deleted.Release(t.Context())
			if _, err := kv.Client.Session().Destroy(session, nil); err != nil {
				t.Fatal(err)
			}
			testenv.Eventually(t, maxWait, "the session is dead", func() bool {
				dead, err := other.Dead(t.Context(), []string{session})
				return err == nil && len(dead) == 1
			})
			again(t, l, session)
		})
	}
	for i, rule := range config(t, kv).WithDefaults().rules(server.Node()) {
		t.Run("no rule is too many/"+strings.Fields(rule)[0], func(t *testing.T) {
			t.Parallel()
			cfg := config(t, kv)
			rules := cfg.WithDefaults().rules(server.Node())
			err := trouble(t, with(t, Check, token(t, append(rules[:i:i], rules[i+1:]...)...)))
			what, _, _ := strings.Cut(strings.Fields(rule)[0], "_")
			if want := "lacks permission '" + what + ":write'"; err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("got error %v, want %s", err, want)
			}
		})
	}

	t.Run("what may not be seen is not taken for missing", func(t *testing.T) {
		t.Parallel()
		full := start(t, with(t, Check, "6d2d0b1e-5b6c-4b1c-9d3a-0c8f8a1f6f10"))
		blind := create(t, with(t, Check, token(t, fmt.Sprintf("session %q { policy = \"write\" }", server.Node()))))
		blind.keyNames = full.keyNames
		look := map[string]func() error{
			"limits":  func() error { _, err := blind.Semaphores().List(t.Context()); return err },
			"limit":   func() error { _, err := blind.Semaphores().Inspect(t.Context(), "s"); return err },
			"holder":  func() error { _, _, err := blind.Holder(t.Context(), "k"); return err },
			"await":   func() error { return blind.Await(t.Context(), "k") },
			"odd":     func() error { return blind.Await(t.Context(), "a//b") },
			"leader":  func() error { _, err := blind.Leader(t.Context()); return err },
			"present": func() error { _, err := blind.Present(t.Context()); return err },
			"bury":    func() error { _, err := blind.ReportDeath(t.Context(), "p"); return err },
		}
		tryAll := func(when string) {
			t.Helper()
			for what, f := range look {
				if err := f(); err == nil || !strings.Contains(err.Error(), "key_prefix") {
					t.Errorf("%s, %s: got error %v, want one that lists the rules", when, what, err)
				}
			}
		}
		tryAll("without limits")
		if err := full.Semaphores().Create(t.Context(), "s", 1); err != nil {
			t.Fatal(err)
		}
		tryAll("with a limit")
	})

	// Without the right to write its key, a lease cannot be given back. In the end its session goes, and the key with it.
	taken := func(t *testing.T, forGood bool) {
		t.Parallel()
		rules := config(t, kv).WithDefaults().rules(server.Node())
		file := filepath.Join(t.TempDir(), "token")
		write := func(token string) {
			if err := os.WriteFile(file, []byte(token+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		var keyless []string
		for _, rule := range rules {
			if !strings.HasPrefix(rule, "key_prefix") {
				keyless = append(keyless, rule)
			}
		}
		all := token(t, rules...)
		write(all)
		cfg := config(t, kv)
		cfg.Client.TokenFile = file
		l := start(t, cfg)
		key := fmt.Sprint("k-", forGood)
		lease := acquire(t, l, key)
		if forGood { // which keeps nothing of that
			if _, err := l.Campaign(t.Context()); err != nil {
				t.Fatal(err)
			}
		}

		t.Run("rotated", func(t *testing.T) { write(token(t, keyless...)) })
		// The file may be looked at between an acquire and its release, so each
		// has a key of its own.
		n := 0
		testenv.Eventually(t, maxWait, "acquire fails and the error lists the rules", func() bool {
			n++
			other, err := try(l, fmt.Sprint(key, "-", n))
			if err == nil {
				_ = other.Release(t.Context())
			}
			return err != nil && strings.Contains(err.Error(), "key_prefix")
		})
		l.verify(t.Context(), l.current().leases)
		if lease.Context().Err() != nil {
			t.Errorf("the lease ended: %v", context.Cause(lease.Context()))
		}
		if err := lease.Release(t.Context()); err == nil || errors.Is(err, lock.ErrRevoked) {
			t.Errorf("release without the right to: got error %v", err)
		}
		if !forGood {
			write(all)
		}
		testenv.Eventually(t, maxWait, "the key is deleted", func() bool { return holder(t, kv, "tasks/"+key) == "" })
	}
	t.Run("a right that is taken away is not a lost key", func(t *testing.T) { taken(t, false) })
	t.Run("a right that is taken away for good", func(t *testing.T) { taken(t, true) })
}
