package http

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"onejob/boottime"
	"onejob/internal/pgjson"
	"onejob/internal/quiet"
	"onejob/internal/testenv/proxy"
	"onejob/tasks"
)

func newKind(t testing.TB, c Config) *Kind {
	t.Helper()
	k, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.client.CloseIdleConnections)
	return k
}

// run runs an attempt.
func run(ctx context.Context, k *Kind, a *tasks.Attempt) (tasks.Result, error) {
	handler, err := k.Prepare(a.Payload)
	if err != nil {
		return tasks.Result{}, err
	}
	return handler(ctx, a)
}

// serveHTTP starts a server that ends with the test.
func serveHTTP(t *testing.T, handler http.HandlerFunc) *httptest.Server {
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return server
}

func httpAttempt(t *testing.T, payload any) *tasks.Attempt {
	t.Helper()
	raw, err := json.Marshal(payload)
	if err != nil {
		t.Fatal(err)
	}
	return &tasks.Attempt{
		Task: tasks.Task{
			ID: 17, Kind: "http", Payload: raw, Attempt: 2, MaxAttempts: 5, Fence: 42,
			CreatedAt: time.UnixMicro(255),
		},
		Deadline: func() boottime.Instant { return boottime.Now().Add(time.Hour) },
		Output:   tasks.NewOutput(0),
	}
}

type object = map[string]any

func TestSendsTheRequestAndTheAttempt(t *testing.T) {
	type request struct {
		method, query, body string
		header              http.Header
	}
	seen := make(chan request, 1)
	server := serveHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		seen <- request{r.Method, r.URL.RawQuery, string(body), r.Header}
	})
	h := newKind(t, Config{Allow: []string{server.URL}})

	for _, test := range []struct {
		name                            string
		payload                         object
		method, query, body, typ, agent string
	}{
		{"GET without a body", object{"url": server.URL + "?a=b"}, "GET", "a=b", "", "", "onejob"},
		{"POST with JSON", object{"url": server.URL, "body": object{"n": 1}}, "POST", "", `{"n":1}`, "application/json", "onejob"},
		{"POST with null, which is JSON too", object{"url": server.URL, "body": nil}, "POST", "", `null`, "application/json", "onejob"},
		{"POST with text", object{"url": server.URL, "body_text": "héllo"}, "POST", "", "héllo", "text/plain; charset=utf-8", "onejob"},
		{"PUT with a type and an agent of its own",
			object{"url": server.URL, "method": "PUT", "body_text": "a,b", "headers": object{"content-type": "text/csv", "user-agent": "reports"}},
			"PUT", "", "a,b", "text/csv", "reports"},
		{"DELETE", object{"url": server.URL, "method": "DELETE"}, "DELETE", "", "", "", "onejob"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if _, err := run(t.Context(), h, httpAttempt(t, test.payload)); err != nil {
				t.Fatal(err)
			}
			got := <-seen
			if got.method != test.method || got.query != test.query || got.body != test.body {
				t.Errorf("got %s ?%s %q, want %s ?%s %q", got.method, got.query, got.body, test.method, test.query, test.body)
			}
			for name, want := range map[string]string{
				"Onejob-Fence":    "42",
				"Onejob-Task-Id":  "17",
				"Onejob-Attempt":  "2",
				"Idempotency-Key": "onejob-17-ff",
				"User-Agent":      test.agent,
				"Content-Type":    test.typ,
			} {
				if got := got.header.Get(name); got != want {
					t.Errorf("%s: %q, want %q", name, got, want)
				}
			}
		})
	}
}

