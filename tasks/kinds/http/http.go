// Package http is the kind of tasks that send a request. Its usual import name is
// httpkind.
package http

import (
	"bytes"
	"cmp"
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"onejob/internal/payload"
	"onejob/internal/quiet"
	"onejob/tasks"
)

// What zero values of a [Config] stand for.
const (
	DefaultResponseLimit = 64 << 10
	DefaultTimeout       = 5 * time.Minute
)

const (
	maxRedirects    = 5
	maxResponseRead = 16 << 20       // after which the rest of a response is not waited for
	maxRetryAfter   = 24 * time.Hour // beyond which a Retry-After is not believed
	maxErrorBody    = 512            // bytes of a response's body in an error
	maxResultDepth  = 100            // of JSON in a result; Postgres' parser has a stack to mind
)

// Config is what a [Kind] may do.
type Config struct {
	// Allow lists where tasks may send requests, redirects included. An entry
	// is a URL: "https://hooks.example.com/v1" opens that scheme, host and
	// port, /v1 itself and every path below /v1/. An empty list opens nothing.
	Allow []string `yaml:"allow"`

	// ResponseLimit is how many bytes of a response's body are kept as the
	// task's result, at most tasks.MaxKept. Zero means DefaultResponseLimit. Fewer
	// are kept if the JSON of the result would exceed tasks.MaxResult.
	ResponseLimit int `yaml:"response_limit"`

	// Timeout bounds the request of a task that has no timeout of its own,
	// from connecting to the last byte of the response. Zero means
	// DefaultTimeout.
	Timeout time.Duration `yaml:"timeout"`
}

// Kind sends one request for each task. Its payload is
//
//	{"url": "https://…", "method": "POST", "headers": {"X-A": "…"}, "body": {"any": "JSON"}}
//
// Everything but the URL may be left out, and "body_text" may stand in for
// "body" to send text as it is. The method is POST if there is a body, else
// GET.
//
// The request carries the attempt: Onejob-Fence, which only rises for one lock
// key, so that a receiver that remembers the highest can refuse a stale one;
// Onejob-Task-Id; Onejob-Attempt; Idempotency-Key, which stays the same for all
// attempts at one task; and Traceparent, if the attempt belongs to a trace.
//
// A status of 2xx is success. 408, 425, 429, 5xx and a failing network are
// tried again, not before Retry-After asks for. If the host has no files, memory
// or ports left to open a connection, the task is requeued. Every other status fails the
// task at once. Up to 5 redirects are followed, with the methods and bodies
// that browsers would use, and only to where the allow-list leads; to another
// origin the payload's own headers do not go along.
type Kind struct {
	allow         allowList
	responseLimit int
	timeout       time.Duration
	client        *http.Client
}

// New returns a Kind, or an error that names every problem of c.
func New(c Config) (*Kind, error) {
	var problems []error
	k := &Kind{responseLimit: cmp.Or(c.ResponseLimit, DefaultResponseLimit), timeout: cmp.Or(c.Timeout, DefaultTimeout)}
	for i, entry := range c.Allow {
		place, err := parseAllowed(entry)
		if err != nil {
			which := fmt.Sprintf("allow[%d]", i)
			if !strings.Contains(entry, "@") { // else it may hold a password, as a query may
				shown, _, _ := strings.Cut(entry, "?")
				shown, _, _ = strings.Cut(shown, "#")
				which += fmt.Sprintf(" %q", shown)
			}
			problems = append(problems, fmt.Errorf("%s: %w", which, err))
		}
		k.allow = append(k.allow, place)
	}
	if c.ResponseLimit < 0 {
		problems = append(problems, fmt.Errorf("response_limit %d: must not be negative", c.ResponseLimit))
	}
	if c.ResponseLimit > tasks.MaxKept {
		problems = append(problems, fmt.Errorf("response_limit %d: must be at most %d (16 MiB)", c.ResponseLimit, tasks.MaxKept))
	}
	if c.Timeout < 0 {
		problems = append(problems, fmt.Errorf("timeout %s: must not be negative", c.Timeout))
	}
	if len(problems) > 0 {
		return nil, errors.Join(problems...)
	}
	// They are read once in the life of the process. If that were by a request, and it found no file
	// descriptor left, no later one could verify anybody.
	if slices.ContainsFunc(c.Allow, func(entry string) bool { return strings.HasPrefix(strings.ToLower(entry), "https:") }) {
		if _, err := x509.SystemCertPool(); err != nil {
			return nil, fmt.Errorf("read the system's certificate authorities, for https: %w", err)
		}
	}
	dialer := net.Dialer{Timeout: 10 * time.Second}
	// With HTTP/2 all requests to an origin would share a connection, and a dead one, behind a load
	// balancer for example, would stay in use. With HTTP/1 a request that times out takes its connection
	// along. Pings would also end the requests of a receiver that answers none while it works.
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	k.client = &http.Client{
		CheckRedirect: k.checkRedirect,
		// How long a response may take is the attempt's business: a receiver
		// may well work for minutes before it answers.
		Transport: &http.Transport{
			Proxy:               quiet.Proxy(http.ProxyFromEnvironment),
			DialContext:         dialer.DialContext,
			TLSHandshakeTimeout: 10 * time.Second,
			Protocols:           protocols,
			MaxIdleConnsPerHost: 16,
			IdleConnTimeout:     time.Minute,

			MaxResponseHeaderBytes: 1 << 20,
		},
	}
	return k, nil
}

