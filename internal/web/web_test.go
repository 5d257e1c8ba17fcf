package web_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"onejob/internal/snapshot"
	"onejob/internal/testenv"
	"onejob/internal/web"
	"onejob/store"
	"onejob/tasks"
)

// hostile is what somebody may write into any column: it would run a script, or end the event
// that carries it.
const hostile = `"'><script>alert(1)</script><img src=x onerror=alert(2)>` + "\r\n\rdata: forged\u202e"

// cluster is what a page shows.
type cluster struct {
	text    string // in each column
	running int64
	err     error
	story   error
	at      time.Time // of what happens in rows; zero: now
	payload string    // of the task; empty: an object with the text
}

// when is the time of what happens in rows.
func (c *cluster) when() store.Time {
	if c.at.IsZero() {
		return store.Time{At: time.Now()}
	}
	return store.Time{At: c.at}
}

func (c *cluster) Overview(context.Context) (store.Overview, error) {
	now := c.when()
	o := store.Overview{Now: time.Now()}
	o.Replicas.Rows = []store.ReplicaGlance{{Name: c.text, Host: c.text, Version: c.text, Queues: []string{c.text}, Kinds: []string{c.text}, State: tasks.ReplicaWorking}}
	o.Waiting.Rows = []store.Waiting{{Queue: c.text, Kind: "unknown" + c.text, Limit: c.text, Due: 3}}
	o.Rates.Rows = []store.Rate{{Queue: c.text, Enqueued: 4, Ended: 10000, EndedMore: true}}
	c.running++
	o.Running.Rows = []store.Running{{ID: 9007199254740993, All: c.running, Kind: c.text, Payload: &c.text, LockKey: &c.text, Replica: c.text, StartedAt: now, Progress: c.progress()}}
	o.Schedules.Rows = []store.ScheduleGlance{{Name: c.text, Cron: c.text, TimeZone: c.text, Kind: c.text, Enabled: true, NextAt: &now, LastAt: &now, DueAt: []time.Time{now.At}, TaskIDs: []int64{5}, Became: []string{"succeeded"}},
		{Name: c.text, Cron: c.text, Error: c.text}}
	o.Failures.Rows = []store.Failure{{Kind: c.text, Error: c.text, Count: 3, First: now, Last: now, Sample: 17}}
	o.Overlaps.Rows = []tasks.Overlap{{LockKey: c.text, Replica: c.text, OtherReplica: c.text}}
	o.Held.Err = errors.New(c.text)
	o.Nameless.Rows = []store.Nameless{{Kind: c.text, Field: "command", Name: c.text, Sample: 5}}
	return o, c.err
}

func (c *cluster) progress() *store.TaskProgress {
	percent := 40.5
	return &store.TaskProgress{Percent: &percent, Text: c.text, SaidAt: c.when().At}
}

func (c *cluster) Story(_ context.Context, id int64) (store.Story, error) {
	if c.story != nil {
		return store.Story{}, c.story
	}
	now, code, fence := c.when(), 3, int64(9007199254740995)
	s := store.Story{Now: time.Now(), Payload: store.Text{Text: fmt.Sprintf(`{"command": %q}`, c.text)}, Result: store.Text{Text: c.text}, Why: c.text + " is why"}
	if c.payload != "" {
		s.Payload.Text = c.payload
	}
	s.Row = store.Row{ID: id, Kind: c.text, Status: "failed", Queue: c.text, LockKey: &c.text, LimitName: &c.text, UniqueKey: &c.text, Replica: &c.text, Error: &c.text, Fence: &fence, CreatedAt: now, RunAt: now, FinishedAt: &now, Progress: c.progress()}
	s.Attempts = []store.StoryAttempt{{Fence: fence, Attempt: 1, Replica: c.text, StartedAt: now, FinishedAt: now, Outcome: "failed", Error: c.text, Output: c.text, OutputLength: 5, ExitCode: &code}}
	s.Before = []store.Neighbour{{TaskID: 3, Replica: c.text, StartedAt: &now, FinishedAt: &now, Outcome: "succeeded"}}
	s.Holder = &store.Neighbour{TaskID: 4, Replica: c.text, StartedAt: &now}
	return s, nil
}

