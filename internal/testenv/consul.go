package testenv

import (
	"cmp"
	"context"
	"testing"

	"github.com/hashicorp/consul/api"

	"onejob/internal/servers"
)

// consulExtra allows sessions with a TTL as short as a second, where Consul's
// default is ten, so that tests can watch them end. Consul still takes up to
// twice the TTL to do so.
const consulExtra = `{"session_ttl_min": "1s"}`

// KV is a part of Consul's key-value store that belongs to one test.
type KV struct {
	Addr   string // host and port of the HTTP API
	Prefix string // no other test's keys are below Prefix + "/"
	Client *api.Client
}

// Consul gives the test a key prefix on the shared server. What is below it is
// removed when the test ends. Sessions are the test's to destroy.
func Consul(t testing.TB) *KV {
	t.Helper()
	server := sharedConsul.get(t)
	kv := newKV(server)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
		defer cancel()
		_, err := kv.Client.KV().DeleteTree(kv.Prefix+"/", new(api.WriteOptions).WithContext(ctx))
		if err != nil {
			t.Errorf("testenv: remove keys below %s: %v", kv.Prefix, err)
		}
	})
	return kv
}

// OwnConsul starts a server for this test alone, which may stop or freeze it.
// It is gone when the test ends. Sessions may be as short as on the shared server
// unless config has Extra settings of its own.
func OwnConsul(t testing.TB, config servers.ConsulConfig) (*servers.Consul, *KV) {
	t.Helper()
	config.Extra = cmp.Or(config.Extra, consulExtra)
	config.Dir = cmp.Or(config.Dir, memory())
	server, err := servers.StartConsul(t.Context(), config)
	if err != nil {
		t.Fatalf("testenv: %v", err)
	}
	closeAtEnd(t, server)
	return server, newKV(server)
}

func newKV(server *servers.Consul) *KV {
	return &KV{
		Addr:   server.Addr(),
		Prefix: "service/onejob-" + random(),
		Client: server.Client(),
	}
}