// Prepare refuses a payload that is not a request, or one that may not be sent. A
// URL that the allow-list does not lead to is a [tasks.ErrUnknown].
func (k *Kind) Prepare(payload json.RawMessage) (tasks.Handler, error) {
	out, err := k.parse(payload)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, a *tasks.Attempt) (tasks.Result, error) { return k.send(ctx, a, out) }, nil
}

// send sends the request and waits for the whole response.
func (k *Kind) send(ctx context.Context, a *tasks.Attempt, out *outgoing) (tasks.Result, error) {
	if a.Timeout == 0 {
		cause := fmt.Errorf("%w of %s; a task that needs longer sets its own timeout", tasks.ErrTimeout, k.timeout)
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, k.timeout, cause)
		defer cancel()
	}
	var connected atomic.Bool // once, as before a redirect: something may have been sent
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { connected.Store(true) }})
	req, err := out.request(ctx, a)
	if err != nil {
		return tasks.Result{}, tasks.Permanent(err)
	}
	resp, err := k.client.Do(req)
	if err != nil {
		if err = requestError(req, err); !connected.Load() && exhausted(err) { // which is no fault of the task's
			err = tasks.Requeue(0, err)
		}
		return tasks.Result{}, err
	}
	defer resp.Body.Close()
	// The body of a switched protocol is the connection itself, which does not end with ctx.
	defer context.AfterFunc(ctx, func() { _ = resp.Body.Close() })()

	fmt.Fprintf(a.Output, "%s %s\n\n", resp.Proto, resp.Status)
	if resp.StatusCode == http.StatusSwitchingProtocols {
		return tasks.Result{}, tasks.Permanent(fmt.Errorf("%s %s: answered %s, which nobody asked for", req.Method, shown(resp.Request.URL), tasks.Text(resp.Status)))
	}
	in := incoming{status: resp.StatusCode}
	if err := in.read(resp.Body, k.responseLimit, a.Output); err != nil {
		return tasks.Result{}, requestError(resp.Request, fmt.Errorf("answered %s, then broke off: %w", tasks.Text(resp.Status), err))
	}
	if resp.StatusCode/100 == 2 {
		value, err := in.result()
		return tasks.Result{Value: value}, err
	}
	err = fmt.Errorf("%s %s: answered %s%s", resp.Request.Method, shown(resp.Request.URL), tasks.Text(resp.Status), in.excerpt())
	if !triesAgain(resp.StatusCode) {
		return tasks.Result{}, tasks.Permanent(err)
	}
	if d := retryAfter(resp.Header, time.Now()); d > 0 {
		err = tasks.RetryAfter(d, err)
	}
	return tasks.Result{}, err
}

// requestError explains why there is no response to req, or only part of one.
// The URL's query stays out of it: that is where people put secrets.
func requestError(req *http.Request, err error) error {
	if wrapped, ok := errors.AsType[*url.Error](err); ok {
		err = wrapped.Err
	}
	if strings.HasPrefix(err.Error(), "failed to parse Location header") { // net/http repeats it
		err = errors.New("redirected to an invalid URL")
	}
	if ctx := req.Context(); ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return fmt.Errorf("%s %s: %w", req.Method, shown(req.URL), err)
}

