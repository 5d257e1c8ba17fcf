package testenv

import (
	"net/url"
	"os"
	"testing"

	"onejob/internal/servers"
)

// Pooler starts a pgbouncer in transaction mode in front of a database, with so many
// connections to it, and returns the DSN that leads through it. It runs until the
// test ends.
func Pooler(t testing.TB, db *DB, connections int) string {
	t.Helper()
	dsn, err := url.Parse(db.DSN)
	if err != nil {
		t.Fatalf("testenv: %v", err)
	}
	p, err := servers.StartPooler(t.Context(), "", dsn.Host, connections)
	if err != nil {
		t.Fatalf("testenv: %v", err)
	}
	t.Cleanup(func() {
		if log, err := os.ReadFile(p.LogFile()); err == nil && t.Failed() {
			t.Logf("pgbouncer: %s", log)
		}
		if err := p.Close(); err != nil {
			t.Errorf("testenv: %v", err)
		}
	})
	dsn.Host = p.Addr()
	return dsn.String()
}
