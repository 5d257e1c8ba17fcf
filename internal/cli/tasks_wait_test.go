package cli

import (
	"context"
	"errors"
	"io"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"onejob/internal/testenv"
	"onejob/store"
)

// said takes what is written to stderr, one line at a time.
type said chan string

func (s said) Write(p []byte) (int, error) {
	s <- string(p)
	return len(p), nil
}

// saying returns a command that ends with ctx and writes to stderr.
func saying(ctx context.Context, stderr io.Writer) *cobra.Command {
	c := &cobra.Command{Use: "onejob"}
	c.SetContext(ctx)
	c.SetErr(stderr)
	return c
}

// A Postgres that is unavailable when the wait begins says nothing of the task: the wait goes on,
// and does not end as if the task had failed.
func TestWaitThroughAnOutageAtTheFirstLook(t *testing.T) {
	t.Parallel()
	database := testenv.Postgres(t)
	dsn, err := url.Parse(database.DSN)
	if err != nil {
		t.Fatal(err)
	}
	way := testenv.NewProxy(t, dsn.Host)
	dsn.Host = way.Addr
	open := func(dsn string) *store.Store {
		t.Helper()
		db, err := store.Open(store.Config{DSN: dsn, Timeout: time.Second})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(db.Close)
		return db
	}
	direct := open(database.DSN)
	if err := direct.Migrate(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	id, err := direct.Enqueue(t.Context(), store.NewTask{Kind: "noop"})
	if err != nil {
		t.Fatal(err)
	}
	if ok, err := direct.Cancel(t.Context(), id); !ok || err != nil {
		t.Fatal(ok, err)
	}
	way.Cut()

	stderr := make(said, 100)
	err = waitForTask(saying(t.Context(), stderr), open(dsn.String()), id, false, 4*time.Second)
	if exit, ok := errors.AsType[*exitError](err); !ok || exit.code != exitNotYet || !strings.HasPrefix(exit.err.Error(), "task 1 could not be read within 4s: look at task 1: ") {
		t.Errorf("the wait ended with %v", err)
	}
	if n := len(stderr); n != 1 {
		t.Fatalf("it said %d lines", n)
	}
	if line := <-stderr; !strings.HasPrefix(line, "onejob: look at task 1: ") || !strings.HasSuffix(line, "; waiting until the task can be read\n") {
		t.Errorf("it said %q", line)
	}

	ended := make(chan error, 1)
	db := open(dsn.String())
	go func() { ended <- waitForTask(saying(t.Context(), stderr), db, id, false, 0) }()
	select {
	case <-stderr:
	case err := <-ended:
		t.Fatalf("the wait ended with %v", err)
	}
	way.Heal()
	if err := <-ended; err == nil || err.Error() != "task 1 was cancelled" {
		t.Errorf("the wait ended with %v", err)
	}
}

// An answer of Postgres ends the wait at the first look: nothing will change it.
func TestWaitEndsWithAnAnswer(t *testing.T) {
	t.Parallel()
	database := testenv.Postgres(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	wrong := strings.Replace(database.DSN, database.Name, "nothing_of_that_name", 1)
	for dsn, want := range map[string]string{wrong: "does not exist", database.DSN: "onejob.tasks"} {
		db, err := store.Open(store.Config{DSN: dsn})
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		if err := waitForTask(saying(ctx, make(said, 100)), db, 1, false, 0); err == nil || ctx.Err() != nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the wait ended with %v, want %s", err, want)
		}
	}
}