func (c *cluster) Find(_ context.Context, text string) ([]store.Found, error) {
	if text == "17" {
		return []store.Found{{By: "id", ID: 17}}, nil
	}
	return []store.Found{{By: "lock_key", ID: 17, Kind: c.text, Queue: c.text, LockKey: &c.text, Status: "pending"}}, nil
}

// serve serves a page, and returns its address.
func serve(t *testing.T, c *cluster, change func(*web.Config)) string {
	t.Helper()
	cfg := web.Config{Snapshots: snapshot.New(snapshot.Config{Store: c}), Tasks: c, Loopback: true, Replica: c.text, Version: c.text}
	if change != nil {
		change(&cfg)
	}
	page, err := web.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(page)
	server.Config.WriteTimeout = time.Second // events live longer
	server.Start()
	t.Cleanup(server.Close)
	return server.URL
}

// get returns an answer; the options change the request.
func get(t *testing.T, url string, options ...func(*http.Request)) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range options {
		o(req)
	}
	client := http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(body)
}

// Whatever a row holds, it is text on the page.
func TestNothingInARowIsMarkup(t *testing.T) {
	t.Parallel()
	c := &cluster{text: hostile}
	url := serve(t, c, nil)
	for path, least := range map[string]int{"/": 15, "/tasks/9007199254740993": 15, "/find?q=" + strings.Repeat("x", 5): 4} {
		resp, body := get(t, url+path)
		if resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %d\n%s", path, resp.StatusCode, body)
		}
		for _, markup := range []string{"<script>alert", "<img", "\u202e", "\r", "'><"} {
			if strings.Contains(body, markup) {
				t.Errorf("%s has %q in it:\n%s", path, markup, body)
			}
		}
		if n := strings.Count(body, "&lt;script&gt;alert(1)"); n < least {
			t.Errorf("%s shows the text %d times, want at least %d", path, n, least)
		}
		if policy := resp.Header.Get("Content-Security-Policy"); !strings.HasPrefix(policy, "default-src 'none'; ") || strings.Contains(policy, "unsafe") || strings.Contains(policy, "http") {
			t.Errorf("%s: the policy is %q", path, policy)
		}
	}
	if _, body := get(t, url+"/"); !strings.Contains(body, `href="tasks/9007199254740993"`) {
		t.Error("a long ID is not as it was")
	}
}

// Each event is one snapshot, whatever the rows hold, and they go on after the server's own
// limit for an answer.
func TestEventsAreSnapshots(t *testing.T) {
	t.Parallel()
	url := serve(t, &cluster{text: hostile}, nil)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+"/events", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if kind := resp.Header.Get("Content-Type"); kind != "text/event-stream" {
		t.Fatalf("the answer is %s", kind)
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	events, data := 0, ""
	for events < 3 && lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), ": ")
		switch {
		case name == "data":
			data += value + "\n"
		case name == "event" && value == "snapshot", name == "retry":
		case lines.Text() == "" && data == "": // after retry
		case lines.Text() == "":
			events++
			want := fmt.Sprintf(`<span class="count">%d</span>`, events)
			if !strings.Contains(data, want) || !strings.Contains(data, `<section id="replicas">`) || strings.Contains(data, "<script>") {
				t.Errorf("event %d has no %s, or is not whole:\n%s", events, want, data)
			}
			data = ""
		default:
			t.Fatalf("a line of another kind: %q", lines.Text())
		}
	}
	if events < 3 {
		t.Errorf("%d events, then %v", events, lines.Err())
	}
}

// A row may have any time that Postgres has. The distance of some of them from now is more than
// a time.Duration holds.
func TestTimesOfFarYears(t *testing.T) {
	t.Parallel()
	for year, ago := range map[int]string{1: "106751 d ago", 9999: "in 106751 d", 200_000: "in 106751 d"} {
		url := serve(t, &cluster{text: "x", at: time.Date(year, 6, 1, 0, 0, 0, 0, time.UTC)}, nil)
		for _, path := range []string{"/", "/tasks/5"} {
			if resp, body := get(t, url+path); resp.StatusCode != http.StatusOK || !strings.Contains(body, ago) {
				t.Errorf("year %d: %s: %d, and no %q:\n%s", year, path, resp.StatusCode, ago, body)
			}
		}
		if event := firstEvent(t, url); !strings.Contains(event, ago) {
			t.Errorf("year %d: no %q in the first event:\n%s", year, ago, event)
		}
	}
}

