package main

import (
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/hashicorp/consul/api"

	"onejob/internal/servers"
	"onejob/internal/testenv"
)

// tokens starts a Consul that denies by default, until the test ends, and returns its
// address and tokens: one with the rules that docs/operate/security.md calls necessary, and one
// without each of them.
func tokens(t testing.TB, prefix string) map[string]string {
	t.Helper()
	server, kv := testenv.OwnConsul(t, servers.ConsulConfig{ManagementToken: "0b2b37c1-6f0c-4d2f-9d55-5b3d4f7c1a10"})
	rules := necessary(t, prefix, server.Node())
	if len(rules) != 3 {
		t.Fatalf("the documents have the rules %q", rules)
	}
	out := map[string]string{"CONSUL_HTTP_ADDR": kv.Addr}
	make := func(name string, rules map[string]string) {
		t.Helper()
		policy, _, err := kv.Client.ACL().PolicyCreate(&api.ACLPolicy{Name: name, Rules: strings.Join(slices.Collect(maps.Values(rules)), "\n")}, nil)
		if err != nil {
			t.Fatal(err)
		}
		token, _, err := kv.Client.ACL().TokenCreate(&api.ACLToken{Policies: []*api.ACLLink{{ID: policy.ID}}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		out[name] = token.SecretID
	}
	make("ALL", rules)
	for resource := range rules {
		left := maps.Clone(rules)
		delete(left, resource)
		make("NO_"+strings.ToUpper(resource), left)
	}
	return out
}

// necessary returns the rules that docs/operate/security.md calls necessary, by resource, for
// the keys and the node given.
func necessary(t testing.TB, prefix, node string) map[string]string {
	t.Helper()
	text, err := os.ReadFile("../../docs/operate/security.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text2, _ := strings.Cut(string(text), "## Rules for Consul")
	block, _, _ := strings.Cut(text2, "\n```\n")
	rules := map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^((key|session|service)(?:_prefix)?) +"(.*)" +(\{.*\})`).FindAllStringSubmatch(block, -1) {
		name := strings.NewReplacer("service/onejob", prefix, "NODE", node).Replace(m[3])
		rules[m[2]] = fmt.Sprintf("%s %q %s", m[1], name, m[4])
	}
	return rules
}
