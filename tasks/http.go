package tasks

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"onejob/internal/quiet"
)

// What HTTPConfig's zero values stand for.
const (
	DefaultHTTPResponseLimit = 64 << 10
	DefaultHTTPTimeout       = 5 * time.Minute
)

const (
	maxRedirects    = 5
	maxResponseRead = 16 << 20       // after which the rest of a response is not waited for
	maxRetryAfter   = 24 * time.Hour // beyond which a Retry-After is not believed
	maxErrorBody    = 512            // bytes of a response's body in an error
	maxResultDepth  = 100            // of JSON in a result; Postgres' parser has a stack to mind
)

// HTTPConfig is what an [HTTP] kind may do.
type HTTPConfig struct {
	// Allow lists where tasks may send requests, redirects included. An entry
	// is a URL: "https://hooks.example.com/v1" opens that scheme, host and
	// port, /v1 itself and every path below /v1/. An empty list opens nothing.
	Allow []string `koanf:"allow"`

	// ResponseLimit is how many bytes of a response's body are kept as the
	// task's result, at most MaxKept. Zero means DefaultHTTPResponseLimit.
	ResponseLimit int `koanf:"response_limit"`

	// Timeout bounds the request of a task that has no timeout of its own,
	// from connecting to the last byte of the response. Zero means
	// DefaultHTTPTimeout.
	Timeout time.Duration `koanf:"timeout"`
}

// HTTP is the kind that sends one request. Its payload is
//
//	{"url": "https://…", "method": "POST", "headers": {"X-A": "…"}, "body": {"any": "JSON"}}
//
// Everything but the URL may be left out, and "body_text" may stand in for
// "body" to send text as it is. The method is POST if there is a body, else
// GET.
//
// The request carries the attempt: Onejob-Fence, which only rises for one lock
// key, so that a receiver that remembers the highest can refuse a stale one;
// Onejob-Task-Id; Onejob-Attempt; and Idempotency-Key, which stays the same for
// all attempts at one task.
//
// A status of 2xx is success. 408, 425, 429, 5xx and a failing network are
// tried again, not before Retry-After asks for. Every other status fails the
// task at once. Up to 5 redirects are followed, with the methods and bodies
// that browsers would use, and only to where the allow-list leads; to another
// origin the payload's own headers do not go along.
type HTTP struct {
	allow         allowList
	responseLimit int
	timeout       time.Duration
	client        *http.Client
}

// NewHTTP returns an HTTP kind, or an error that names every problem of c.
func NewHTTP(c HTTPConfig) (*HTTP, error) {
	var problems []error
	h := &HTTP{responseLimit: c.ResponseLimit, timeout: c.Timeout}
	for i, entry := range c.Allow {
		place, err := parseAllowed(entry)
		if err != nil {
			which := fmt.Sprintf("allow[%d]", i)
			if !strings.Contains(entry, "@") { // else it may hold a password
				which += fmt.Sprintf(" %q", entry)
			}
			problems = append(problems, fmt.Errorf("%s: %w", which, err))
		}
		h.allow = append(h.allow, place)
	}
	if c.ResponseLimit < 0 {
		problems = append(problems, fmt.Errorf("response_limit %d: must not be negative", c.ResponseLimit))
	}
	if c.ResponseLimit > MaxKept {
		problems = append(problems, fmt.Errorf("response_limit %d: must be at most %d (16 MiB)", c.ResponseLimit, MaxKept))
	}
	if c.Timeout < 0 {
		problems = append(problems, fmt.Errorf("timeout %s: must not be negative", c.Timeout))
	}
	if len(problems) > 0 {
		return nil, errors.Join(problems...)
	}
	if h.responseLimit == 0 {
		h.responseLimit = DefaultHTTPResponseLimit
	}
	if h.timeout == 0 {
		h.timeout = DefaultHTTPTimeout
	}
	dialer := net.Dialer{Timeout: 10 * time.Second}
	h.client = &http.Client{
		CheckRedirect: h.checkRedirect,
		// How long a response may take is the attempt's business: a receiver
		// may well work for minutes before it answers.
		Transport: &http.Transport{
			Proxy:               quiet.Proxy(http.ProxyFromEnvironment),
			DialContext:         dialer.DialContext,
			TLSHandshakeTimeout: 10 * time.Second,
			ForceAttemptHTTP2:   true,
			MaxIdleConnsPerHost: 16,
			IdleConnTimeout:     time.Minute,
		},
	}
	return h, nil
}