// firstEvent returns the first snapshot that is sent to somebody who follows the page.
func firstEvent(t *testing.T, url string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+"/events", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var text strings.Builder
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if lines.Text() == "" && text.Len() > 0 && !strings.HasPrefix(text.String(), "retry") {
			return text.String()
		} else if lines.Text() == "" {
			text.Reset()
			continue
		}
		text.WriteString(lines.Text() + "\n")
	}
	t.Fatal("the answer ended before the first event")
	return ""
}

// A page is not hundreds of times as long as the payload that it shows.
func TestADeepPayloadIsShownAsItIs(t *testing.T) {
	t.Parallel()
	c := &cluster{text: "x", payload: strings.Repeat("[", 300) + "1" + strings.Repeat(",1", 21_000) + strings.Repeat("]", 300)}
	if _, body := get(t, serve(t, c, nil)+"/tasks/5"); len(body) > 100_000 || !strings.Contains(body, c.payload) {
		t.Errorf("a payload of %d bytes makes a page of %d", len(c.payload), len(body))
	}
}

// A page of another site can make a visitor's browser ask for anything here, as for an image.
func TestOtherSitesCanOnlyLeadHere(t *testing.T) {
	t.Parallel()
	c := &cluster{text: "x"}
	url := serve(t, c, nil)
	for _, test := range []struct {
		name, site, mode, dest string
		status                 int
	}{
		{"Image", "cross-site", "no-cors", "image", 403},
		{"Fetch", "cross-site", "cors", "empty", 403},
		{"Frame", "cross-site", "navigate", "iframe", 403},
		{"Link", "cross-site", "navigate", "document", 200},
		{"OwnScript", "same-origin", "cors", "empty", 200},
		{"TypedAddress", "none", "navigate", "document", 200},
		{"NoBrowser", "", "", "", 200},
	} {
		t.Run(test.name, func(t *testing.T) {
			for _, path := range []string{"/", "/tasks/5", "/find?q=x", "/style.css"} {
				resp, _ := get(t, url+path, func(r *http.Request) {
					for name, value := range map[string]string{"Sec-Fetch-Site": test.site, "Sec-Fetch-Mode": test.mode, "Sec-Fetch-Dest": test.dest} {
						if value != "" {
							r.Header.Set(name, value)
						}
					}
				})
				if resp.StatusCode != test.status {
					t.Errorf("%s: %d, want %d", path, resp.StatusCode, test.status)
				}
			}
		})
	}
}

