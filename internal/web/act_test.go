package web_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"html"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"onejob/internal/snapshot"
	"onejob/internal/web"
	"onejob/lock"
	"onejob/store"
)

const (
	readToken = "0123456789abcdef"
	actToken  = "fedcba9876543210"
)

// deeds is what was done on a page.
type deeds struct {
	mu   sync.Mutex
	list []string

	no      bool // answers that there is nothing to do it to
	err     error
	matches int64 // of a filter
	slow    func(ctx context.Context) (store.BulkResult, error)
}

func (d *deeds) note(format string, args ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.list = append(d.list, fmt.Sprintf(format, args...))
}

// all returns what was done, and forgets it.
func (d *deeds) all() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	defer func() { d.list = nil }()
	return d.list
}

func (d *deeds) Cancel(ctx context.Context, id int64) (bool, error) {
	d.note("cancel %d", id)
	return !d.no, d.err
}

func (d *deeds) Retry(ctx context.Context, id int64) (bool, error) {
	d.note("retry %d", id)
	return !d.no, d.err
}

func (d *deeds) Bulk(ctx context.Context, b store.Bulk, _ func(store.BulkResult)) (store.BulkResult, error) {
	f := b.Filter
	if f.IDs != nil {
		until := "any time"
		if f.Until != nil {
			until = f.Until.UTC().Format(time.RFC3339Nano)
		}
		d.note("bulk %s count=%v %s %v ..%s", b.Action, b.Count, f.Status, f.IDs, until)
		return store.BulkResult{Matched: d.matches, Affected: d.matches}, d.err
	}
	d.note("bulk %s count=%v %s %q %q %s..%s", b.Action, b.Count, f.Status, f.Kind, f.Error, f.Since.UTC().Format(time.RFC3339), f.Until.UTC().Format(time.RFC3339))
	if d.slow != nil {
		return d.slow(ctx)
	}
	r := store.BulkResult{Matched: d.matches}
	if !b.Count {
		r.Affected = max(d.matches-1, 0)
	}
	return r, d.err
}

func (d *deeds) PauseQueue(ctx context.Context, name, reason string, until time.Time, after time.Duration) error {
	d.note("pause %q %q %v %v", name, reason, until.IsZero(), after)
	return d.err
}

func (d *deeds) ResumeQueue(ctx context.Context, name string) (bool, error) {
	d.note("resume %q", name)
	return !d.no, d.err
}

func (d *deeds) RunSchedule(ctx context.Context, name string) (int64, error) {
	d.note("run %q", name)
	if d.no {
		return 0, d.err
	}
	return 42, d.err
}

func (d *deeds) EnableSchedule(ctx context.Context, name string, enabled bool) (bool, error) {
	d.note("enable %q %v", name, enabled)
	return !d.no, d.err
}

func (d *deeds) PauseSchedule(ctx context.Context, name, reason string, until time.Time, after time.Duration) (bool, error) {
	d.note("pause schedule %q %q %v %v", name, reason, until.IsZero(), after)
	return !d.no, d.err
}

func (d *deeds) ResumeSchedule(ctx context.Context, name string) (bool, error) {
	d.note("resume schedule %q", name)
	return !d.no, d.err
}

func (d *deeds) Record(ctx context.Context, action, target string) error {
	d.note("record %s: %s", action, target)
	return d.err
}

// limits are semaphores that can be resized, and looked at.
type limits struct {
	lock.Semaphores
	*deeds
	err error
}

func (l limits) Resize(ctx context.Context, name string, slots int) error {
	l.note("resize %q %d", name, slots)
	return l.err
}

func (l limits) List(context.Context) ([]string, error) { return []string{"calls"}, nil }

func (l limits) Inspect(_ context.Context, name string) (lock.Semaphore, error) {
	return lock.Semaphore{Name: name, Slots: 7}, nil
}

