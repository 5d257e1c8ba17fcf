// Package web is the page that a replica serves: what goes on in the cluster, and the story
// of each task. With Config.ActTokens people can act on it, too: see act.go.
//
// The page is HTML that the server renders, so that it works without JavaScript; a small
// script replaces its content every two seconds. Everything is embedded, and the page asks
// no other server for anything (see the Content-Security-Policy).
//
// Who may read it:
//
//   - everybody, if it is served on a loopback address and there is no token;
//   - otherwise those who have the token, or one with which they may act;
//   - nobody by a host name that is neither an IP address, nor localhost, nor in Config.Hosts:
//     such a request is refused, because a website could make its own name lead here (DNS
//     rebinding) and read the page in a visitor's browser.
package web

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"html/template"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"onejob/internal/snapshot"
	"onejob/lock"
	"onejob/store"
)

// Config says what a page shows, and to whom.
type Config struct {
	// Snapshots is where snapshots come from.
	Snapshots *snapshot.Source

	// Tasks is where tasks come from.
	Tasks interface {
		Story(ctx context.Context, id int64) (store.Story, error)
		Find(ctx context.Context, text string) ([]store.Found, error)
	}

	// Loopback says that the page is served on an address that only this machine reaches.
	Loopback bool

	// Token returns the token that readers need. Nil: there is none, and the page is shown
	// on a loopback address only.
	Token func() (string, error)

	// Hosts are host names under which the page may be asked for, besides IP addresses and
	// localhost.
	Hosts []string

	// ActTokens returns who may act, and with which tokens. Nil: nobody may, the page has no
	// buttons, and refuses every POST.
	ActTokens func() ([]ActToken, error)

	// Actions does what people ask for on the page. It is needed with ActTokens.
	Actions Actions

	// Limits returns where limits are kept; nil if that is not known yet, or there are none.
	Limits func() lock.Semaphores

	// ActTimeout is how long one action may take; zero: 20 s. It must be shorter than the
	// server takes for an answer.
	ActTimeout time.Duration

	// HidePayloads are kinds of which payloads, results, output, errors and texts of progress are
	// not shown.
	HidePayloads []string

	// Replica is the name of the replica that serves the page, Version that of the program.
	Replica, Version string
}

// maxViewers is how many may follow the page at once. Each costs a goroutine and a connection.
const maxViewers = 100

// A viewer who does not read keeps what a page consists of in memory. maxUnsent is how many bytes of all
// pages may be there at once, and maxRendering how many stories are put together at once.
const (
	maxUnsent    = 64 << 20
	maxRendering = 4
)

// writeTimeout is how long one part of an answer may take. A viewer who does not read is let go.
const writeTimeout = 10 * time.Second

//go:embed page.html style.css page.js icon.svg
var files embed.FS

// page answers the requests.
type page struct {
	cfg      Config
	template *template.Template
	routes   *http.ServeMux
	viewers  atomic.Int64
	actions  atomic.Int64 // under way
	unsent   atomic.Int64 // bytes
	stories  chan struct{}
	origins  *http.CrossOriginProtection

	mu       sync.Mutex
	rendered rendered
}

// rendered is the event with the content of the page for a snapshot. All who follow the page share it.
type rendered struct {
	of    *snapshot.Snapshot
	event []byte
}