func TestWhoMayRead(t *testing.T) {
	t.Parallel()
	const token = "0123456789abcdef"
	bearer := func(token string) func(*http.Request) {
		return func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+token) }
	}
	host := func(name string) func(*http.Request) { return func(r *http.Request) { r.Host = name } }
	for _, test := range []struct {
		name     string
		loopback bool
		token    string
		request  func(*http.Request)
		status   int
		says     string
	}{
		{"LoopbackWithoutToken", true, "", nil, 200, ""},
		{"LoopbackByName", true, "", host("localhost:7677"), 200, ""},
		{"LoopbackIPv6", true, "", host("[::1]:7677"), 200, ""},
		{"AllowedHost", true, "", host("OneJob.example.com:80"), 200, ""},
		{"ForeignHost", true, "", host("evil.example.com"), 403, "http.hosts"},
		{"ForeignHostThatBeginsLikeOurs", true, "", host("localhost.evil.example.com"), 403, "http.hosts"},
		{"ForeignHostWithToken", false, token, func(r *http.Request) { bearer(token)(r); host("evil.example.com")(r) }, 403, "http.hosts"},
		{"OpenAddressWithoutToken", false, "", nil, 403, "http.read_token"},
		{"OpenAddressAndNoTokenGiven", false, token, nil, 401, "Authorization: Bearer"},
		{"LoopbackAndNoTokenGiven", true, token, nil, 401, "Authorization: Bearer"},
		{"WrongToken", false, token, bearer("0123456789abcdeF"), 401, "Authorization: Bearer"},
		{"NoTokenAtAll", false, token, bearer(""), 401, "Authorization: Bearer"},
		{"Token", false, token, bearer(token), 200, ""},
		{"TokenAsPassword", false, token, func(r *http.Request) { r.SetBasicAuth("anybody", token) }, 200, ""},
		{"TokenAsUser", false, token, func(r *http.Request) { r.SetBasicAuth(token, "") }, 401, "Authorization: Bearer"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			url := serve(t, &cluster{text: "payload-of-a-row"}, func(cfg *web.Config) {
				cfg.Loopback, cfg.Hosts = test.loopback, []string{"onejob.example.com"}
				if test.token != "" {
					cfg.Token = func() (string, error) { return test.token, nil }
				}
			})
			for _, path := range []string{"/", "/tasks/1", "/find?q=x", "/style.css"} {
				var options []func(*http.Request)
				if test.request != nil {
					options = append(options, test.request)
				}
				resp, body := get(t, url+path, options...)
				if resp.StatusCode != test.status || !strings.Contains(body, test.says) {
					t.Errorf("%s: %d %s", path, resp.StatusCode, body)
				}
				if test.status != 200 && strings.Contains(body, "payload-of-a-row") {
					t.Errorf("%s: refused, and the answer has a payload", path)
				}
				if (resp.Header.Get("WWW-Authenticate") != "") != (test.status == 401) {
					t.Errorf("%s: WWW-Authenticate is %q", path, resp.Header.Get("WWW-Authenticate"))
				}
			}
		})
	}
}