func TestKeepsTheResponse(t *testing.T) {
	var answer func(w http.ResponseWriter)
	server := serveHTTP(t, func(w http.ResponseWriter, r *http.Request) { answer(w) })
	h := newKind(t, Config{Allow: []string{server.URL}, ResponseLimit: 20})
	wide := newKind(t, Config{Allow: []string{server.URL}})

	for _, test := range []struct {
		name   string
		kind   *Kind
		status int
		body   string
		want   string
	}{
		{"nothing", h, 204, "", `{"status":204}`},
		{"JSON", h, 201, `{"b": [1.50, null]}`, `{"status":201,"body":{"b":[1.50,null]}}`},
		{"text", h, 200, `fine`, `{"status":200,"body":"fine"}`},
		{"JSON of just the limit", h, 200, `[45678901234567890]` + "\n", `{"status":200,"body":[45678901234567890]}`},
		{"JSON beyond the limit becomes text", h, 200, `[456789012345678901234]`, `{"status":200,"body":"[4567890123456789012","truncated":true}`},
		{"no half character", h, 200, strings.Repeat("é", 9) + "x€", `{"status":200,"body":"éééééééééx","truncated":true}`},
		{"NUL and broken UTF-8 in text", h, 200, "a\x00b\xff", `{"status":200,"body":"a\\x00b\\xff"}`},
		{"NUL in JSON", wide, 200, `{"a\u0000b": ["c\u0000"]}`, `{"status":200,"body":{"a\\x00b":["c\\x00"]}}`},
		{"a lone surrogate in JSON", wide, 200, `["\ud800"]`, `{"status":200,"body":["` + "\ufffd" + `"]}`},
		{"numbers that Postgres refuses", wide, 200, `[1e400000, 1e-400000, -0.00, 1e3, 0.0e+00, 0e-20000]`, `{"status":200,"body":["1e400000","1e-400000",-0.00,1e3,0.0e+00,"0e-20000"]}`},
		{"numbers that become long", wide, 200, "[" + strings.Repeat("1e308,", 1000) + "1e400]", `{"status":200,"body":"[` + strings.Repeat("1e308,", 1000) + `1e400]"}`},
		{"small numbers", wide, 200, "[" + strings.Repeat("1e-30,", 1000) + "1]", `{"status":200,"body":[` + strings.Repeat("1e-30,", 1000) + `1]}`},
		{"nesting that Postgres refuses", wide, 200, strings.Repeat("[", 5000) + strings.Repeat("]", 5000),
			`{"status":200,"body":"` + strings.Repeat("[", 5000) + strings.Repeat("]", 5000) + `"}`},
	} {
		t.Run(test.name, func(t *testing.T) {
			answer = func(w http.ResponseWriter) {
				w.WriteHeader(test.status)
				io.WriteString(w, test.body)
			}
			a := httpAttempt(t, object{"url": server.URL})
			result, err := run(t.Context(), test.kind, a)
			if err != nil {
				t.Fatal(err)
			}
			if string(result.Value) != test.want {
				t.Errorf("got  %s\nwant %s", result.Value, test.want)
			}
			if want := fmt.Sprintf("HTTP/1.1 %d %s\n\n%s", test.status, http.StatusText(test.status), tasks.Text(test.body)); a.Output.String() != want {
				t.Errorf("output %q, want %q", a.Output, want)
			}
		})
	}
}