// acting serves a page on which alice may act.
func acting(t *testing.T, c *cluster, d *deeds, change func(*web.Config)) string {
	t.Helper()
	return serve(t, c, func(cfg *web.Config) {
		cfg.ActTokens = func() ([]web.ActToken, error) {
			return []web.ActToken{{Name: "bob", Token: "another-token-of-bob"}, {Name: "alice", Token: actToken}}, nil
		}
		l := limits{deeds: d}
		cfg.Actions, cfg.Limits = d, func() lock.Semaphores { return l }
		cfg.Snapshots = snapshot.New(snapshot.Config{Store: c, Limits: cfg.Limits})
		if change != nil {
			change(cfg)
		}
	})
}

// post sends a form; the options change the request.
func post(t *testing.T, url, form string, options ...func(*http.Request)) (*http.Response, string) {
	t.Helper()
	return get(t, url, append([]func(*http.Request){func(r *http.Request) {
		r.Method = http.MethodPost
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		r.Body, r.ContentLength = io.NopCloser(strings.NewReader(form)), int64(len(form))
	}}, options...)...)
}

func header(name, value string) func(*http.Request) {
	return func(r *http.Request) { r.Header.Set(name, value) }
}

func basic(user, password string) func(*http.Request) {
	return func(r *http.Request) { r.SetBasicAuth(user, password) }
}

var alice = basic("alice", actToken)

// actions are one request of each, and what it does.
var actions = []struct{ path, form, does, says string }{
	{"/tasks/17/cancel", "", "cancel 17", "cancel of task 17 is requested"},
	{"/tasks/17/retry", "", "retry 17", "Task 17 is due now"},
	{"/tasks/17/retry", "status=failed&finished=2026-11-24T10:00:00.123456Z", "bulk retry count=false failed [17] ..2026-11-24T10:00:00.123456Z", "Task 17 is due now"},
	{"/queues/pause?queue=a%2Fb", "reason=why&for=90m", `pause "a/b" "why" true 1h30m0s`, "Queue a/b is paused for 1h30m0s"},
	{"/queues/pause?queue=mail", "reason=&for=", `pause "mail" "" true 0s`, "Queue mail is paused until it is resumed"},
	{"/queues/resume", "queue=mail", `resume "mail"`, "Queue mail is resumed"},
	{"/schedules/run?schedule=nightly", "", `run "nightly"`, "Task 42 of schedule nightly is due now"},
	{"/schedules/pause?schedule=nightly", "reason=why&for=48h", `pause schedule "nightly" "why" true 48h0m0s`, "Schedule nightly is paused for 48h0m0s"},
	{"/schedules/resume?schedule=nightly", "", `resume schedule "nightly"`, "Schedule nightly is resumed"},
	{"/schedules/enable?schedule=nightly", "", `enable "nightly" true`, "Schedule nightly is enabled"},
	{"/schedules/disable?schedule=nightly", "", `enable "nightly" false`, "Schedule nightly is disabled"},
	{"/limits/resize?limit=calls", "slots=3", `resize "calls" 3, record resize limit: limit calls to 3 slots`, "Limit calls has 3 slots"},
	{"/failures/retry?kind=exec", "error=exit+status+%25&until=2026-11-24T10:00:00.5Z", `bulk retry count=true failed "exec" "exit status %" 2026-11-23T10:00:00Z..2026-11-24T10:00:00Z`, "The filter chooses 5 tasks. Retry them?"},
	{"/failures/retry?kind=exec", "error=exit+status+%25&until=2026-11-24T10:00:00.5Z&confirm=yes", `bulk retry count=false failed "exec" "exit status %" 2026-11-23T10:00:00Z..2026-11-24T10:00:00Z`, "4 tasks retried: due now"},
}

func TestActions(t *testing.T) {
	t.Parallel()
	for _, way := range []struct {
		name    string
		request func(*http.Request)
	}{{"Password", alice}, {"Bearer", header("Authorization", "Bearer "+actToken)}} {
		d := &deeds{matches: 5}
		page := acting(t, &cluster{text: "x"}, d, nil)
		for _, a := range actions {
			resp, body := post(t, page+a.path, a.form, way.request)
			if did := strings.Join(d.all(), ", "); resp.StatusCode != 200 || did != a.does || !strings.Contains(body, a.says) {
				t.Errorf("%s %s %s: %d, did %s, want %s\n%s", way.name, a.path, a.form, resp.StatusCode, did, a.does, body)
			}
		}
	}
}