func TestATokenThatCannotBeReadLetsNobodyIn(t *testing.T) {
	t.Parallel()
	url := serve(t, &cluster{text: "x"}, func(cfg *web.Config) {
		cfg.Token = func() (string, error) { return "", errors.New("no such file") }
	})
	if resp, body := get(t, url, func(r *http.Request) { r.SetBasicAuth("a", "") }); resp.StatusCode != http.StatusInternalServerError || strings.Contains(body, "<main") {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
}

func TestHiddenPayloads(t *testing.T) {
	t.Parallel()
	url := serve(t, &cluster{text: "secret"}, func(cfg *web.Config) { cfg.HidePayloads = []string{"secret"} })
	_, body := get(t, url+"/tasks/5")
	if strings.Contains(body, "is why") {
		t.Errorf("the error is in the sentence that says why:\n%s", body)
	}
	for _, section := range []string{"payload", "result", "attempts"} {
		_, part, _ := strings.Cut(body, `<section id="`+section+`">`)
		part, _, ok := strings.Cut(part, "</section>")
		part = strings.ReplaceAll(part, "on secret, took", "") // the replica's name
		if !ok || strings.Contains(part, "secret") || !strings.Contains(part, "hidden by http.hide_payloads") {
			t.Errorf("the %s: %s", section, part)
		}
	}
	if !strings.Contains(body, "40.5 %, hidden by http.hide_payloads") {
		t.Errorf("the text of the progress is shown:\n%s", body)
	}
	if strings.Contains(body, "ended: failed: secret") || strings.Contains(body, `<p class="error">secret`) {
		t.Errorf("an error is there:\n%s", body)
	}
	_, body = get(t, url+"/")
	if strings.Contains(body, "<code>secret</code></td><td data-label=\"Lock key\"") || strings.Count(body, "hidden by http.hide_payloads") != 3 || !strings.Contains(body, "40.5 %, hidden by http.hide_payloads") {
		t.Errorf("the overview:\n%s", body)
	}
	if strings.Contains(body, "has the command") || !strings.Contains(body, "no live replica that serves their queue has their command in its configuration.") {
		t.Errorf("what needs somebody names the command:\n%s", body)
	}
	url = serve(t, &cluster{text: "secret"}, func(cfg *web.Config) { cfg.HidePayloads = []string{"another"} })
	if _, body := get(t, url+"/tasks/5"); strings.Contains(body, "hidden by") || !strings.Contains(body, "secret is why") {
		t.Error("payloads of a kind are hidden that is not named")
	}
	if _, body := get(t, url+"/"); !strings.Contains(body, "no live replica that serves their queue has the command &#34;secret&#34; in its configuration.") {
		t.Errorf("the command of a kind is hidden that is not named:\n%s", body)
	}
}

func TestPages(t *testing.T) {
	t.Parallel()
	c := &cluster{text: "x"}
	url := serve(t, c, nil)
	for path, status := range map[string]int{"/style.css": 200, "/page.js": 200, "/icon.svg": 200, "/nonsense": 404, "/tasks/": 404, "/tasks/abc": 404, "/tasks/-1": 404, "/find?q=17": 303, "/find": 303, "/find?q=%00": 400} {
		if resp, body := get(t, url+path); resp.StatusCode != status {
			t.Errorf("%s: %d\n%s", path, resp.StatusCode, body)
		}
	}
	if resp, _ := get(t, url+"/find?q=17"); resp.Header.Get("Location") != "tasks/17" { // relative, for a proxy with a prefix
		t.Errorf("an ID leads to %s", resp.Header.Get("Location"))
	}
	resp, err := http.Post(url+"/tasks/5", "text/plain", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusForbidden {
		t.Errorf("a POST: %d", resp.StatusCode)
	}
	c.story = fmt.Errorf("task 5: %w", store.ErrNoTask)
	if resp, body := get(t, url+"/tasks/5"); resp.StatusCode != 404 || !strings.Contains(body, "There is no task 5") {
		t.Errorf("of no task: %d %s", resp.StatusCode, body)
	}
	c.story = errors.New("no answer")
	if resp, body := get(t, url+"/tasks/5"); resp.StatusCode != 503 || !strings.Contains(body, "no answer") {
		t.Errorf("of a slow Postgres: %d %s", resp.StatusCode, body)
	}
	url = serve(t, &cluster{text: "x", err: errors.New("no route to host")}, nil)
	if resp, body := get(t, url); resp.StatusCode != 200 || !strings.Contains(body, "Postgres does not answer") || !strings.Contains(body, "no route to host") {
		t.Errorf("without Postgres: %d %s", resp.StatusCode, body)
	}
}

// A carriage return ends a line of an event, too. It stays data.
func TestAnEventIsOneEvent(t *testing.T) {
	t.Parallel()
	if got, want := string(web.Event("snapshot", []byte("a\r\rdata: b\n\nc"))), "event: snapshot\ndata: a&#13;&#13;data: b\ndata: \ndata: c\n\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// Viewers who do not read keep their pages in memory, beside the work of the replica.
func TestViewersWhoDoNotRead(t *testing.T) {
	t.Parallel()
	c := &cluster{text: strings.Repeat("<", 200_000)}
	page, err := web.New(web.Config{Snapshots: snapshot.New(snapshot.Config{Store: c}), Tasks: c, Loopback: true})
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(page)
	t.Cleanup(server.Close) // after its connections
	url := server.URL
	size := func() int {
		resp, body := get(t, url+"/tasks/17")
		if resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %.200s", resp.Status, body)
		}
		return len(body)
	}()
	var busy *http.Response
	var conns []net.Conn
	for range 64<<20/size + 20 { // what is in the buffers of sockets counts no more
		conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		conns = append(conns, conn)
		fmt.Fprintf(conn, "GET /tasks/17 HTTP/1.1\r\nHost: localhost\r\n\r\n")
		resp, err := http.ReadResponse(bufio.NewReaderSize(conn, 16), nil) // the head, and no more
		if err != nil {
			t.Fatal(err)
		}
		if resp.StatusCode != http.StatusOK {
			busy = resp
			break
		}
	}
	if busy == nil || busy.StatusCode != http.StatusServiceUnavailable {
		t.Fatalf("with pages of %d bytes that nobody reads, the last answer was %v", size, busy)
	}
	for _, conn := range conns {
		_ = conn.Close()
	}
	testenv.Eventually(t, time.Minute, "others see pages when those who do not read are gone", func() bool {
		resp, _ := get(t, url+"/tasks/17")
		return resp.StatusCode == http.StatusOK
	})
}