// A request that succeeded does not fail its task because the answer is too long for a
// store, whatever JSON makes of the answer's bytes.
func TestCutsAResponseToWhatAStoreKeeps(t *testing.T) {
	var body []byte
	server := serveHTTP(t, func(w http.ResponseWriter, r *http.Request) { w.Write(body) })
	kind := newKind(t, Config{Allow: []string{server.URL}, ResponseLimit: 16 << 20})

	for _, test := range []struct {
		name      string
		body      string
		truncated bool
		atLeast   int // bytes of the body that are kept
	}{
		{"text", strings.Repeat("Prüfung 12345\n", 5<<20/15), true, 3 << 20},
		{"bytes that are not UTF-8", strings.Repeat("\xff", 2<<20), true, 4 << 20 / 5 * 99 / 100},
		{"halves of characters", strings.Repeat("€\xe2\x82", 2<<20/5), true, 1 << 20},
		{"control characters", strings.Repeat("\x01", 1<<20), true, 4 << 20 / 6 * 99 / 100},
		{"text, then control characters", strings.Repeat("a", 3<<20) + strings.Repeat("\x01", 1<<20), true, 3 << 20},
		{"JSON", `["` + strings.Repeat("abc", 5<<20/3) + `"]`, true, 4 << 20 * 99 / 100},
		{"JSON that grows", `["` + strings.Repeat("<", 1<<20) + `"]`, true, 4 << 20 / 6 * 99 / 100},
		{"text that just fits", strings.Repeat("a", tasks.MaxResult-len(`{"status":200,"body":""}`)), false, tasks.MaxResult - len(`{"status":200,"body":""}`)},
		{"text that just does not fit", strings.Repeat("a", tasks.MaxResult-len(`{"status":200,"body":""}`)+1), true, 4 << 20 * 99 / 100},
		{"JSON whose numbers Postgres writes out", "[" + strings.Repeat("1e20,", 180_000) + "1]", false, 900_003},
		{"JSON whose numbers Postgres writes out, and that grows as text", "[" + strings.Repeat(`1e9,"",`, 550_000) + "1]", true, 4 << 20 * 7 / 9 * 99 / 100},
	} {
		t.Run(test.name, func(t *testing.T) {
			body = []byte(test.body)
			result, err := run(t.Context(), kind, httpAttempt(t, object{"url": server.URL}))
			if err != nil {
				t.Fatal(err)
			}
			if why := pgjson.TooLong(result.Value, tasks.MaxResult); why != "" {
				t.Errorf("the result is too long: %s", why)
			}
			if !utf8.Valid(result.Value) {
				t.Error("the result is not UTF-8")
			}
			var got struct {
				Status    int    `json:"status"`
				Body      string `json:"body"`
				Truncated bool   `json:"truncated"`
			}
			if err := json.Unmarshal(result.Value, &got); err != nil {
				t.Fatal(err)
			}
			if got.Status != 200 || got.Truncated != test.truncated {
				t.Errorf("status %d, truncated %v, want 200, %v", got.Status, got.Truncated, test.truncated)
			}
			whole := tasks.Text(test.body)
			if !strings.HasPrefix(whole, got.Body) {
				t.Errorf("the %d bytes kept are not the beginning of the body", len(got.Body))
			}
			if least := len(tasks.Text(test.body[:test.atLeast])); len(got.Body) < least {
				t.Errorf("%d bytes of text are kept, want at least %d", len(got.Body), least)
			}
			if strings.HasSuffix(got.Body, `\`) || strings.HasSuffix(got.Body, `\x`) {
				t.Error("the text ends within an escape")
			}
		})
	}
}

func TestReadsAnEndlessResponseOnlySoFar(t *testing.T) {
	server := serveHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		for chunk := make([]byte, 64<<10); ; {
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
	})
	a := httpAttempt(t, object{"url": server.URL})
	result, err := run(t.Context(), newKind(t, Config{Allow: []string{server.URL}, ResponseLimit: 1}), a)
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"status":200,"body":"\\x00","truncated":true}`; string(result.Value) != want {
		t.Errorf("got %s, want %s", result.Value, want)
	}
}

// A server that switches to a protocol which nobody asked for, and then says nothing, holds up no
// attempt: net/http gives its connection away as the body, which ends with no context.
func TestSwitchedProtocol(t *testing.T) {
	t.Parallel()
	for _, status := range []string{"101 Switching Protocols", "101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x"} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		go func() {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			defer conn.Close()
			_, _ = fmt.Fprintf(conn, "HTTP/1.1 %s\r\n\r\n", status)
			_, _ = io.Copy(io.Discard, conn) // until the other side closes it
		}()
		origin := "http://" + l.Addr().String()
		k := newKind(t, Config{Allow: []string{origin}})
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		done := make(chan error, 1)
		go func() {
			_, err := run(ctx, k, httpAttempt(t, map[string]any{"url": origin + "/"}))
			done <- err
		}()
		select {
		case err := <-done:
			if err == nil {
				t.Errorf("%q succeeded", status)
			}
		case <-time.After(time.Minute):
			t.Errorf("%q: the attempt goes on, long after its context has ended", status)
		}
	}
}

// A load balancer may go on acknowledging what it receives for a receiver that has died. With HTTP/2 all
// requests of a replica would be on that connection.
func TestDeadConnectionIsLeft(t *testing.T) {
	t.Parallel()
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, "%q", r.Proto) }))
	server.EnableHTTP2 = true
	server.StartTLS()
	t.Cleanup(server.Close)
	balancer, err := proxy.New(server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = balancer.Close() })

	k := newKind(t, Config{Allow: []string{server.URL}})
	transport := k.client.Transport.(*http.Transport)
	transport.TLSClientConfig = &tls.Config{RootCAs: x509.NewCertPool()}
	transport.TLSClientConfig.RootCAs.AddCert(server.Certificate())
	var connections atomic.Int32
	transport.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		if connections.Add(1) == 1 {
			address = balancer.Addr()
		}
		return new(net.Dialer).DialContext(ctx, network, address)
	}
	send := func(limit time.Duration) (tasks.Result, error) {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		return run(ctx, k, httpAttempt(t, object{"url": server.URL}))
	}
	if r, err := send(time.Minute); err != nil {
		t.Fatalf("got %s, %v", r.Value, err)
	}

	balancer.Cut(proxy.Both)
	if r, err := send(time.Second); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("with a dead connection: got %s, %v", r.Value, err)
	}
	if r, err := send(time.Minute); err != nil || connections.Load() != 2 {
		t.Errorf("after that: got %s, %v, over connection %d", r.Value, err, connections.Load())
	}
}

