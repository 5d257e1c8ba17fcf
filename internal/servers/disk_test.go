package servers

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

const diskFull = "53100" // Postgres' code

func needDisks(t *testing.T) {
	t.Helper()
	if err := CanFillDisks(); err != nil {
		t.Skip(err)
	}
}

func TestPostgresOnAFullDisk(t *testing.T) {
	needDisks(t)
	p, err := StartPostgres(t.Context(), PostgresConfig{DiskBytes: 512 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	conn, err := pgx.Connect(t.Context(), p.DSN("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	if _, err := conn.Exec(t.Context(), "CREATE TABLE t (x text)"); err != nil {
		t.Fatal(err)
	}
	// On a disk that is full at once it would be the log for which there is no room, which
	// ends the server.
	const insert = "INSERT INTO t SELECT repeat('x', 1000) FROM generate_series(1, 10000)"
	if err := p.FillDisk(); err != nil {
		t.Fatal(err)
	}
	_, err = conn.Exec(t.Context(), insert)
	var refused *pgconn.PgError
	if !errors.As(err, &refused) || refused.Code != diskFull {
		t.Errorf("a large INSERT on a full disk: %v", err)
	}
	if err := p.FreeDisk(); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Exec(t.Context(), insert); err != nil {
		t.Errorf("the same when there is room again: %v", err)
	}
	dir := p.folder.path
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	for _, left := range []string{dir, dir + ".disk"} {
		if _, err := os.Stat(left); !os.IsNotExist(err) {
			t.Errorf("%s is left: %v", left, err)
		}
	}
}

func TestConsulOnAFullDisk(t *testing.T) {
	needDisks(t)
	c, err := StartConsul(t.Context(), ConsulConfig{DiskBytes: 256 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	put := func() error {
		_, err := c.Client().KV().Put(&api.KVPair{Key: "k", Value: make([]byte, 400<<10)}, nil)
		return err
	}
	if err := put(); err != nil {
		t.Fatal(err)
	}
	if err := c.FillDisk(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); put() == nil; {
		if time.Now().After(end) {
			t.Fatal("Consul writes on a full disk for a minute")
		}
	}
	if err := c.FreeDisk(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); ; {
		err := errors.Join(c.Start(t.Context()), put())
		if err == nil {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("when there is room again: %v", err)
		}
	}
}

// A folder that its owner has left behind goes with its file system.
func TestSweepUnmounts(t *testing.T) {
	needDisks(t)
	base := t.TempDir()
	f, err := makeFolder(base, "test", 4<<20)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.fill(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(f.path, "more"), make([]byte, 8192), 0o644); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("a file on a full disk: %v", err)
	}
	sweep(base) // it is new, and has its owner
	if _, err := os.Stat(f.filler()); err != nil {
		t.Errorf("sweep removed it: %v", err)
	}
	f.lock.Close()
	old := time.Now().Add(-2 * newFolder)
	if err := os.Chtimes(f.path, old, old); err != nil {
		t.Fatal(err)
	}
	sweep(base)
	if left, _ := os.ReadDir(base); len(left) > 0 {
		t.Errorf("sweep leaves %v", left)
	}
}
