package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/hashicorp/consul/api"

	"onejob/chaos/harness"
	"onejob/internal/servers"
)

// managementToken is the harness's own. It allows everything.
const managementToken = "3c0f6f8e-6f1e-4a55-9a0f-7b1f0a6d2c41"

// consulSettings are those of all servers and agents. Lists need the right to list,
// which write includes. An agent notices within seconds that a token has changed;
// by default it may take 30 s.
const consulSettings = `{"acl": {"enable_key_list_policy": true, "token_ttl": "2s", "policy_ttl": "2s"}}`

// replicaRules are the rules of docs/operate/security.md for a replica's token, with those that
// make takeovers faster.
const replicaRules = `
key_prefix "service/onejob/" { policy = "write" }
session_prefix ""            { policy = "write" }
service "onejob"             { policy = "write" }
node_prefix ""               { policy = "read" }`

// narrowRules are what is left of them when a token is narrowed on the given node:
// each lacks one right.
func narrowRules(node string) map[string]string {
	return map[string]string{
		"sessions of its own agent only": fmt.Sprintf(`
key_prefix "service/onejob/" { policy = "write" }
session %q                   { policy = "write" }
service "onejob"             { policy = "write" }
node_prefix ""               { policy = "read" }`, node),
		"it reads keys, and neither lists nor writes them": `
key_prefix "service/onejob/" { policy = "read" }
session_prefix ""            { policy = "write" }
service "onejob"             { policy = "write" }
node_prefix ""               { policy = "read" }`,
		"it writes locks, and does not see who is alive": `
key_prefix "service/onejob/"          { policy = "write" }
key_prefix "service/onejob/replicas/" { policy = "deny" }
session_prefix ""                     { policy = "write" }
service "onejob"                      { policy = "write" }
node_prefix ""                        { policy = "read" }`,
		"it feeds no health check": `
key_prefix "service/onejob/" { policy = "write" }
session_prefix ""            { policy = "write" }
node_prefix ""               { policy = "read" }`,
	}
}

// tokenOf returns the accessor and the secret of a replica's n-th token, which are the
// same whenever the token is made.
func tokenOf(replica string, n int) (accessor, secret string) {
	id := func(what string) string {
		return uuid.NewSHA1(uuid.NameSpaceOID, fmt.Appendf(nil, "%s %s %d", what, replica, n)).String()
	}
	return id("accessor"), id("secret")
}

// tokens are the numbers of a replica's tokens. The first is 0.
type tokens struct {
	mu     sync.Mutex
	oldest int // those before it were deleted
	began  int // in the file when the replica was started: the agent may have checks that were registered with it
	filed  int // in the file now
	newest int // made, or about to be
}

// all returns those that the replica may use.
func (t *tokens) all() (from, to int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.oldest, t.newest
}

// starts notes that the replica is about to read the file for the first time.
func (t *tokens) starts() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.began = t.filed
}

// rotate gives a replica another token, in the file that it has the present one from, and deletes those that
// docs/operate/security.md lets a person delete: the replica was started with a later one.
func (c *cluster) rotate(ctx context.Context, r *replica) error {
	t := &r.tokens
	t.mu.Lock()
	t.newest++ // who makes all of them anew from now on makes this one too
	n := t.newest
	t.mu.Unlock()
	if err := c.makeToken(ctx, r.name, n); err != nil {
		return err
	}
	_, secret := tokenOf(r.name, n)
	t.mu.Lock()
	err := replaceFile(r.tokenFile, secret)
	if err == nil {
		t.filed = n
	}
	from, to := t.oldest, t.began
	t.oldest = max(from, to)
	t.mu.Unlock()
	for n := from; n < to; n++ {
		err = errors.Join(err, c.deleteToken(ctx, r.name, n))
	}
	return err
}

