package main

import (
	"net/url"
	"strings"
	"testing"

	"onejob/internal/servers"
	"onejob/internal/testenv"
)

// encrypted starts a server that speaks TLS, until the test ends, and returns the
// variables with which a script reaches it. Those of Consul and RabbitMQ accept nobody
// who does not show a certificate. Consul's has no name but consul.test.
func encrypted(t testing.TB, service string) map[string]string {
	t.Helper()
	switch service {
	case "consul":
		server, client := testenv.Certificates(t, "consul.test")
		_, kv := testenv.OwnConsul(t, servers.ConsulConfig{TLS: &server, Client: client, ServerName: "consul.test"})
		return map[string]string{"ADDRESS": kv.Addr, "CA": client.CA, "CERT": client.Cert, "KEY": client.Key}
	case "postgres":
		server, client := testenv.Certificates(t, "127.0.0.1")
		_, db := testenv.OwnPostgresWith(t, servers.PostgresConfig{TLS: &server})
		dsn := strings.Replace(db.DSN, "sslmode=disable", url.Values{"sslmode": {"verify-full"}, "sslrootcert": {client.CA}}.Encode(), 1)
		return map[string]string{"ONEJOB_POSTGRES_DSN": dsn, "CA": client.CA}
	case "rabbitmq":
		server, client := testenv.Certificates(t, "127.0.0.1")
		broker, vhost := testenv.OwnRabbitMQ(t, servers.RabbitMQConfig{TLS: &server})
		return map[string]string{"ADDRESS": broker.TLSURL(vhost.Name, client), "CA": client.CA}
	}
	t.Fatalf("no server is called %s", service)
	return nil
}
