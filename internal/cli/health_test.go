package cli

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
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

// A client that announces the body of a request, and does not send it, is not waited for.
func TestRequestsWhoseBodyDoesNotCome(t *testing.T) {
	t.Parallel()
	served := httptest.NewServer(arriving(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })))
	t.Cleanup(served.Close)
	for _, request := range []string{
		"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n",
		"POST /nothing HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
	} {
		conn, err := net.Dial("tcp", served.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := io.WriteString(conn, request); err != nil {
			t.Fatal(err)
		}
		_ = conn.SetReadDeadline(time.Now().Add(time.Minute))
		answer, err := io.ReadAll(conn) // to its end: the server closes the connection
		if err != nil || !strings.Contains(string(answer), "ok") {
			t.Errorf("%s: %v, %s", request, err, answer)
		}
	}
}