// replaceFile writes a file as a whole.
func replaceFile(path, content string) error {
	if err := os.WriteFile(path+".new", []byte(content+"\n"), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func policyOf(replica string) string { return "replica-" + replica }

// authorize gives a replica its tokens with all rights, whatever it has now.
func (c *cluster) authorize(ctx context.Context, r *replica) error {
	if err := c.setPolicy(ctx, r.name, replicaRules); err != nil {
		return err
	}
	from, to := r.tokens.all()
	for n := from; n <= to; n++ {
		if err := c.makeToken(ctx, r.name, n); err != nil {
			return err
		}
	}
	return nil
}

// revoke deletes all tokens of a replica.
func (c *cluster) revoke(ctx context.Context, r *replica) error {
	from, to := r.tokens.all()
	for n := from; n <= to; n++ {
		if err := c.deleteToken(ctx, r.name, n); err != nil {
			return err
		}
	}
	return nil
}

// admit gives an outsider its token with all rights.
func (c *cluster) admit(ctx context.Context, outsider string) error {
	if err := c.setPolicy(ctx, outsider, replicaRules); err != nil {
		return err
	}
	return c.makeToken(ctx, outsider, 0)
}

func (c *cluster) authorizeAll(ctx context.Context) error {
	for _, r := range c.replicas {
		if err := c.authorize(ctx, r); err != nil {
			return err
		}
	}
	for _, o := range c.outsiders {
		if err := c.admit(ctx, o.name); err != nil {
			return err
		}
	}
	return nil
}

// setPolicy makes these the rules of a replica's token.
func (c *cluster) setPolicy(ctx context.Context, replica, rules string) error {
	return c.administer(ctx, "set the policy of "+replica, func(q *api.QueryOptions, w *api.WriteOptions, client *api.ACL) error {
		policy, _, err := client.PolicyReadByName(policyOf(replica), q)
		switch {
		case err != nil && !strings.Contains(err.Error(), "not found"):
			return err
		case policy == nil:
			_, _, err = client.PolicyCreate(&api.ACLPolicy{Name: policyOf(replica), Rules: rules}, w)
		default:
			policy.Rules = rules
			_, _, err = client.PolicyUpdate(policy, w)
		}
		return err
	})
}

// makeToken makes a replica's n-th token, if it is not there.
func (c *cluster) makeToken(ctx context.Context, replica string, n int) error {
	accessor, secret := tokenOf(replica, n)
	return c.administer(ctx, "make the token of "+replica, func(q *api.QueryOptions, w *api.WriteOptions, client *api.ACL) error {
		if token, _, err := client.TokenRead(accessor, q); err == nil && token != nil {
			return nil
		}
		_, _, err := client.TokenCreate(&api.ACLToken{AccessorID: accessor, SecretID: secret, Policies: []*api.ACLLink{{Name: policyOf(replica)}}}, w)
		return err
	})
}

// deleteToken deletes a replica's n-th token.
func (c *cluster) deleteToken(ctx context.Context, replica string, n int) error {
	accessor, _ := tokenOf(replica, n)
	return c.administer(ctx, "delete the token of "+replica, func(q *api.QueryOptions, w *api.WriteOptions, client *api.ACL) error {
		_, err := client.TokenDelete(accessor, w)
		if err != nil && strings.Contains(err.Error(), "not found") {
			return nil
		}
		return err
	})
}

// administer asks one server after the other, until one does what is asked. It has
// the patience to wait for servers that a fault has taken away.
func (c *cluster) administer(ctx context.Context, what string, ask func(*api.QueryOptions, *api.WriteOptions, *api.ACL) error) error {
	return harness.Eventually(ctx, 3*time.Minute, what, func() error {
		var errs []error
		for _, s := range c.consul.Servers {
			err := administerAt(ctx, s, ask)
			if err == nil {
				return nil
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	})
}

func administerAt(ctx context.Context, s *servers.Consul, ask func(*api.QueryOptions, *api.WriteOptions, *api.ACL) error) error {
	ctx, cancel := context.WithTimeout(ctx, consulMaxWait)
	defer cancel()
	return ask(new(api.QueryOptions).WithContext(ctx), new(api.WriteOptions).WithContext(ctx), s.Client().ACL())
}