// Check refuses a payload that is not a request, or one that may not be sent. A
// URL that the allow-list does not lead to is an [ErrUnknown].
func (h *HTTP) Check(payload json.RawMessage) error {
	_, err := h.parse(payload)
	return err
}

// Run sends the request and waits for the whole response.
func (h *HTTP) Run(ctx context.Context, a *Attempt) (Result, error) {
	out, err := h.parse(a.Payload)
	if err != nil {
		return Result{}, refused(err)
	}
	if a.Timeout == 0 {
		cause := fmt.Errorf("%w of %s; a task that needs longer sets its own timeout", ErrTimeout, h.timeout)
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, h.timeout, cause)
		defer cancel()
	}
	req, err := out.request(ctx, a)
	if err != nil {
		return Result{}, Permanent(err)
	}
	resp, err := h.client.Do(req)
	if err != nil {
		return Result{}, requestError(req, err)
	}
	defer resp.Body.Close()

	fmt.Fprintf(a.Output, "%s %s\n\n", resp.Proto, resp.Status)
	in := incoming{status: resp.StatusCode}
	if err := in.read(resp.Body, h.responseLimit, a.Output); err != nil {
		return Result{}, requestError(resp.Request, fmt.Errorf("answered %s, then broke off: %w", Text(resp.Status), err))
	}
	if resp.StatusCode/100 == 2 {
		value, err := in.result()
		return Result{Value: value}, err
	}
	err = fmt.Errorf("%s %s: answered %s%s", resp.Request.Method, shown(resp.Request.URL), Text(resp.Status), in.excerpt())
	if !triesAgain(resp.StatusCode) {
		return Result{}, Permanent(err)
	}
	if d := retryAfter(resp.Header, time.Now()); d > 0 {
		err = RetryAfter(d, err)
	}
	return Result{}, err
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