// New returns what answers requests for the page.
func New(cfg Config) (http.Handler, error) {
	if cfg.ActTokens != nil && (cfg.Actions == nil || cfg.Limits == nil) {
		return nil, errors.New("the page has tokens to act with, but nothing that acts")
	}
	cfg.ActTimeout = cmp.Or(cfg.ActTimeout, defaultActTimeout)
	p := &page{cfg: cfg, routes: http.NewServeMux(), stories: make(chan struct{}, maxRendering), origins: http.NewCrossOriginProtection()}
	var err error
	if p.template, err = template.New("page").Funcs(p.functions()).ParseFS(files, "page.html"); err != nil {
		return nil, err
	}
	p.routes.HandleFunc("GET /{$}", p.overview)
	p.routes.HandleFunc("GET /events", p.events)
	p.routes.HandleFunc("GET /tasks/{id}", p.story)
	p.routes.HandleFunc("GET /find", p.find)
	if cfg.ActTokens != nil {
		p.actionRoutes()
	}
	for name, kind := range map[string]string{"style.css": "text/css; charset=utf-8", "page.js": "text/javascript; charset=utf-8", "icon.svg": "image/svg+xml"} {
		if err := p.file(name, kind); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// policy lets the page load its own files, and nothing else: no inline script or style runs,
// whatever a row holds.
const policy = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

func (p *page) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Security-Policy", policy)
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Referrer-Policy", "same-origin") // with no-referrer, browsers send "Origin: null" with our own forms
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
	h.Set("Cache-Control", "no-store")
	actor, no := p.admit(r)
	if no != nil {
		if no.realm != "" {
			h.Set("WWW-Authenticate", fmt.Sprintf(`Basic realm="onejob: %s", charset="UTF-8"`, no.realm))
		}
		http.Error(w, no.text, no.status)
		return
	}
	if actor != "" {
		r = r.WithContext(store.WithActor(r.Context(), actor+" on the page"))
	}
	p.routes.ServeHTTP(w, r)
}

// refusal is the answer to a request that is refused.
type refusal struct {
	status int
	text   string
	realm  string // of a 401
}

// admit returns why a request is refused, or nil; and who sends it, if it is a POST.
func (p *page) admit(r *http.Request) (actor string, no *refusal) {
	acts := r.Method == http.MethodPost
	if acts && p.cfg.ActTokens == nil {
		return "", &refusal{status: http.StatusForbidden, text: "This page only reads. To let people act on it, set http.act_tokens_file."}
	}
	if p.cfg.Token == nil && p.cfg.ActTokens == nil && !p.cfg.Loopback {
		return "", &refusal{status: http.StatusForbidden, text: "This page shows payloads and output of tasks, and this address can be reached from other machines. " +
			"Set http.read_token or http.read_token_file, or let http.listen be a loopback address. /healthz and /readyz are open."}
	}
	if host := hostOf(r.Host); !p.known(host) {
		return "", &refusal{status: http.StatusForbidden, text: fmt.Sprintf("The host name %q is not allowed. Add it to http.hosts, or use the IP address.", host)}
	}
	if acts {
		return p.admitAction(r)
	}
	if embedded(r) {
		return "", &refusal{status: http.StatusForbidden, text: "Another website asks for this in a visitor's browser. It can lead here, and not do more."}
	}
	return "", p.admitReader(r)
}

// embedded reports whether a browser says that a page of another site asks for this without
// leading its visitor here. Such a page cannot read the answer, but could make Postgres work for it.
func embedded(r *http.Request) bool {
	return r.Header.Get("Sec-Fetch-Site") == "cross-site" &&
		(r.Header.Get("Sec-Fetch-Mode") != "navigate" || r.Header.Get("Sec-Fetch-Dest") != "document")
}

// admitReader returns why somebody may not read, or nil.
func (p *page) admitReader(r *http.Request) *refusal {
	if p.cfg.Token == nil && p.cfg.Loopback {
		return nil
	}
	var broken *refusal // it shuts out nobody who has another token
	if p.cfg.Token != nil {
		switch token, err := p.cfg.Token(); {
		case err != nil:
			broken = &refusal{status: http.StatusInternalServerError, text: "The token cannot be read: " + err.Error()}
		case holds(r, token):
			return nil
		}
	}
	if p.cfg.ActTokens != nil {
		switch actor, err := p.actor(r); {
		case err != nil:
			broken = &refusal{status: http.StatusInternalServerError, text: "The tokens cannot be read: " + err.Error()}
		case actor != "":
			return nil
		}
	}
	if broken != nil {
		return broken
	}
	return &refusal{http.StatusUnauthorized, "A token is needed: Authorization: Bearer TOKEN, or any user with the token as the password.", "any user, the password is http.read_token"}
}

// holds reports whether a request has the token. The comparison takes the same time whatever
// differs.
func holds(r *http.Request, token string) bool {
	given, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !ok {
		_, given, ok = r.BasicAuth()
	}
	a, b := sha256.Sum256([]byte(given)), sha256.Sum256([]byte(token))
	return subtle.ConstantTimeCompare(a[:], b[:]) == 1 && ok && token != ""
}

// hostOf returns the host of a Host header without its port.
func hostOf(header string) string {
	if host, _, err := net.SplitHostPort(header); err == nil {
		return host
	}
	return strings.TrimSuffix(strings.TrimPrefix(header, "["), "]")
}

func (p *page) known(host string) bool {
	if _, err := netip.ParseAddr(host); err == nil {
		return true
	}
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	if host == "localhost" || strings.HasSuffix(host, ".localhost") {
		return true
	}
	return slices.ContainsFunc(p.cfg.Hosts, func(allowed string) bool { return strings.EqualFold(allowed, host) })
}

// file serves an embedded file.
func (p *page) file(name, kind string) error {
	content, err := files.ReadFile(name)
	if err != nil {
		return err
	}
	sum := sha256.Sum256(content)
	tag := `"` + hex.EncodeToString(sum[:8]) + `"`
	p.routes.HandleFunc("GET /"+name, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", kind)
		w.Header().Set("Cache-Control", "no-cache") // ask whether it has changed
		w.Header().Set("ETag", tag)
		http.ServeContent(w, r, name, time.Time{}, bytes.NewReader(content))
	})
	return nil
}

