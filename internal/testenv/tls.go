package testenv

import (
	"testing"

	"onejob/internal/servers"
)

// Certificates makes a certificate authority and two certificates that it has signed:
// a server's for the hosts, which are names or addresses, and a client's.
func Certificates(t testing.TB, hosts ...string) (server, client servers.TLS) {
	t.Helper()
	server, client, err := servers.Certificates(t.TempDir(), hosts...)
	if err != nil {
		t.Fatal(err)
	}
	return server, client
}
