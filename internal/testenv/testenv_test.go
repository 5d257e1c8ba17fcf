package testenv_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"
	"github.com/jackc/pgx/v5"

	"onejob/internal/servers"
	"onejob/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func TestPostgres(t *testing.T) {
	t.Parallel()
	var names []string
	t.Run("each test has an empty database", func(t *testing.T) {
		for range 2 {
			db := testenv.Postgres(t)
			names = append(names, db.Name)
			if _, err := db.Pool(t).Exec(t.Context(), "CREATE TABLE tasks ()"); err != nil {
				t.Fatal(err)
			}
		}
	})
	t.Run("a template is filled once and copied", func(t *testing.T) {
		template := testenv.NewTemplate(func(ctx context.Context, dsn string) error {
			conn, err := pgx.Connect(ctx, dsn)
			if err != nil {
				return err
			}
			_, err = conn.Exec(ctx, "CREATE TABLE tasks AS SELECT 1 AS id")
			return errors.Join(err, conn.Close(ctx))
		})
		for range 2 {
			db := template.Postgres(t)
			names = append(names, db.Name)
			var n int
			if err := db.Pool(t).QueryRow(t.Context(), "DELETE FROM tasks RETURNING id").Scan(&n); err != nil {
				t.Fatal(err)
			}
		}
	})
	t.Run("it is dropped at the end", func(t *testing.T) {
		var left int
		err := testenv.Postgres(t).Pool(t).QueryRow(t.Context(),
			"SELECT count(*) FROM pg_database WHERE datname = ANY ($1)", names).Scan(&left)
		if err != nil || left != 0 {
			t.Errorf("%d databases left (%v)", left, err)
		}
	})
}

func TestConsul(t *testing.T) {
	t.Parallel()
	var first *testenv.KV
	t.Run("each test has a prefix", func(t *testing.T) {
		first = testenv.Consul(t)
		if second := testenv.Consul(t); second.Prefix == first.Prefix {
			t.Errorf("two tests have the prefix %s", first.Prefix)
		}
		if _, err := first.Client.KV().Put(&api.KVPair{Key: first.Prefix + "/key"}, nil); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("its keys are removed at the end", func(t *testing.T) {
		keys, _, err := first.Client.KV().Keys(first.Prefix, "", nil)
		if err != nil || len(keys) != 0 {
			t.Errorf("keys %q are left (%v)", keys, err)
		}
	})
	t.Run("short sessions are allowed", func(t *testing.T) {
		client := testenv.Consul(t).Client
		id, _, err := client.Session().Create(&api.SessionEntry{TTL: "1s"}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := client.Session().Destroy(id, nil); err != nil {
			t.Fatal(err)
		}
	})
}

func TestOwnServers(t *testing.T) {
	t.Parallel()
	t.Run("PostgreSQL can be restarted under a pool", func(t *testing.T) {
		server, db := testenv.OwnPostgres(t)
		pool := db.Pool(t)
		if err := pool.Ping(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := server.Restart(t.Context(), servers.Immediate); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, 5*time.Second, "the pool has recovered", func() bool {
			return pool.Ping(t.Context()) == nil
		})
	})
	t.Run("Consul can deny by default", func(t *testing.T) {
		_, kv := testenv.OwnConsul(t, servers.ConsulConfig{ManagementToken: "6d2d0b1e-5b6c-4b1c-9d3a-0c8f8a1f6f10"})
		_, err := kv.Client.KV().Put(&api.KVPair{Key: kv.Prefix + "/key"}, nil)
		if err != nil {
			t.Errorf("the management token was refused: %v", err)
		}
		_, err = kv.Client.KV().Put(&api.KVPair{Key: kv.Prefix + "/key"}, &api.WriteOptions{Token: "anonymous"})
		if err == nil {
			t.Error("no token was needed")
		}
	})
}

func TestLogger(t *testing.T) {
	logger, entries := testenv.Logger(t)
	logger.Debug("claimed")
	if entries.FilterMessage("claimed").Len() != 1 {
		t.Errorf("the entries are %v", entries.All())
	}
}
