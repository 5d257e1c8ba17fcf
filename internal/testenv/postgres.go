package testenv

import (
	"cmp"
	"context"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"onejob/internal/servers"
)

const cleanupTimeout = time.Minute

// DB is an empty database that belongs to one test.
type DB struct {
	Name string
	DSN  string // for the superuser
}

// Postgres makes a database for the test on the shared server. It is dropped
// when the test ends, no matter who is still connected to it.
func Postgres(t testing.TB) *DB {
	t.Helper()
	return newDB(t, sharedPostgres.get(t), "template0")
}

// A Template is a database that is made ready once on the shared server, and copied for each test that
// wants one like it.
type Template struct {
	fill func(ctx context.Context, dsn string) error
	once sync.Once
	name string
	err  error
}

// NewTemplate returns a Template that fill makes ready when the first test wants a copy. When fill
// returns it must have closed its connections.
func NewTemplate(fill func(ctx context.Context, dsn string) error) *Template {
	return &Template{fill: fill, name: "template_" + random()}
}

// Postgres makes a database for the test, as the function Postgres does, that is a copy of the template.
func (m *Template) Postgres(t testing.TB) *DB {
	t.Helper()
	server := sharedPostgres.get(t)
	m.once.Do(func() {
		ctx := context.Background() // it is not for this test alone
		if m.err = execute(ctx, server, "CREATE DATABASE "+m.name+" TEMPLATE template0"); m.err == nil {
			m.err = m.fill(ctx, server.DSN(m.name))
		}
	})
	if m.err != nil {
		t.Fatalf("testenv: make a template: %v", m.err)
	}
	return newDB(t, server, m.name)
}

// OwnPostgres starts a server for this test alone, which may stop it, and makes
// a database on it. Both are gone when the test ends.
func OwnPostgres(t testing.TB) (*servers.Postgres, *DB) {
	t.Helper()
	return OwnPostgresWith(t, servers.PostgresConfig{})
}

// OwnPostgresWith is OwnPostgres with settings of the test's own.
func OwnPostgresWith(t testing.TB, config servers.PostgresConfig) (*servers.Postgres, *DB) {
	t.Helper()
	config.Dir = cmp.Or(config.Dir, memory())
	server, err := servers.StartPostgres(t.Context(), config)
	if err != nil {
		t.Fatalf("testenv: %v", err)
	}
	closeAtEnd(t, server)
	db := &DB{Name: "test", DSN: server.DSN("test")}
	if err := execute(t.Context(), server, "CREATE DATABASE test TEMPLATE template0"); err != nil {
		t.Fatalf("testenv: create database %s: %v", db.Name, err)
	}
	return server, db
}

// Standby starts a server that follows another, until the test ends, and returns the
// database on it.
func (db *DB) Standby(t testing.TB, primary *servers.Postgres) (*servers.Postgres, *DB) {
	t.Helper()
	server, err := primary.StartStandby(t.Context())
	if err != nil {
		t.Fatalf("testenv: %v", err)
	}
	closeAtEnd(t, server)
	return server, &DB{Name: db.Name, DSN: server.DSN(db.Name)}
}

func newDB(t testing.TB, server *servers.Postgres, template string) *DB {
	t.Helper()
	name := "test_" + random()
	if err := execute(t.Context(), server, "CREATE DATABASE "+name+" TEMPLATE "+template); err != nil {
		t.Fatalf("testenv: create database %s: %v", name, err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
		defer cancel()
		if err := execute(ctx, server, "DROP DATABASE "+name+" WITH (FORCE)"); err != nil {
			t.Errorf("testenv: drop database %s: %v", name, err)
		}
	})
	return &DB{Name: name, DSN: server.DSN(name)}
}

func execute(ctx context.Context, server *servers.Postgres, statement string) error {
	conn, err := pgx.Connect(ctx, server.DSN("postgres"))
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	_, err = conn.Exec(ctx, statement)
	return err
}

// Pool opens a pool of connections to the database. It is closed when the test
// ends; a connection that has not been given back by then fails the test.
func (db *DB) Pool(t testing.TB) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), db.DSN)
	if err != nil {
		t.Fatalf("testenv: open pool: %v", err)
	}
	t.Cleanup(func() {
		closed := make(chan struct{})
		go func() {
			defer close(closed)
			pool.Close() // waits for every connection
		}()
		select {
		case <-closed:
		case <-time.After(cleanupTimeout):
			t.Errorf("testenv: the test kept %d connections of its pool", pool.Stat().AcquiredConns())
		}
	})
	return pool
}