func TestFailures(t *testing.T) {
	var status int
	var header http.Header
	server := serveHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		for name, values := range header {
			w.Header()[name] = values
		}
		w.WriteHeader(status)
		io.WriteString(w, strings.Repeat("because ", 100))
	})
	h := newKind(t, Config{Allow: []string{server.URL}})

	date := time.Date(2001, 1, 1, 0, 0, 0, 0, time.UTC)
	after := func(value string) http.Header { return http.Header{"Retry-After": {value}} }
	for _, test := range []struct {
		status    int
		header    http.Header
		permanent bool
		delay     time.Duration
	}{
		{status: 300, permanent: true},
		{status: 304, permanent: true},
		{status: 400, permanent: true},
		{status: 404, permanent: true, header: after("10")},
		{status: 409, permanent: true},
		{status: 422, permanent: true},
		{status: 408},
		{status: 425},
		{status: 500},
		{status: 502, header: after("soon")},
		{status: 504, header: after("")},
		{status: 429, header: after("7"), delay: 7 * time.Second},
		{status: 503, header: after("120"), delay: 2 * time.Minute},
		{status: 503, header: after("-5")},
		{status: 503, header: after("86401"), delay: 24 * time.Hour},
		{status: 503, header: after("99999999999999999999"), delay: 24 * time.Hour},
		{status: 503, header: after("-99999999999999999999")},
		{status: 503, delay: time.Minute, header: http.Header{
			"Date":        {date.Format(http.TimeFormat)},
			"Retry-After": {date.Add(time.Minute).Format(http.TimeFormat)},
		}},
		{status: 503, header: after(date.Format(http.TimeFormat))}, // long past
		{status: 503, header: after("Fri, 31 Dec 9999 23:59:59 GMT"), delay: 24 * time.Hour},
	} {
		t.Run(fmt.Sprintf("%d %s", test.status, test.header.Get("Retry-After")), func(t *testing.T) {
			status, header = test.status, test.header
			_, err := run(t.Context(), h, httpAttempt(t, object{"url": server.URL + "/a?secret"}))
			if err == nil {
				t.Fatal("no error")
			}
			if tasks.IsPermanent(err) != test.permanent {
				t.Errorf("permanent: %t, want %t", !test.permanent, test.permanent)
			}
			if d, _ := tasks.RetryDelay(err); d != test.delay {
				t.Errorf("delay %s, want %s", d, test.delay)
			}
			want := fmt.Sprintf("GET %s/a: answered %d %s", server.URL, test.status, http.StatusText(test.status))
			if test.status != 304 { // which has no body
				want += ": because because"
			}
			if !strings.HasPrefix(err.Error(), want) {
				t.Errorf("got %q, want it to begin with %q", err, want)
			}
			if len(err.Error()) > 700 || strings.Contains(err.Error(), "secret") {
				t.Errorf("too much in %q", err)
			}
		})
	}
}

func TestTriesAgainWhen(t *testing.T) {
	release := make(chan struct{})
	server := serveHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/silent":
			select {
			case <-r.Context().Done():
			case <-release:
			}
		case "/cut":
			w.Header().Set("Content-Length", "10")
			io.WriteString(w, "short")
		}
	})
	t.Cleanup(func() { close(release) })
	gone := httptest.NewServer(nil)
	gone.Close()
	allow := []string{server.URL, gone.URL}
	h, hasty := newKind(t, Config{Allow: allow}), newKind(t, Config{Allow: allow, Timeout: 50 * time.Millisecond})

	fails := func(t *testing.T, ctx context.Context, h *Kind, url string, want string) error {
		t.Helper()
		_, err := run(ctx, h, httpAttempt(t, object{"url": url}))
		if err == nil || tasks.IsPermanent(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q, and not for good", err, want)
		}
		return err
	}
	t.Run("nobody listens", func(t *testing.T) {
		fails(t, t.Context(), h, gone.URL, "connection refused")
	})
	t.Run("the response breaks off", func(t *testing.T) {
		fails(t, t.Context(), h, server.URL+"/cut", "answered 200 OK, then broke off: unexpected EOF")
	})
	t.Run("there is no answer in time", func(t *testing.T) {
		if err := fails(t, t.Context(), hasty, server.URL+"/silent", "timeout of 50ms"); !errors.Is(err, tasks.ErrTimeout) {
			t.Errorf("%v is not tasks.ErrTimeout", err)
		}
	})
	t.Run("the attempt is cancelled", func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(tasks.ErrShutdown)
		if err := fails(t, ctx, h, server.URL+"/silent", ""); !errors.Is(err, tasks.ErrShutdown) {
			t.Errorf("%v is not tasks.ErrShutdown", err)
		}
	})
	t.Run("the task's own timeout is longer than ours", func(t *testing.T) {
		a := httpAttempt(t, object{"url": server.URL + "/silent"})
		a.Timeout = 200 * time.Millisecond
		began := time.Now() // before the timeout begins
		ctx, cancel := context.WithTimeoutCause(t.Context(), a.Timeout, tasks.ErrTimeout)
		defer cancel()
		if _, err := run(ctx, hasty, a); !errors.Is(err, tasks.ErrTimeout) || time.Since(began) < a.Timeout {
			t.Errorf("%v after %s", err, time.Since(began))
		}
	})
}

