package store_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"onejob/internal/testenv"
	"onejob/store"
	"onejob/tasks"
)

// An old primary that lives on keeps its connections, and notifies nobody of what the new one
// gets.
func TestListenLeavesAnOldPrimary(t *testing.T) {
	t.Parallel()
	host := func(d *testenv.DB) string { return strings.Split(strings.Split(d.DSN, "@")[1], "/")[0] }
	for name, leave := range map[string]func(s *store.Store, old, now tasks.Server){
		"Found": func(s *store.Store, old, _ tasks.Server) {
			if !s.Follow(t.Context(), old) {
				t.Error("the new one is not found")
			}
		},
		"Refused": func(s *store.Store, _, now tasks.Server) { s.Refuse(now) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			primary, db := testenv.OwnPostgres(t)
			standby, copied := db.Standby(t, primary)
			s := open(t, store.Config{DSN: strings.Replace(db.DSN, host(db), host(db)+","+host(copied), 1) + "&target_session_attrs=read-write"})
			if err := s.Migrate(t.Context(), nil); err != nil {
				t.Fatal(err)
			}
			old, err := s.Which(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			signals, ended := make(chan tasks.Signal, 100), make(chan error, 1)
			go func() { ended <- s.Listen(ctx, func(s tasks.Signal, _ string) { signals <- s }) }()
			heard := func(want tasks.Signal) {
				t.Helper()
				select {
				case got := <-signals:
					equal(t, "the signal", got, want)
				case err := <-ended:
					t.Fatalf("Listen returned %v", err)
				case <-time.After(2 * time.Minute):
					t.Fatal("no signal")
				}
			}
			heard(tasks.SignalListening)
			if err := standby.Promote(t.Context()); err != nil {
				t.Fatal(err)
			}
			now, err := open(t, store.Config{DSN: copied.DSN}).Which(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			leave(s, old, now)
			heard(tasks.SignalDeaf)
			heard(tasks.SignalListening)
			if _, err := copied.Pool(t).Exec(t.Context(), `INSERT INTO onejob.tasks (kind) VALUES ('noop')`); err != nil {
				t.Fatal(err)
			}
			heard(tasks.SignalDue)
			stop()
			if err := <-ended; err == nil || !strings.Contains(err.Error(), "context canceled") {
				t.Errorf("Listen returned %v", err)
			}
		})
	}
}