// Who presses a button twice, or on a page that is old, does not run again what has succeeded meanwhile.
func TestATaskIsRetriedAsItWasShown(t *testing.T) {
	t.Parallel()
	d := &deeds{matches: 0}
	resp, body := post(t, acting(t, &cluster{text: "x"}, d, nil)+"/tasks/17/retry", "status=failed&finished=2026-11-24T10:00:00.123456Z", alice)
	if resp.StatusCode != http.StatusConflict || !strings.Contains(body, "Nothing was done") {
		t.Errorf("%d\n%s", resp.StatusCode, body)
	}
	if did := d.all(); len(did) != 1 || !strings.HasPrefix(did[0], "bulk") {
		t.Errorf("it did %q", did)
	}
}

// A token that is taken away ends what its bearer follows.
func TestATokenThatIsTakenAwayFollowsNoMore(t *testing.T) {
	t.Parallel()
	var token atomic.Value
	token.Store(readToken)
	url := serve(t, &cluster{text: "x"}, func(cfg *web.Config) {
		cfg.Loopback, cfg.Token = false, func() (string, error) { return token.Load().(string), nil }
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/events", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+readToken)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() && lines.Text() != "event: snapshot" {
	}
	if lines.Err() != nil {
		t.Fatal(lines.Err())
	}
	token.Store("another-token-of-the-page")
	for lines.Scan() { // ends
	}
	if ctx.Err() != nil {
		t.Error("events go on for a minute")
	}
}

// actors remembers for whom things were done, as the store does.
type actors struct {
	*deeds
	ctx context.Context
}

func (a *actors) Retry(ctx context.Context, id int64) (bool, error) {
	a.ctx = ctx
	return true, nil
}

func TestTheActorIsTheNameOfTheToken(t *testing.T) {
	t.Parallel()
	for _, request := range []func(*http.Request){alice, header("Authorization", "Bearer "+actToken)} {
		a := &actors{deeds: &deeds{}}
		page := acting(t, &cluster{text: "x"}, a.deeds, func(cfg *web.Config) { cfg.Actions = a })
		if resp, body := post(t, page+"/tasks/17/retry", "", request); resp.StatusCode != 200 {
			t.Fatalf("%d %s", resp.StatusCode, body)
		}
		if actor := store.Actor(a.ctx); actor != "alice on the page" {
			t.Errorf("the actor is %q", actor)
		}
	}
}

func TestWhoMayAct(t *testing.T) {
	t.Parallel()
	host := func(name string) func(*http.Request) { return func(r *http.Request) { r.Host = name } }
	type options = []func(*http.Request)
	for _, test := range []struct {
		name    string
		change  func(*web.Config)
		request options
		status  int
		says    string
	}{
		{"NoCredentials", nil, nil, 401, "http.act_tokens_file"},
		{"WrongToken", nil, options{basic("alice", "fedcba9876543211")}, 401, "http.act_tokens_file"},
		{"WrongBearer", nil, options{header("Authorization", "Bearer fedcba9876543211")}, 401, "http.act_tokens_file"},
		{"EmptyToken", nil, options{basic("alice", "")}, 401, "http.act_tokens_file"},
		{"NameOfAnother", nil, options{basic("bob", actToken)}, 401, "http.act_tokens_file"},
		{"ReadToken", nil, options{basic("alice", readToken)}, 401, "http.act_tokens_file"},
		{"ReadTokenAsBearer", nil, options{header("Authorization", "Bearer "+readToken)}, 401, "http.act_tokens_file"},
		{"WithoutTheSetting", func(c *web.Config) { c.ActTokens = nil }, options{alice}, 403, "set http.act_tokens_file"},
		{"WithoutTheSettingAndCredentials", func(c *web.Config) { c.ActTokens = nil }, nil, 403, "set http.act_tokens_file"},
		{"WithoutTheSettingReadToken", func(c *web.Config) { c.ActTokens = nil }, options{basic("any", readToken)}, 403, "set http.act_tokens_file"},
		{"TokensCannotBeRead", func(c *web.Config) {
			c.ActTokens = func() ([]web.ActToken, error) { return nil, errors.New("no such file") }
		}, options{alice}, 500, "no such file"},
		{"NameWithoutAToken", func(c *web.Config) {
			c.ActTokens = func() ([]web.ActToken, error) { return []web.ActToken{{Name: "alice"}}, nil }
		}, options{basic("alice", "")}, 401, "http.act_tokens_file"},
		{"CrossSite", nil, options{alice, header("Sec-Fetch-Site", "cross-site")}, 403, "another website"},
		{"SameSite", nil, options{alice, header("Sec-Fetch-Site", "same-site")}, 403, "another website"},
		{"OriginOfAnother", nil, options{alice, header("Origin", "https://evil.example.com")}, 403, "another website"},
		{"OriginOfAnotherPort", nil, options{alice, header("Origin", "http://127.0.0.1:1")}, 403, "another website"},
		{"NullOrigin", nil, options{alice, header("Origin", "null")}, 403, "another website"},
		{"CrossSiteWithoutCredentials", nil, options{header("Sec-Fetch-Site", "cross-site")}, 403, "another website"},
		{"ForeignHost", nil, options{alice, host("evil.example.com"), header("Origin", "http://evil.example.com")}, 403, "http.hosts"},
		{"JSON", nil, options{alice, header("Content-Type", "application/json")}, 415, "application/x-www-form-urlencoded"},
		{"PlainText", nil, options{alice, header("Content-Type", "text/plain")}, 415, "application/x-www-form-urlencoded"},
		{"Multipart", nil, options{alice, header("Content-Type", "multipart/form-data; boundary=x")}, 415, "application/x-www-form-urlencoded"},
		{"NoContentType", nil, options{alice, header("Content-Type", "")}, 415, "application/x-www-form-urlencoded"},
		{"Oversized", nil, options{alice, func(r *http.Request) {
			body := "reason=" + strings.Repeat("x", 17<<10)
			r.Body, r.ContentLength = io.NopCloser(strings.NewReader(body)), int64(len(body))
		}}, 413, "Nothing was done"},
		{"NoForm", nil, options{alice, func(r *http.Request) {
			r.Body, r.ContentLength = io.NopCloser(strings.NewReader("a=%zz")), 5
		}}, 400, "Nothing was done"},
		{"NotText", nil, options{alice, func(r *http.Request) {
			r.Body, r.ContentLength = io.NopCloser(strings.NewReader("queue=%ff")), 9
		}}, 400, "Nothing was done"},
		{"ZeroByte", nil, options{alice, func(r *http.Request) {
			r.Body, r.ContentLength = io.NopCloser(strings.NewReader("queue=%00")), 9
		}}, 400, "Nothing was done"},
		{"Get", nil, options{alice, func(r *http.Request) { r.Method, r.Body, r.ContentLength = http.MethodGet, nil, 0 }}, 405, ""},
		{"Put", nil, options{alice, func(r *http.Request) { r.Method = http.MethodPut }}, 405, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			d := &deeds{matches: 5}
			page := acting(t, &cluster{text: "x"}, d, func(cfg *web.Config) {
				cfg.Token = func() (string, error) { return readToken, nil }
				if test.change != nil {
					test.change(cfg)
				}
			})
			for _, a := range actions {
				resp, body := post(t, page+a.path, a.form, test.request...)
				if resp.StatusCode != test.status || !strings.Contains(body, test.says) {
					t.Errorf("%s: %d %s", a.path, resp.StatusCode, body)
				}
				if did := d.all(); did != nil {
					t.Errorf("%s did %q", a.path, did)
				}
				if asks := strings.HasPrefix(resp.Header.Get("WWW-Authenticate"), "Basic "); asks != (test.status == 401) {
					t.Errorf("%s: WWW-Authenticate is %q", a.path, resp.Header.Get("WWW-Authenticate"))
				}
			}
		})
	}
	t.Run("SameOrigin", func(t *testing.T) {
		t.Parallel()
		d := &deeds{}
		page := acting(t, &cluster{text: "x"}, d, nil)
		for _, o := range []func(*http.Request){header("Sec-Fetch-Site", "same-origin"), header("Origin", page)} {
			if resp, body := post(t, page+"/tasks/17/retry", "", alice, o); resp.StatusCode != 200 {
				t.Errorf("%d %s", resp.StatusCode, body)
			}
		}
	})
}