// checkRedirect is asked before each redirect is followed. The headers in req
// are those of the first request, without what net/http already held back.
func (h *HTTP) checkRedirect(req *http.Request, via []*http.Request) error {
	if err := h.allow.check(req.URL); err != nil {
		return Permanent(fmt.Errorf("redirected to %s: %w", shown(req.URL), err))
	}
	if len(via) > maxRedirects {
		return Permanent(fmt.Errorf("redirected to %s, after %d redirects already", shown(req.URL), maxRedirects))
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

func (h *HTTP) parse(payload json.RawMessage) (*outgoing, error) {
	var p struct {
		URL      string            `json:"url"`
		Method   string            `json:"method"`
		Headers  map[string]string `json:"headers"`
		Body     json.RawMessage   `json:"body"`
		BodyText *string           `json:"body_text"`
	}
	if err := checkFields(payload, "url", "method", "headers", "body", "body_text"); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(payload, &p); err != nil {
		if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
			return nil, fmt.Errorf("payload: %s cannot be a JSON %s", cmp.Or(wrong.Field, "it"), wrong.Value)
		}
		return nil, fmt.Errorf("payload: %w", err)
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
	if err := h.allow.check(u); err != nil {
		return nil, &UnknownError{u.Scheme + "://" + u.Host, fmt.Errorf("url %.300s: %w", shown(u), err)}
	}
	return out, nil
}

var methods = []string{
	http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut,
	http.MethodPatch, http.MethodDelete, http.MethodOptions,
}

func (out *outgoing) setHeaders(headers map[string]string) error {
	for name, value := range headers {
		canonical := http.CanonicalHeaderKey(name)
		switch {
		case !isToken(name):
			return fmt.Errorf("headers: %q is not a header's name", name)
		case reserved(name):
			return fmt.Errorf("headers: %s is set by onejob, or by the connection; leave it out", canonical)
		case out.header[canonical] != nil:
			return fmt.Errorf("headers: %s is given twice", canonical)
		case strings.ContainsFunc(value, func(r rune) bool { return r != '\t' && (r < ' ' || r == 0x7f) }):
			return fmt.Errorf("headers: the value of %s holds a control character", canonical)
		}
		out.header.Set(name, value)
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

func (out *outgoing) request(ctx context.Context, a *Attempt) (*http.Request, error) {
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
	// net/http takes this header as leave to send a request again when an idle
	// connection turns out to be dead. It is the same attempt, so that is fine.
	req.Header.Set("Idempotency-Key", a.IdempotencyKey())
	return req, nil
}

// incoming is what is kept of a response.
type incoming struct {
	status    int
	body      []byte
	truncated bool
}

// read reads r to its end, because a receiver may still be at work until then,
// but no further than maxResponseRead. It keeps limit bytes.
func (in *incoming) read(r io.Reader, limit int, output io.Writer) error {
	r = io.TeeReader(io.LimitReader(r, maxResponseRead), output)
	body, err := io.ReadAll(io.LimitReader(r, int64(limit)))
	if err != nil {
		return err
	}
	rest, err := io.Copy(io.Discard, r)
	in.body, in.truncated = body, rest > 0
	return err
}

// result returns the response as a task's result.
func (in *incoming) result() (json.RawMessage, error) {
	return json.Marshal(struct {
		Status    int  `json:"status"`
		Body      any  `json:"body,omitempty"`
		Truncated bool `json:"truncated,omitempty"`
	}{in.status, in.value(), in.truncated})
}

// value returns the body as Postgres can keep it: as JSON if it is some, else
// as text. An empty body is nil.
func (in *incoming) value() any {
	if len(in.body) == 0 {
		return nil
	}
	if !in.truncated && json.Valid(in.body) {
		d := json.NewDecoder(bytes.NewReader(in.body))
		d.UseNumber()
		var value any
		if d.Decode(&value) == nil {
			if value, ok := storable(value, maxResultDepth); ok {
				return value
			}
		}
	}
	return in.text(len(in.body))
}

// text returns the first n bytes of the body, without half a character at the
// end.
func (in *incoming) text(n int) string {
	b := in.body[:min(n, len(in.body))]
	if len(b) < len(in.body) || in.truncated {
		for i := 1; i < utf8.UTFMax && i <= len(b); i++ {
			if start := len(b) - i; utf8.RuneStart(b[start]) {
				if !utf8.FullRune(b[start:]) {
					b = b[:start]
				}
				break
			}
		}
	}
	return Text(string(b))
}

// excerpt returns the beginning of the body, to end an error's message with.
func (in *incoming) excerpt() string {
	text := strings.TrimSpace(in.text(maxErrorBody))
	if text == "" {
		return ""
	}
	if in.truncated || len(in.body) > maxErrorBody {
		text += " …"
	}
	return ": " + text
}

// storable returns decoded JSON without what Postgres' jsonb refuses: U+0000
// in a string becomes \x00, a number beyond a float64's range becomes a string.
// (A lone surrogate has become U+FFFD in decoding.) It reports false for what
// is nested deeper than depth.
func storable(value any, depth int) (any, bool) {
	if depth == 0 {
		return nil, false
	}
	switch value := value.(type) {
	case string:
		return Text(value), true
	case json.Number:
		if f, err := value.Float64(); err != nil || len(value) > 400 || (f == 0) != isZero(string(value)) {
			return string(value), true
		}
		return value, true
	case []any:
		for i := range value {
			var ok bool
			if value[i], ok = storable(value[i], depth-1); !ok {
				return nil, false
			}
		}
		return value, true
	case map[string]any:
		stored := make(map[string]any, len(value))
		for k, v := range value {
			var ok bool
			if stored[Text(k)], ok = storable(v, depth-1); !ok {
				return nil, false
			}
		}
		return stored, true
	}
	return value, true // true, false and null
}

// isZero reports whether a JSON number is zero as it is written, and not for
// being too small.
func isZero(number string) bool {
	mantissa, _, _ := strings.Cut(strings.ToLower(number), "e")
	return !strings.ContainsAny(mantissa, "123456789")
}

// triesAgain reports whether a status says that the same request may succeed
// later.
func triesAgain(status int) bool {
	switch status {
	case http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests:
		return true
	}
	return status >= 500
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

// allowList says where requests may go.
type allowList []place

// place is an origin, and the path of a URL there.
type place struct {
	origin string // scheme, host and port, each in its one canonical form
	path   string // decoded
}

func parseAllowed(entry string) (place, error) {
	u, err := url.Parse(entry)
	if err != nil {
		return place{}, quiet.URL(err)
	}
	if strings.ContainsAny(entry, "?#") {
		return place{}, errors.New("must have no query and no fragment")
	}
	p, err := locate(u)
	if err != nil {
		return place{}, err
	}
	p.path = strings.TrimSuffix(p.path, "/")
	if strings.Contains(p.path+"/", "//") {
		return place{}, errors.New("must have no empty segments in its path")
	}
	return p, nil
}

// check returns an error, made for the one who wrote the URL, unless u leads to
// where the list allows.
func (l allowList) check(u *url.URL) error {
	p, err := locate(u)
	if err != nil {
		return err
	}
	for _, allowed := range l {
		below, ok := strings.CutPrefix(p.path, allowed.path)
		if ok && p.origin == allowed.origin && (below == "" || below[0] == '/') {
			return nil
		}
	}
	return fmt.Errorf("is not allowed; to open it, add %s://%s, with as much of its path as should be opened, to kinds.http.allow",
		u.Scheme, u.Host)
}

// locate returns where a URL leads. It refuses whatever two programs could read
// in two ways, so that what is checked here is what the receiver acts on.
func locate(u *url.URL) (place, error) {
	if u.Scheme != "http" && u.Scheme != "https" {
		return place{}, errors.New("must begin with http:// or https://")
	}
	if u.Opaque != "" || u.Hostname() == "" {
		return place{}, errors.New("must name a host")
	}
	if u.User != nil {
		return place{}, errors.New("must not hold a user name or password; send an Authorization header")
	}
	host, err := canonicalHost(u.Hostname())
	if err != nil {
		return place{}, err
	}
	port := uint64(80)
	if u.Scheme == "https" {
		port = 443
	}
	if s := u.Port(); s != "" {
		if port, err = strconv.ParseUint(s, 10, 64); err != nil || port < 1 || port > math.MaxUint16 {
			return place{}, fmt.Errorf("port %s is not between 1 and %d", s, math.MaxUint16)
		}
	}
	for segment := range strings.SplitSeq(u.EscapedPath(), "/") {
		if err := checkSegment(segment); err != nil {
			return place{}, err
		}
	}
	return place{
		origin: fmt.Sprintf("%s://%s:%d", u.Scheme, host, port),
		path:   u.Path,
	}, nil
}

func canonicalHost(host string) (string, error) {
	if strings.Contains(host, ":") {
		ip, err := netip.ParseAddr(host)
		if err != nil || ip.Zone() != "" {
			return "", fmt.Errorf("host %q is not an IPv6 address without a zone", host)
		}
		return "[" + ip.String() + "]", nil
	}
	if strings.ContainsFunc(host, func(r rune) bool {
		return r > unicode.MaxASCII || !unicode.IsLetter(r) && !unicode.IsDigit(r) && !strings.ContainsRune("-._", r)
	}) {
		return "", fmt.Errorf("host %q must be letters, digits, hyphens and dots; write other alphabets as xn--", host)
	}
	return strings.ToLower(host), nil
}

// checkSegment refuses a segment of a path that a receiver could take for a
// step upwards, or for several segments, however often it decodes it and
// whether or not it cuts off parameters (..;x=y).
func checkSegment(escaped string) error {
	segment := escaped
	for {
		name, _, _ := strings.Cut(segment, ";")
		if name == "." || name == ".." || strings.ContainsAny(segment, `/\`) || strings.ContainsFunc(segment, unicode.IsControl) {
			return fmt.Errorf("must have no dots alone, slashes, backslashes or control characters, encoded or not, in a segment of its path (%q)", escaped)
		}
		decoded, err := url.PathUnescape(segment)
		if err != nil || decoded == segment {
			return nil
		}
		segment = decoded
	}
}

// shown returns u as it may be shown: without its query and whom it signs in.
func shown(u *url.URL) string {
	return Text((&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path, RawPath: u.RawPath}).String())
}
