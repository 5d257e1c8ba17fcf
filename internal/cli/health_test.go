package cli

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/zap"

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

// A Postgres that does not answer is asked once for all who wait, not once for each of them.
func TestReadinessWithoutPostgresIsLookedAtOnce(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0") // connections wait, and nobody accepts them
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	db, err := store.Open(store.Config{DSN: fmt.Sprintf("postgres://onejob@%s/onejob?sslmode=disable", silent.Addr())})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	h := &health{store: db}
	const probes = 8
	answered := make(chan time.Duration, probes)
	for range probes {
		go func() {
			began := time.Now()
			if status, answer := h.readiness(t.Context()); status != http.StatusServiceUnavailable {
				t.Errorf("it is ready: %v", answer)
			}
			answered <- time.Since(began)
		}()
	}
	first := <-answered
	for range probes - 1 {
		if took := <-answered; took > first+readyFor {
			t.Errorf("one probe was answered after %v, another one after %v", first, took)
		}
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

// A client that only holds connections keeps no health check out, and ends nobody's page.
func TestHealthBesideManyConnections(t *testing.T) {
	t.Parallel()
	db, err := store.Open(store.Config{DSN: testenv.Postgres(t).DSN})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	cfg := defaults()
	cfg.HTTP.Listen = "127.0.0.1:0"
	where, stop, err := (&health{store: db, metrics: http.NotFoundHandler()}).listen(cfg, zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	dial := func(t *testing.T) net.Conn {
		t.Helper()
		conn, err := net.Dial("tcp", where)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		if err := conn.SetDeadline(time.Now().Add(5 * time.Minute)); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	// ask sends a request and returns the answer's header.
	ask := func(conn net.Conn, path string) (*http.Response, error) {
		fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n", path)
		return http.ReadResponse(bufio.NewReader(conn), nil)
	}
	viewer, err := ask(dial(t), "/events")
	if err != nil {
		t.Fatal(err)
	}
	for name, hold := range map[string]func(*testing.T, net.Conn){
		"Idle": func(t *testing.T, conn net.Conn) {
			resp, err := ask(conn, "/icon.svg")
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(io.Discard, resp.Body); err != nil {
				t.Fatal(err)
			}
		},
		"Silent": func(*testing.T, net.Conn) {},
	} {
		t.Run(name, func(t *testing.T) {
			for range maxClients + 10 {
				hold(t, dial(t))
			}
			for _, path := range []string{"/healthz", "/readyz"} {
				resp, err := ask(dial(t), path)
				if err != nil {
					t.Fatalf("%s: %v", path, err)
				}
				if !resp.Close {
					t.Errorf("%s leaves its connection open", path)
				}
			}
		})
	}
	// What is sent every two seconds still comes.
	for lines, events := bufio.NewScanner(viewer.Body), 0; events < 2; {
		if !lines.Scan() {
			t.Fatalf("the page was closed after %d events: %v", events, lines.Err())
		}
		if lines.Text() == "event: snapshot" {
			events++
		}
	}
}

// With a request under way on all connections the new one is closed, and no other.
func TestClientsThatAreAllBusy(t *testing.T) {
	t.Parallel()
	hold, begun := make(chan struct{}), make(chan struct{})
	served := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		begun <- struct{}{}
		<-hold
		fmt.Fprintln(w, "ok")
	}))
	served.Config.ConnState = (&clients{most: 2}).changed
	served.Start()
	defer served.Close()
	answers := make(chan error, 2)
	get := func() error {
		client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		resp, err := client.Get(served.URL)
		if err == nil {
			err = resp.Body.Close()
		}
		return err
	}
	for range 2 {
		go func() { answers <- get() }()
		<-begun
	}
	if err := get(); err == nil {
		t.Error("a third connection was served")
	}
	close(hold)
	for range 2 {
		if err := <-answers; err != nil {
			t.Error(err)
		}
	}
	go func() { <-begun }()
	testenv.Eventually(t, time.Minute, "another one is served when these are over", func() bool { return get() == nil })
}