// Who may act may read, too.
func TestTheTokenToActReads(t *testing.T) {
	t.Parallel()
	for _, read := range []string{readToken, ""} {
		page := acting(t, &cluster{text: "x"}, &deeds{}, func(cfg *web.Config) {
			cfg.Loopback = false
			if read != "" {
				cfg.Token = func() (string, error) { return read, nil }
			}
		})
		for status, request := range map[int]func(*http.Request){200: alice, 401: basic("alice", "fedcba9876543211")} {
			if resp, body := get(t, page+"/", request); resp.StatusCode != status {
				t.Errorf("read token %q: %d, want %d\n%s", read, resp.StatusCode, status, body)
			}
		}
		if resp, _ := get(t, page+"/"); resp.StatusCode != 401 {
			t.Errorf("read token %q: %d without credentials", read, resp.StatusCode)
		}
	}
}

// A token that cannot be read shuts out nobody who has another one.
func TestABrokenTokenShutsOutNobodyElse(t *testing.T) {
	t.Parallel()
	broken := func() (string, error) { return "", errors.New("no such file") }
	page := acting(t, &cluster{text: "x"}, &deeds{}, func(cfg *web.Config) { cfg.Loopback, cfg.Token = false, broken })
	for status, request := range map[int]func(*http.Request){200: alice, 500: basic("alice", "fedcba9876543211")} {
		if resp, body := get(t, page+"/", request); resp.StatusCode != status {
			t.Errorf("the read token is broken: %d, want %d\n%s", resp.StatusCode, status, body)
		}
	}
	page = acting(t, &cluster{text: "x"}, &deeds{}, func(cfg *web.Config) {
		cfg.Loopback = false
		cfg.Token = func() (string, error) { return readToken, nil }
		cfg.ActTokens = func() ([]web.ActToken, error) { return nil, errors.New("no such file") }
	})
	for status, request := range map[int]func(*http.Request){200: basic("any", readToken), 500: alice} {
		if resp, body := get(t, page+"/", request); resp.StatusCode != status {
			t.Errorf("the act tokens are broken: %d, want %d\n%s", resp.StatusCode, status, body)
		}
	}
}

