package cli

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/internal/testenv"
	"onejob/store"
)

// However many ask whether a replica is ready, it looks once a second.
func TestReadinessIsKeptForASecond(t *testing.T) {
	t.Parallel()
	database := testenv.Postgres(t)
	db, err := store.Open(store.Config{DSN: database.DSN})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if err := db.Migrate(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	h := &health{store: db}
	if _, answer := h.readiness(t.Context()); answer["schema"] != "right" {
		t.Fatal(answer)
	}
	first := h.checked
	if _, err := database.Pool(t).Exec(t.Context(), `DROP SCHEMA onejob CASCADE`, pgx.QueryExecModeExec); err != nil {
		t.Fatal(err)
	}
	for range 100 {
		if _, answer := h.readiness(t.Context()); answer["schema"] != "right" && time.Since(first) < readyFor {
			t.Errorf("%v after it had looked, it looked again", time.Since(first))
		}
	}
	testenv.Eventually(t, time.Minute, "it has looked again", func() bool {
		_, answer := h.readiness(t.Context())
		return answer["schema"] != "right"
	})
	if since := h.checked.Sub(first); since < readyFor {
		t.Errorf("it looked again after %v", since)
	}
}