// lacks are what no connection can be opened with when this host has no files or memory left.
var lacks = []syscall.Errno{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM}

// exhausted reports whether no connection could be opened because this host has no files, memory
// or ports left.
func exhausted(err error) bool {
	op, is := errors.AsType[*net.OpError](err)
	for is && op.Op != "dial" { // "proxyconnect" has another one in it
		op, is = errors.AsType[*net.OpError](op.Err)
	}
	if !is {
		return false
	}
	if dns, is := errors.AsType[*net.DNSError](op.Err); is { // it keeps the text of its cause only
		return slices.ContainsFunc(lacks, func(lack syscall.Errno) bool { return strings.HasSuffix(dns.Err, lack.Error()) })
	}
	if errors.Is(op.Err, syscall.EADDRNOTAVAIL) { // no port; for an IPv6 address also: no IPv6 here
		to, is := op.Addr.(*net.TCPAddr)
		return is && to.IP.To4() != nil
	}
	return slices.ContainsFunc(lacks, func(lack syscall.Errno) bool { return errors.Is(op.Err, lack) })
}

// shown returns u as it may be shown: without its query and whom it signs in.
func shown(u *url.URL) string {
	return tasks.Text((&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path, RawPath: u.RawPath}).String())
}

// checkRedirect is asked before each redirect is followed. The headers in req
// are those of the first request, without what net/http already held back.
func (k *Kind) checkRedirect(req *http.Request, via []*http.Request) error {
	if err := k.allow.check(req.URL); err != nil {
		return tasks.Permanent(fmt.Errorf("redirected to %s: %w", shown(req.URL), err))
	}
	if len(via) > maxRedirects {
		return tasks.Permanent(fmt.Errorf("redirected to %s, after %d redirects already", shown(req.URL), maxRedirects))
	}
	// Once a redirect has left the origin, the server there chooses the
	// way: not even on the way back do the payload's headers return.
	first, _ := locate(via[0].URL)
	elsewhere := func(r *http.Request) bool {
		there, _ := locate(r.URL)
		return there.origin != first.origin
	}
	if elsewhere(req) || slices.ContainsFunc(via, elsewhere) {
		keepAttemptHeaders(req.Header)
	}
	return nil
}

// keepAttemptHeaders removes what only the first origin should know: all but
// what names the attempt and what describes the body.
func keepAttemptHeaders(header http.Header) {
	for name := range header {
		switch name {
		case "User-Agent", "Onejob-Fence", "Onejob-Task-Id", "Onejob-Attempt", "Idempotency-Key",
			"Accept", "Content-Type", "Content-Encoding", "Content-Language":
		default:
			delete(header, name)
		}
	}
}

// outgoing is a payload that has passed every check.
type outgoing struct {
	url    *url.URL
	method string
	header http.Header
	body   []byte
}

func (k *Kind) parse(raw json.RawMessage) (*outgoing, error) {
	var p struct {
		URL      string             `json:"url"`
		Method   string             `json:"method"`
		Headers  map[string]*string `json:"headers"`
		Body     json.RawMessage    `json:"body"`
		BodyText *string            `json:"body_text"`
	}
	if err := payload.CheckFields(raw, "url", "method", "headers", "body", "body_text"); err != nil {
		return nil, err
	}
	if err := payload.Unmarshal(raw, &p); err != nil {
		return nil, err
	}
	if p.URL == "" {
		return nil, errors.New("payload: url is missing")
	}
	u, err := url.Parse(p.URL)
	if err != nil {
		return nil, fmt.Errorf("url: %w", quiet.URL(err))
	}
	if _, err := locate(u); err != nil {
		return nil, fmt.Errorf("url %.300s: %w", shown(u), err)
	}
	if p.Body != nil && p.BodyText != nil {
		return nil, errors.New("payload: body and body_text exclude each other")
	}

	out := &outgoing{url: u, method: p.Method, header: make(http.Header)}
	var contentType string
	switch {
	case p.Body != nil:
		out.body, contentType = p.Body, "application/json"
	case p.BodyText != nil:
		out.body, contentType = []byte(*p.BodyText), "text/plain; charset=utf-8"
	}
	if out.method == "" {
		out.method = http.MethodGet
		if contentType != "" {
			out.method = http.MethodPost
		}
	}
	if !slices.Contains(methods, out.method) {
		return nil, fmt.Errorf("method %q: must be one of %s", out.method, strings.Join(methods, ", "))
	}
	if err := out.setHeaders(p.Headers); err != nil {
		return nil, err
	}
	if contentType != "" && out.header["Content-Type"] == nil {
		out.header.Set("Content-Type", contentType)
	}
	// Last, after all that every replica would refuse: what only this one lacks.
	if err := k.allow.check(u); err != nil {
		return nil, &tasks.UnknownError{Name: u.Scheme + "://" + u.Host, Err: fmt.Errorf("url %.300s: %w", shown(u), err)}
	}
	return out, nil
}