func TestButtonsAreThereOnlyIfSomebodyMayAct(t *testing.T) {
	t.Parallel()
	page := acting(t, &cluster{text: "x"}, &deeds{}, nil)
	_, overview := get(t, page+"/")
	_, story := get(t, page+"/tasks/17")
	for _, want := range []string{`action="failures/retry?kind=x"`, "Retry all 3", `href="queue?name=x"`, `href="limit?name=calls"`, `action="schedules/run?schedule=x"`, `action="schedules/disable?schedule=x"`, `action="schedules/enable?schedule=x"`, `href="schedule?name=x"`} {
		if !strings.Contains(overview, want) {
			t.Errorf("the overview has no %s:\n%s", want, overview)
		}
	}
	if !strings.Contains(story, `action="17/retry"><input type="hidden" name="status" value="failed"><input type="hidden" name="finished" value="20`) || strings.Contains(story, `action="17/cancel"`) {
		t.Errorf("the story of a failed task:\n%s", story)
	}
	for path, want := range map[string]string{"/queue?name=mail": `action="queues/pause?queue=mail"`, "/schedule?name=nightly": `action="schedules/pause?schedule=nightly"`, "/limit?name=calls": `value="7"`} {
		if resp, body := get(t, page+path); resp.StatusCode != 200 || !strings.Contains(body, want) {
			t.Errorf("%s: %d\n%s", path, resp.StatusCode, body)
		}
	}
	for _, path := range []string{"/queue", "/queue?name=%ff", "/schedule", "/limit", "/limit?name=other"} {
		if resp, _ := get(t, page+path); resp.StatusCode != 404 {
			t.Errorf("%s: %d", path, resp.StatusCode)
		}
	}
	page = serve(t, &cluster{text: "x"}, nil)
	for _, path := range []string{"/", "/tasks/17"} {
		if _, body := get(t, page+path); strings.Contains(body, `method="post"`) || strings.Contains(body, "queue?name=") || strings.Contains(body, "limit?name=") {
			t.Errorf("%s: there is something to press:\n%s", path, body)
		}
	}
	if resp, _ := get(t, page+"/queue?name=mail"); resp.StatusCode != 404 {
		t.Errorf("a form: %d", resp.StatusCode)
	}
}