func TestRedirects(t *testing.T) {
	other := serveHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		if back := r.URL.Query().Get("back"); back != "" {
			http.Redirect(w, r, back, http.StatusTemporaryRedirect)
			return
		}
		body, _ := io.ReadAll(r.Body)
		json.NewEncoder(w).Encode(object{"method": r.Method, "body": string(body), "header": r.Header})
	})
	server := serveHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/v1/to":
			http.Redirect(w, r, r.URL.Query().Get("url"), http.StatusTemporaryRedirect)
		case "/v1/see":
			http.Redirect(w, r, r.URL.Query().Get("url"), http.StatusSeeOther)
		case "/v1/loop":
			http.Redirect(w, r, "/v1/loop", http.StatusFound)
		default:
			body, _ := io.ReadAll(r.Body)
			json.NewEncoder(w).Encode(object{"method": r.Method, "body": string(body), "header": r.Header})
		}
	})
	forbidden := serveHTTP(t, func(http.ResponseWriter, *http.Request) { t.Error("a request went where it may not") })
	h := newKind(t, Config{Allow: []string{server.URL + "/v1", other.URL}})

	run := func(t *testing.T, url string) (tasks.Result, error) {
		return run(t.Context(), h, httpAttempt(t, object{
			"url":     url,
			"headers": object{"Authorization": "Bearer s3cret", "X-Api-Key": "s3cret", "Cookie": "s=s3cret", "Content-Type": "text/x"},
			"body":    "work",
		}))
	}
	to := func(target string) string { return server.URL + "/v1/to?url=" + url.QueryEscape(target) }

	for _, test := range []struct {
		name, url, method string
		secrets           bool
	}{
		{"within the origin", to("/v1/end"), "POST", true},
		{"to another origin", to(other.URL), "POST", false},
		{"to another origin and back", to(other.URL + "?back=" + url.QueryEscape(server.URL+"/v1/end")), "POST", false},
		{"as a GET", server.URL + "/v1/see?url=/v1/end", "GET", true},
	} {
		t.Run(test.name, func(t *testing.T) {
			result, err := run(t, test.url)
			if err != nil {
				t.Fatal(err)
			}
			var got struct {
				Body struct {
					Method, Body string
					Header       http.Header
				}
			}
			if err := json.Unmarshal(result.Value, &got); err != nil {
				t.Fatal(err)
			}
			if got.Body.Method != test.method || (got.Body.Body == `"work"`) != (test.method == "POST") {
				t.Errorf("got %s with body %q", got.Body.Method, got.Body.Body)
			}
			for name, want := range map[string]bool{
				"Onejob-Fence": true, "Onejob-Task-Id": true, "Onejob-Attempt": true, "Idempotency-Key": true,
				"Content-Type":  test.method == "POST",
				"Authorization": test.secrets, "X-Api-Key": test.secrets, "Cookie": test.secrets, "Referer": test.secrets,
			} {
				if got := got.Body.Header.Get(name) != ""; got != want {
					t.Errorf("%s arrived: %t, want %t", name, got, want)
				}
			}
		})
	}

	for _, test := range []struct{ name, url, want string }{
		{"to another host", to(forbidden.URL + "/x?q"), "redirected to " + forbidden.URL + "/x: is not allowed"},
		{"out of the prefix", to("/v2"), "redirected to " + server.URL + "/v2: is not allowed"},
		{"with a password", to(strings.Replace(other.URL, "//", "//me:pw@", 1)), "redirected to " + other.URL + ": must not hold a user name"},
		{"without an end", server.URL + "/v1/loop", "after 5 redirects already"},
	} {
		t.Run("refused "+test.name, func(t *testing.T) {
			_, err := run(t, test.url)
			if !tasks.IsPermanent(err) || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q for good", err, test.want)
			}
		})
	}
}