var methods = []string{
	http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut,
	http.MethodPatch, http.MethodDelete, http.MethodOptions,
}

func (out *outgoing) setHeaders(headers map[string]*string) error {
	for name, value := range headers {
		canonical := http.CanonicalHeaderKey(name)
		switch {
		case !isToken(name):
			return fmt.Errorf("headers: %q is not a header's name", name)
		case reserved(name):
			return fmt.Errorf("headers: %s is set by onejob, or by the connection; leave it out", canonical)
		case out.header[canonical] != nil:
			return fmt.Errorf("headers: %s is given twice", canonical)
		case value == nil:
			return fmt.Errorf("headers: the value of %s is null; leave it out", canonical)
		case strings.ContainsFunc(*value, func(r rune) bool { return r != '\t' && (r < ' ' || r == 0x7f) }):
			return fmt.Errorf("headers: the value of %s holds a control character", canonical)
		}
		out.header.Set(name, *value)
	}
	return nil
}

// isToken reports whether s is a token in the sense of RFC 9110.
func isToken(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(r rune) bool {
		switch {
		case 'a' <= r && r <= 'z', 'A' <= r && r <= 'Z', '0' <= r && r <= '9':
			return false
		}
		return !strings.ContainsRune("!#$%&'*+-.^_`|~", r)
	})
}

// reserved reports whether a payload may not set the header. An underscore
// counts as a hyphen, because many servers hand both to their programs as one
// variable (HTTP_ONEJOB_FENCE).
func reserved(name string) bool {
	name = strings.ReplaceAll(strings.ToLower(name), "_", "-")
	switch name {
	case "host", "content-length", "idempotency-key", "x-idempotency-key",
		"connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization",
		"te", "trailer", "transfer-encoding", "upgrade", "expect":
		return true
	}
	return strings.HasPrefix(name, "onejob-")
}

func (out *outgoing) request(ctx context.Context, a *tasks.Attempt) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, out.method, out.url.String(), bytes.NewReader(out.body))
	if err != nil {
		return nil, err
	}
	req.Header = out.header
	if req.Header["User-Agent"] == nil {
		req.Header.Set("User-Agent", "onejob")
	}
	req.Header.Set("Onejob-Fence", strconv.FormatInt(a.Fence, 10))
	req.Header.Set("Onejob-Task-Id", strconv.FormatInt(a.ID, 10))
	req.Header.Set("Onejob-Attempt", strconv.Itoa(a.Attempt))
	if a.Traceparent != "" {
		req.Header.Set("Traceparent", a.Traceparent)
	}
	// net/http takes this header as leave to send a request again when an idle
	// connection turns out to be dead. It is the same attempt, so that is fine.
	req.Header.Set("Idempotency-Key", a.IdempotencyKey())
	return req, nil
}

// triesAgain reports whether a status says that the same request may succeed
// later.
func triesAgain(status int) bool {
	switch status {
	case http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests:
		return true
	}
	return status/100 == 5
}

// retryAfter returns how long a response asks to be left alone; zero means
// that it does not ask, or not for anything that makes sense. A date is
// compared with the response's own, so that our clock does not matter.
func retryAfter(header http.Header, now time.Time) time.Duration {
	value := strings.TrimSpace(header.Get("Retry-After"))
	if value == "" {
		return 0
	}
	if seconds, err := strconv.ParseInt(value, 10, 64); err == nil || errors.Is(err, strconv.ErrRange) {
		seconds = min(max(seconds, 0), int64(maxRetryAfter/time.Second))
		return time.Duration(seconds) * time.Second
	}
	at, err := http.ParseTime(value)
	if err != nil {
		return 0
	}
	if date, err := http.ParseTime(header.Get("Date")); err == nil {
		now = date
	}
	return min(max(at.Sub(now), 0), maxRetryAfter)
}