// Whatever a name holds, it is text in the forms and the answers, and arrives as it is.
func TestHostileTextInActions(t *testing.T) {
	t.Parallel()
	d := &deeds{matches: 5}
	page := acting(t, &cluster{text: hostile}, d, nil)
	markup := func(what, body string) {
		t.Helper()
		for _, markup := range []string{"<script>alert", "<img", "\u202e", "\r", "'><"} {
			if strings.Contains(body, markup) {
				t.Errorf("%s has %q in it:\n%s", what, markup, body)
			}
		}
	}
	_, body := get(t, page+"/")
	markup("the overview", body)
	forms := regexp.MustCompile(`<form class="act" method="post" action="([^"]*)">(.*?)<button`).FindAllStringSubmatch(body, -1)
	if len(forms) < 4 {
		t.Fatalf("%d forms on the overview:\n%s", len(forms), body)
	}
	for _, f := range forms {
		fields := url.Values{}
		for _, field := range regexp.MustCompile(`name="([^"]*)" value="([^"]*)"`).FindAllStringSubmatch(f[2], -1) {
			fields.Set(field[1], html.UnescapeString(field[2]))
		}
		resp, answer := post(t, page+"/"+html.UnescapeString(f[1]), fields.Encode(), alice)
		if resp.StatusCode != 200 {
			t.Errorf("%s: %d %s", f[1], resp.StatusCode, answer)
		}
		markup(f[1], answer)
		if did := strings.Join(d.all(), ", "); !strings.Contains(did, fmt.Sprintf("%q", hostile)) {
			t.Errorf("%s did %s", f[1], did)
		}
	}
	for _, a := range actions {
		u, err := url.Parse(a.path)
		if err != nil {
			t.Fatal(err)
		}
		fields, err := url.ParseQuery(a.form)
		if err != nil {
			t.Fatal(err)
		}
		for field := range u.Query() {
			fields.Set(field, "x")
		}
		for field := range fields {
			bad := url.Values{}
			for k, v := range fields {
				bad[k] = v
			}
			bad.Set(field, hostile)
			_, answer := post(t, page+u.Path, bad.Encode(), alice)
			markup(u.Path+" "+field, answer)
		}
	}
	for _, path := range []string{"/queue?name=" + url.QueryEscape(hostile), "/schedule?name=" + url.QueryEscape(hostile), "/limit?name=" + url.QueryEscape(hostile), "/tasks/" + url.PathEscape(hostile)} {
		_, answer := get(t, page+path)
		markup(path, answer)
	}
}

