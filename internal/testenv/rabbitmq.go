package testenv

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"slices"
	"testing"

	"onejob/internal/servers"
)

var sharedRabbitMQ = &shared[*servers.RabbitMQ]{start: func() (*servers.RabbitMQ, error) {
	return servers.StartRabbitMQ(context.Background(), servers.RabbitMQConfig{Dir: memory()})
}}

// Vhost is a virtual host of RabbitMQ that belongs to one test.
type Vhost struct {
	Name   string
	URL    string // for the user guest, who may do everything
	Server *servers.RabbitMQ
}

// RabbitMQ makes a virtual host for the test on the shared broker. It is deleted
// when the test ends, no matter who is still connected to it.
func RabbitMQ(t testing.TB) *Vhost {
	t.Helper()
	v := newVhost(t, sharedRabbitMQ.get(t))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
		defer cancel()
		if err := v.Server.Manage(ctx, http.MethodDelete, "/vhosts/"+v.Name, nil, nil); err != nil {
			t.Errorf("testenv: delete vhost %s: %v", v.Name, err)
		}
	})
	return v
}

// OwnRabbitMQ starts a broker for this test alone, which may stop it, with a
// virtual host. It is gone when the test ends.
func OwnRabbitMQ(t testing.TB, config servers.RabbitMQConfig) (*servers.RabbitMQ, *Vhost) {
	t.Helper()
	config.Dir = cmp.Or(config.Dir, memory())
	server, err := servers.StartRabbitMQ(t.Context(), config)
	if err != nil {
		t.Fatalf("testenv: %v", err)
	}
	closeAtEnd(t, server)
	return server, newVhost(t, server)
}

// JoinRabbitMQ starts another node in the cluster of first. It is gone when the test ends.
func JoinRabbitMQ(t testing.TB, first *servers.RabbitMQ) *servers.RabbitMQ {
	t.Helper()
	node, err := first.Join(t.Context())
	if err != nil {
		t.Fatalf("testenv: %v", err)
	}
	closeAtEnd(t, node)
	return node
}

func newVhost(t testing.TB, server *servers.RabbitMQ) *Vhost {
	t.Helper()
	name := "test-" + random()
	err := errors.Join(
		server.Manage(t.Context(), http.MethodPut, "/vhosts/"+name, nil, nil),
		server.Manage(t.Context(), http.MethodPut, "/permissions/"+name+"/guest",
			map[string]string{"configure": ".*", "write": ".*", "read": ".*"}, nil),
	)
	if err != nil {
		t.Fatalf("testenv: make vhost %s: %v", name, err)
	}
	return &Vhost{Name: name, URL: server.URL(name), Server: server}
}

// Queues returns the names of the virtual host's queues, sorted.
func (v *Vhost) Queues(t testing.TB) []string {
	t.Helper()
	var queues []struct{ Name string }
	err := v.Server.Manage(t.Context(), http.MethodGet, "/queues/"+v.Name+"?columns=name", nil, &queues)
	if err != nil {
		t.Fatalf("testenv: list queues: %v", err)
	}
	names := []string{}
	for _, q := range queues {
		names = append(names, q.Name)
	}
	slices.Sort(names)
	return names
}