func TestCheck(t *testing.T) {
	h := newKind(t, Config{Allow: []string{"https://hooks.example.com/v1", "http://localhost:8080/", "http://[::1]"}})

	const ok = ""
	for payload, want := range map[string]string{
		`{"url": "https://hooks.example.com/v1"}`:                         ok,
		`{"url": "https://hooks.example.com/v1/a%20b/.c/..d?x=../#y"}`:    ok,
		`{"url": "https://HOOKS.example.com:443/v1/"}`:                    ok,
		`{"url": "https://hooks.example.com/%761/a"}`:                     ok,
		`{"url": "http://localhost:08080"}`:                               ok,
		`{"url": "http://[0:0::1]:/x"}`:                                   ok,
		`{"url": "http://localhost:8080", "headers": {"X-A": "\té"}}`:     ok,
		`{"url": "http://localhost:8080/100%25", "method": "PATCH"}`:      ok,
		`{"url": "http://localhost:8080", "headers": null, "method": ""}`: ok,

		`[]`:                               `it cannot be a JSON array`,
		`{}`:                               `url is missing`,
		`{"url": 7}`:                       `url cannot be a JSON number`,
		`{"uri": "http://localhost:8080"}`: `unknown field "uri"; allowed are url, method, headers, body, body_text`,
		`{"url": "http://localhost:8080", "METHOD": "GET"}`:                `unknown field "METHOD"; allowed are url`,
		`{"url": "http://localhost:8080", "url": "http://localhost:8080"}`: `the field "url" is given twice`,
		`{"url": "https://elsewhere.example.com/", "method": "x"}`:         `method "x": must be one of`,
		`{"url": "http://a b/"}`:                                           `url: invalid character`,
		`{"url": "/v1"}`:                                                   `must begin with http:// or https://`,
		`{"url": "file:///etc/passwd"}`:                                    `must begin with http:// or https://`,
		`{"url": "https:hooks.example.com"}`:                               `must name a host`,
		`{"url": "https://u:s3cret@hooks.example.com/v1"}`:                 `user name or password`,
		`{"url": "https://u:s3cret@hooks example.com/v1"}`:                 `url: invalid character`,

		`{"url": "https://hooks.example.com/v2?token=s3cret"}`: `url https://hooks.example.com/v2: is not allowed; to open it, add https://hooks.example.com, with as much of its path as should be opened, to kinds.http.allow`,
		`{"url": "https://hooks.example.com/v1x"}`:             `is not allowed`,
		`{"url": "https://hooks.example.com/V1"}`:              `is not allowed`,
		`{"url": "https://hooks.example.com//v1"}`:             `is not allowed`,
		`{"url": "http://hooks.example.com/v1"}`:               `is not allowed`,
		`{"url": "http://hooks.example.com:443/v1"}`:           `is not allowed`,
		`{"url": "https://hooks.example.com:8443/v1"}`:         `is not allowed`,
		`{"url": "https://hooks.example.com./v1"}`:             `is not allowed`,
		`{"url": "https://evil.hooks.example.com/v1"}`:         `is not allowed`,
		`{"url": "https://hooks.example.com.evil.test/v1"}`:    `is not allowed`,
		`{"url": "https://hooks.example.com%2f.evil.test/v1"}`: `url: invalid URL escape`,
		`{"url": "https://ｈooks.example.com/v1"}`:              `other alphabets as xn--`,
		`{"url": "http://[::1%25eth0]/"}`:                      `without a zone`,
		`{"url": "http://localhost:99999"}`:                    `port 99999`,
		`{"url": "http://localhost:0"}`:                        `port 0`,

		`{"url": "https://hooks.example.com/v1/../admin"}`:             `segment of its path`,
		`{"url": "https://hooks.example.com/v1/./a"}`:                  `segment of its path`,
		`{"url": "https://hooks.example.com/v1/%2e%2E/admin"}`:         `segment of its path ("%2e%2E")`,
		`{"url": "https://hooks.example.com/v1/%252e%252e/admin"}`:     `segment of its path`,
		`{"url": "https://hooks.example.com/v1/%252%65."}`:             `segment of its path`,
		`{"url": "https://hooks.example.com/v1/..%2fadmin"}`:           `segment of its path`,
		`{"url": "https://hooks.example.com/v1/a%2Fb"}`:                `segment of its path`,
		`{"url": "https://hooks.example.com/v1%5c..%5cadmin"}`:         `segment of its path`,
		`{"url": "https://hooks.example.com/v1/..;x=y/admin"}`:         `segment of its path`,
		`{"url": "https://hooks.example.com/v1/%252e%252e;%25/admin"}`: `segment of its path`,
		`{"url": "https://hooks.example.com/v1/a%252f..%252f%25zz"}`:   `segment of its path`,
		`{"url": "https://hooks.example.com/v1/..%00/admin"}`:          `segment of its path`,
		`{"url": "https://hooks.example.com/v1/%25252e%25252e/adm"}`:   `segment of its path`,

		`{"url": "http://localhost:8080", "method": "post"}`:                            `method "post": must be one of GET`,
		`{"url": "http://localhost:8080", "method": "CONNECT"}`:                         `method "CONNECT": must be one of GET`,
		`{"url": "http://localhost:8080", "body": null, "body_text": ""}`:               `exclude each other`,
		`{"url": "http://localhost:8080", "headers": {"X-A": 1}}`:                       `cannot be a JSON number`,
		`{"url": "http://localhost:8080", "headers": {"X-A": null}}`:                    `headers: the value of X-A is null; leave it out`,
		`{"url": "http://localhost:8080", "headers": {"": "x"}}`:                        `"" is not a header's name`,
		`{"url": "http://localhost:8080", "headers": {"X A": "x"}}`:                     `"X A" is not a header's name`,
		`{"url": "http://localhost:8080", "headers": {"X-Ä": "x"}}`:                     `"X-Ä" is not a header's name`,
		`{"url": "http://localhost:8080", "headers": {"X-A": "x\r\nHost: y"}}`:          `control character`,
		`{"url": "http://localhost:8080", "headers": {"X-A": "x", "x-a": "y"}}`:         `X-A is given twice`,
		`{"url": "http://localhost:8080", "headers": {"host": "x"}}`:                    `Host is set by onejob`,
		`{"url": "http://localhost:8080", "headers": {"Content-Length": "1"}}`:          `Content-Length is set by onejob`,
		`{"url": "http://localhost:8080", "headers": {"onejob-fence": "1"}}`:            `Onejob-Fence is set by onejob`,
		`{"url": "http://localhost:8080", "headers": {"ONEJOB_FENCE": "1"}}`:            `is set by onejob`,
		`{"url": "http://localhost:8080", "headers": {"Onejob-Whatever": "1"}}`:         `Onejob-Whatever is set by onejob`,
		`{"url": "http://localhost:8080", "headers": {"Idempotency-Key": "1"}}`:         `Idempotency-Key is set by onejob`,
		`{"url": "http://localhost:8080", "headers": {"Transfer-Encoding": "chunked"}}`: `Transfer-Encoding is set by onejob`,
		`{"url": "http://localhost:8080", "headers": {"Connection": "X-A"}}`:            `Connection is set by onejob`,
		`{"url": "http://localhost:8080", "headers": {"Proxy-Authorization": "x"}}`:     `Proxy-Authorization is set by onejob`,
	} {
		t.Run(payload, func(t *testing.T) {
			_, err := h.Prepare(json.RawMessage(payload))
			switch {
			case want == ok && err != nil:
				t.Errorf("refused: %v", err)
			case want != ok && (err == nil || !strings.Contains(err.Error(), want)):
				t.Errorf("got %v, want %q", err, want)
			case err != nil && strings.Contains(err.Error(), "s3cret"):
				t.Errorf("a secret in %q", err)
			}
			if err != nil {
				// What another replica may be allowed to do waits for it.
				unknown := strings.Contains(want, "is not allowed")
				if errors.Is(err, tasks.ErrUnknown) != unknown {
					t.Errorf("is %v an tasks.ErrUnknown? want %v", err, unknown)
				}
			}
		})
	}
}