func TestActionsThatCannotBeDone(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		path, form string
		status     int
		says       string
	}{
		{"/tasks/abc/retry", "", 404, "is not the ID of a task"},
		{"/tasks/-1/cancel", "", 404, "is not the ID of a task"},
		{"/queues/pause", "", 400, "must name something"},
		{"/queues/pause", "queue=" + strings.Repeat("x", 2001), 400, "must name something"},
		{"/queues/pause", "queue=mail&for=soon", 400, "is not one such as 30m"},
		{"/queues/pause", "queue=mail&for=-1h", 400, "is not one such as 30m"},
		{"/queues/pause", "queue=mail&reason=" + strings.Repeat("x", 1001), 400, "more than 1000"},
		{"/queues/resume", "", 400, "must name something"},
		{"/schedules/run", "", 400, "must name something"},
		{"/schedules/enable", "", 400, "must name something"},
		{"/limits/resize", "slots=3", 400, "must name something"},
		{"/limits/resize?limit=calls", "slots=many", 400, "is not a number"},
		{"/limits/resize?limit=calls", "slots=-1", 400, "not between"},
		{"/limits/resize?limit=a%2Fb", "slots=1", 400, "no slashes"},
		{"/failures/retry", "error=x&until=2026-11-24T10:00:00Z", 400, "must name something"},
		{"/failures/retry?kind=exec", "error=x", 400, "is not a time"},
		{"/failures/retry?kind=exec", "error=a%0Ab&until=2026-11-24T10:00:00Z", 400, "cannot be printed"},
		{"/nonsense", "", 404, ""},
	} {
		d := &deeds{}
		page := acting(t, &cluster{text: "x"}, d, nil)
		resp, body := post(t, page+test.path, test.form, alice)
		if did := d.all(); resp.StatusCode != test.status || !strings.Contains(body, test.says) || did != nil {
			t.Errorf("%s %s: %d, did %q\n%s", test.path, test.form, resp.StatusCode, did, body)
		}
	}

	// There is nothing to do it to, or it failed.
	for _, a := range actions {
		if strings.HasPrefix(a.path, "/queues/pause") || strings.HasPrefix(a.path, "/limits") || strings.HasPrefix(a.path, "/failures") {
			continue
		}
		page := acting(t, &cluster{text: "x"}, &deeds{no: true}, nil)
		if resp, body := post(t, page+a.path, a.form, alice); resp.StatusCode != 404 && resp.StatusCode != 409 || !strings.Contains(body, "Nothing was done") {
			t.Errorf("%s: %d\n%s", a.path, resp.StatusCode, body)
		}
	}
	for _, a := range actions {
		page := acting(t, &cluster{text: "x"}, &deeds{err: errors.New("no route to host")}, nil)
		resp, body := post(t, page+a.path, a.form, alice)
		want := 503
		if strings.HasPrefix(a.path, "/limits") {
			want = 200 // it was done, and not recorded
		}
		if strings.HasPrefix(a.path, "/schedules/run") && !strings.Contains(body, "It is not certain") { // the answer to COMMIT may be what is missing
			t.Errorf("%s: %s", a.path, body)
		}
		if resp.StatusCode != want || !strings.Contains(body, "no route to host") {
			t.Errorf("%s: %d\n%s", a.path, resp.StatusCode, body)
		}
	}
	for err, status := range map[error]int{fmt.Errorf("calls: %w", lock.ErrNoSemaphore): 404, fmt.Errorf("calls: %w", lock.ErrForeign): 409, errors.New("no Consul"): 503} {
		d := &deeds{}
		page := acting(t, &cluster{text: "x"}, d, func(cfg *web.Config) {
			cfg.Limits = func() lock.Semaphores { return limits{deeds: d, err: err} }
		})
		resp, body := post(t, page+"/limits/resize?limit=calls", "slots=3", alice)
		// A resize that was cut short may have done a part.
		if resp.StatusCode != status || len(d.all()) != 1 || strings.Contains(body, "Nothing was done") != (status != 503) || strings.Contains(body, "It is not certain") != (status == 503) {
			t.Errorf("%v: %d\n%s", err, resp.StatusCode, body)
		}
	}
	page := acting(t, &cluster{text: "x"}, &deeds{}, func(cfg *web.Config) { cfg.Limits = func() lock.Semaphores { return nil } })
	if resp, body := post(t, page+"/limits/resize?limit=calls", "slots=3", alice); resp.StatusCode != 503 {
		t.Errorf("limits that are not known: %d\n%s", resp.StatusCode, body)
	}
}