// layout is what every view has around its content.
type layout struct {
	Title   string
	Root    string // leads from the view to the page
	Live    bool
	Query   string
	Replica string
	Version string
	Content any
}

// show renders a view, and sends it.
func (p *page) show(w http.ResponseWriter, status int, view string, l layout) {
	b, err := p.render(view, l)
	p.send(w, status, b, err)
}

func (p *page) render(view string, l layout) (*bytes.Buffer, error) {
	l.Replica, l.Version = p.cfg.Replica, p.cfg.Version
	b := new(bytes.Buffer)
	return b, p.template.ExecuteTemplate(b, view, l)
}

// send answers with what was rendered.
func (p *page) send(w http.ResponseWriter, status int, b *bytes.Buffer, err error) {
	if err != nil {
		http.Error(w, "The page cannot be rendered: "+err.Error(), http.StatusInternalServerError)
		return
	}
	size := int64(b.Len())
	defer p.unsent.Add(-size)
	if p.unsent.Add(size) > maxUnsent {
		http.Error(w, "This replica is busy with pages that others do not read. Try again, or ask another replica.", http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(status)
	_, _ = b.WriteTo(w)
}

func (p *page) overview(w http.ResponseWriter, r *http.Request) {
	snap, err := p.cfg.Snapshots.Get(r.Context())
	if err != nil {
		return // the viewer is gone
	}
	p.show(w, http.StatusOK, "overview", layout{Title: snap.Verdict, Live: true, Content: snap})
}

// content returns the event with the content of the page for a snapshot.
func (p *page) content(snap *snapshot.Snapshot) ([]byte, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.rendered.of == snap {
		return p.rendered.event, nil
	}
	var b bytes.Buffer
	if err := p.template.ExecuteTemplate(&b, "content", snap); err != nil {
		return nil, err
	}
	p.rendered = rendered{snap, event("snapshot", b.Bytes())}
	return p.rendered.event, nil
}

// events sends the content of the page for each snapshot, until the viewer is gone.
func (p *page) events(w http.ResponseWriter, r *http.Request) {
	defer p.viewers.Add(-1)
	if p.viewers.Add(1) > maxViewers {
		http.Error(w, fmt.Sprintf("More than %d follow the page already.", maxViewers), http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no") // nginx would keep events back
	conn := http.NewResponseController(w)
	var seen *snapshot.Snapshot
	for message := []byte("retry: 2000\n\n"); ; {
		// The server's own limit is for a whole answer, which this is not.
		if err := conn.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil && !errors.Is(err, http.ErrNotSupported) {
			return
		}
		if _, err := w.Write(message); err != nil {
			return
		}
		if err := conn.Flush(); err != nil {
			return
		}
		snap, err := p.cfg.Snapshots.After(r.Context(), seen)
		if err != nil {
			return
		}
		content, err := p.content(snap)
		if err != nil {
			return
		}
		if p.admitReader(r) != nil { // the token was taken away meanwhile
			return
		}
		seen, message = snap, content
	}
}

// event returns a server-sent event. A line of its data ends at a line feed or a carriage
// return; the latter is written so that it stays data.
func event(name string, html []byte) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "event: %s\n", name)
	for line := range bytes.Lines(bytes.ReplaceAll(html, []byte("\r"), []byte("&#13;"))) {
		b.WriteString("data: ")
		b.Write(bytes.TrimSuffix(line, []byte("\n")))
		b.WriteByte('\n')
	}
	b.WriteByte('\n')
	return b.Bytes()
}

func (p *page) story(w http.ResponseWriter, r *http.Request) {
	id, err := strconv.ParseInt(r.PathValue("id"), 10, 64)
	if err != nil || id < 1 {
		p.fail(w, http.StatusNotFound, "../", fmt.Sprintf("%q is not the ID of a task.", r.PathValue("id")))
		return
	}
	b, err := p.renderStory(r.Context(), id)
	switch {
	case errors.Is(err, store.ErrNoTask):
		p.fail(w, http.StatusNotFound, "../", fmt.Sprintf("There is no task %d. Finished tasks are deleted after a time (retention).", id))
		return
	case err != nil:
		p.fail(w, http.StatusServiceUnavailable, "../", fmt.Sprintf("Task %d cannot be shown now: %v", id, err))
		return
	}
	p.send(w, http.StatusOK, b, nil)
}

// renderStory waits while others are at it.
func (p *page) renderStory(ctx context.Context, id int64) (*bytes.Buffer, error) {
	select {
	case p.stories <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	defer func() { <-p.stories }()
	s, err := p.cfg.Tasks.Story(ctx, id)
	if err != nil {
		return nil, err
	}
	return p.render("story", layout{Title: fmt.Sprintf("Task %d, %s", id, s.Status), Root: "../", Content: p.storyOf(s)})
}

// findings is what was found.
type findings struct {
	Text  string
	Found []store.Found
	Error string
}

func (p *page) find(w http.ResponseWriter, r *http.Request) {
	text := strings.TrimSpace(r.URL.Query().Get("q"))
	if text == "" {
		seeOther(w, "./")
		return
	}
	if len(text) > 512 || strings.ContainsRune(text, 0) {
		p.fail(w, http.StatusBadRequest, "", "An ID, a lock key, a unique key or a kind has at most 512 bytes, and no zero byte.")
		return
	}
	found, err := p.cfg.Tasks.Find(r.Context(), strings.ToValidUTF8(text, "\ufffd"))
	if err == nil && len(found) == 1 && found[0].By == "id" {
		seeOther(w, fmt.Sprintf("tasks/%d", found[0].ID))
		return
	}
	f := findings{Text: text, Found: found}
	if err != nil {
		f.Error = err.Error()
	}
	p.show(w, http.StatusOK, "find", layout{Title: "Find " + text, Query: text, Content: f})
}

// seeOther leads on to a relative address. http.Redirect would make it an absolute one, which
// is another one before a proxy that serves the page under a prefix.
func seeOther(w http.ResponseWriter, address string) {
	w.Header().Set("Location", address)
	w.WriteHeader(http.StatusSeeOther)
}

// fail shows a sentence in place of a view.
func (p *page) fail(w http.ResponseWriter, status int, root, text string) {
	p.show(w, status, "sentence", layout{Title: http.StatusText(status), Root: root, Content: text})
}
