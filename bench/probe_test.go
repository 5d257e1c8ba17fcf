package main

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"

	"onejob/internal/servers"
)

// A snapshot is held until its transaction ends, even if the backend takes another one then.
func TestHeldSnapshot(t *testing.T) {
	t.Parallel()
	server, err := servers.StartPostgres(t.Context(), servers.PostgresConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
	})
	ctx := t.Context()
	other, err := pgx.Connect(ctx, server.DSN("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close(context.WithoutCancel(ctx))
	holder, err := holdSnapshot(ctx, server.DSN("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer holder.close(context.WithoutCancel(ctx))
	if _, err := other.Exec(ctx, `CREATE TABLE moved_on ()`); err != nil {
		t.Fatal(err)
	}
	if err := holder.still(ctx, other); err != nil {
		t.Error(err)
	}
	for _, sql := range []string{`COMMIT`, `BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT`} {
		if _, err := holder.conn.Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
		if holder.still(ctx, other) == nil {
			t.Errorf("after %s it says that the snapshot is held", sql)
		}
	}
}