// The errors of a hidden kind choose no tasks: counting these would tell what the errors are.
func TestErrorsOfHiddenKindsChooseNothing(t *testing.T) {
	t.Parallel()
	d := &deeds{matches: 5}
	page := acting(t, &cluster{text: "secret"}, d, func(cfg *web.Config) { cfg.HidePayloads = []string{"secret"} })
	_, body := get(t, page+"/")
	if !strings.Contains(body, "Retry all of this kind") || strings.Contains(body, `name="error"`) {
		t.Errorf("the overview:\n%s", body)
	}
	resp, body := post(t, page+"/failures/retry?kind=secret", "error=s%25&until=2026-11-24T10:00:00Z", alice)
	if did := d.all(); resp.StatusCode != 403 || did != nil {
		t.Errorf("by its error: %d, did %q\n%s", resp.StatusCode, did, body)
	}
	resp, body = post(t, page+"/failures/retry?kind=secret", "until=2026-11-24T10:00:00Z", alice)
	if did := d.all(); resp.StatusCode != 200 || len(did) != 1 || !strings.Contains(did[0], `count=true failed "secret" ""`) || !strings.Contains(body, "whatever their error") || !strings.Contains(body, "hidden by http.hide_payloads") {
		t.Errorf("by its kind: %d, did %q\n%s", resp.StatusCode, did, body)
	}
}

// What a request had no time for, the next one does.
func TestRetryingThousandsGoesOn(t *testing.T) {
	t.Parallel()
	d := &deeds{slow: func(ctx context.Context) (store.BulkResult, error) {
		<-ctx.Done()
		return store.BulkResult{Matched: 3000, Affected: 3000, Rest: true}, ctx.Err()
	}}
	page := acting(t, &cluster{text: "x"}, d, func(cfg *web.Config) { cfg.ActTimeout = 50 * time.Millisecond })
	for form, says := range map[string]string{"": "The filter chooses at least 3000 tasks", "&confirm=yes": "3000 tasks retried. There are more"} {
		resp, body := post(t, page+"/failures/retry?kind=exec", "error=x&until=2026-11-24T10:00:00.25Z"+form, alice)
		if resp.StatusCode != 200 || !strings.Contains(body, says) || !strings.Contains(body, `name="until" value="2026-11-24T10:00:00.25Z"`) || !strings.Contains(body, `name="confirm" value="yes"`) {
			t.Errorf("%q: %d\n%s", form, resp.StatusCode, body)
		}
	}
}

func TestRetryNamesTasksThatTookTooLong(t *testing.T) {
	t.Parallel()
	d := &deeds{slow: func(context.Context) (store.BulkResult, error) {
		return store.BulkResult{Matched: 30, Affected: 27, Slow: 2}, nil
	}}
	_, body := post(t, acting(t, &cluster{text: "x"}, d, nil)+"/failures/retry?kind=exec", "error=x&until=2026-11-24T10:00:00Z&confirm=yes", alice)
	for _, says := range []string{"27 tasks retried: due now", "3 tasks not retried: locked", "Of these, 2 tasks took longer than postgres.timeout."} {
		if !strings.Contains(body, says) {
			t.Errorf("it does not say %q:\n%s", says, body)
		}
	}
}

func TestABusyReplicaRefusesActions(t *testing.T) {
	t.Parallel()
	began, release := make(chan struct{}), make(chan struct{})
	d := &deeds{slow: func(context.Context) (store.BulkResult, error) {
		began <- struct{}{}
		<-release
		return store.BulkResult{}, nil
	}}
	page := acting(t, &cluster{text: "x"}, d, nil)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			req := httptest.NewRequest(http.MethodPost, page+"/failures/retry?kind=exec", strings.NewReader("until=2026-11-24T10:00:00Z"))
			req.RequestURI = ""
			req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
			alice(req)
			resp, err := http.DefaultClient.Do(req)
			if err == nil {
				resp.Body.Close()
			}
		})
		<-began
	}
	d.all()
	resp, body := post(t, page+"/tasks/17/retry", "", alice)
	if did := d.all(); resp.StatusCode != 503 || !slices.Equal(did, nil) {
		t.Errorf("%d, did %q\n%s", resp.StatusCode, did, body)
	}
	close(release)
	all.Wait()
	if resp, body := post(t, page+"/tasks/17/retry", "", alice); resp.StatusCode != 200 {
		t.Errorf("afterwards: %d\n%s", resp.StatusCode, body)
	}
}