// Step by step, decoding this path takes longer than anybody would wait for the test.
func TestPathThatIsEncodedAMillionTimes(t *testing.T) {
	h := newKind(t, Config{Allow: []string{"https://hooks.example.com/v1"}})
	for end, want := range map[string]string{"41": "", "2e%2e": "segment of its path", "2f": "segment of its path"} {
		_, err := h.Prepare(json.RawMessage(`{"url": "https://hooks.example.com/v1/%` + strings.Repeat("25", 1_000_000) + end + `"}`))
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: got %.200v, want %q", end, err, want)
		}
	}
}

func TestNewNamesEveryProblem(t *testing.T) {
	_, err := New(Config{
		Allow: []string{
			"https://fine.example.com/a",
			"example.com",
			"https://",
			"https://u@example.com",
			"https://example.com?a",
			"https://example.com/#",
			"https://example.com/a/../b",
			"https://example.com/a//b",
			"https://*.example.com/",
			"https://example.com:x/",
		},
		ResponseLimit: -1,
		Timeout:       -time.Second,
	})
	want := `allow[1] "example.com": must begin with http:// or https://
allow[2] "https://": must name a host
allow[3]: must not hold a user name or password; send an Authorization header
allow[4] "https://example.com": must have no query and no fragment
allow[5] "https://example.com/": must have no query and no fragment
allow[6] "https://example.com/a/../b": must have no dots alone, slashes, backslashes or control characters, encoded or not, in a segment of its path ("..")
allow[7] "https://example.com/a//b": must have no empty segments in its path
allow[8] "https://*.example.com/": host "*.example.com" must be letters, digits, hyphens and dots; write other alphabets as xn--
allow[9] "https://example.com:x/": invalid port
response_limit -1: must not be negative
timeout -1s: must not be negative`
	if err == nil || err.Error() != want {
		t.Errorf("got\n%v\nwant\n%s", err, want)
	}
}

func TestResponseLimitHasAnUpperBound(t *testing.T) {
	if _, err := New(Config{ResponseLimit: 16 << 20}); err != nil {
		t.Errorf("16 MiB: %v", err)
	}
	const want = "response_limit 16777217: must be at most 16777216 (16 MiB)"
	if _, err := New(Config{ResponseLimit: 16<<20 + 1}); err == nil || err.Error() != want {
		t.Errorf("a byte more: %v, want %s", err, want)
	}
}

// FuzzAllow checks that what the allow-list lets through leads, for a
// reader that decodes the path as often as it likes and cleans it, to the
// place that the list names.
func FuzzAllow(f *testing.F) {
	h := newKind(f, Config{Allow: []string{"https://example.com/v1"}})
	for _, seed := range []string{
		"https://example.com/v1", "https://example.com:443/v1/a?b#c", "https://EXAMPLE.com/v1/%2e%2e/x",
		"https://example.com/v1/..;/x", `https://example.com/v1\..\x`, "https://example.com/v1/%252e./",
		"https://example.com@evil.test/v1", "https://example.com/%76%31/a", "https://example.com:0443/v1//a",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		u, err := url.Parse(raw)
		if err != nil || h.allow.check(u) != nil {
			return
		}
		req, err := http.NewRequest("GET", u.String(), nil)
		if err != nil {
			t.Fatalf("%q is allowed and cannot be sent: %v", raw, err)
		}
		if port := strings.TrimLeft(req.URL.Port(), "0"); req.URL.Scheme != "https" ||
			!strings.EqualFold(req.URL.Hostname(), "example.com") || port != "" && port != "443" || req.URL.User != nil {
			t.Fatalf("%q leads to %s", raw, req.URL)
		}
		sent, _, _ := strings.Cut(req.URL.RequestURI(), "?")
		for {
			clean := path.Clean(strings.ReplaceAll(sent, `\`, "/"))
			if sent[0] != '/' || clean != "/v1" && !strings.HasPrefix(clean, "/v1/") && unescaped(clean) == clean {
				t.Fatalf("%q leads to %s", raw, clean)
			}
			if unescaped(sent) == sent {
				return
			}
			sent = unescaped(sent)
		}
	})
}

func unescaped(s string) string {
	if decoded, err := url.PathUnescape(s); err == nil {
		return decoded
	}
	return s
}

// What a receiver, a payload, the configuration or the environment got wrong is not repeated where it
// may hold a secret.
func TestErrorsKeepSecrets(t *testing.T) {
	server := serveHTTP(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Location", "http://u:s3cret@host:port/?s3cret")
		w.WriteHeader(http.StatusFound)
	})
	h := newKind(t, Config{Allow: []string{server.URL, "http://127.0.0.1:1"}})
	for _, url := range []string{server.URL + "/?s3cret", "http://u:s3cret@host:port/", "http://u:s3cret/x@host/", "http://127.0.0.1:1/?s3cret"} {
		_, err := run(t.Context(), h, httpAttempt(t, map[string]string{"url": url}))
		if err == nil || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%s: got error %v", url, err)
		}
	}
	h.client.Transport.(*http.Transport).Proxy = quiet.Proxy(func(*http.Request) (*url.URL, error) { return nil, errors.New("s3cret") })
	_, err := run(t.Context(), h, httpAttempt(t, map[string]string{"url": server.URL}))
	if err == nil || strings.Contains(err.Error(), "s3cret") || !strings.Contains(err.Error(), "HTTP_PROXY") {
		t.Errorf("the proxy: got error %v", err)
	}
	for _, entry := range []string{"https://host/x?token=s3cret", "https://host/x#s3cret", "https://host/x?#s3cret", "https://host/x#?s3cret", "host?s3cret", "https://ho st/?s3cret", "https://host/?s3cret%zz", "https://u:s3cret@host/x"} {
		if _, err := New(Config{Allow: []string{entry}}); err == nil || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("allow %s: got error %v", entry, err)
		}
	}
}

// FuzzPayload checks that what is accepted is an object with a URL.
func FuzzPayload(f *testing.F) {
	k := newKind(f, Config{Allow: []string{"https://example.com/v1"}})
	for _, seed := range []string{
		`{"url": "https://example.com/v1/x", "method": "PUT", "headers": {"A": "b"}, "body": {"a": 1}}`, `null`, `[]`, `"x"`, `{`, "",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		var object map[string]json.RawMessage
		if _, err := k.Prepare(payload); err == nil && (json.Unmarshal(payload, &object) != nil || len(object["url"]) == 0) {
			t.Errorf("%q is accepted", payload)
		}
	})
}
