package web

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"onejob/internal/plaintext"
	"onejob/lock"
	"onejob/store"
)

// What people do on the page. An action is a POST of a form, so it needs no JavaScript. It is
// done if the request
//
//   - asks for a host name of the page, and comes from the page or from a program, not from
//     another website (net/http.CrossOriginProtection);
//   - has a token of Config.ActTokens, whose name is the actor in onejob.actions;
//   - is a short form.
//
// The answer is a page that says what was done. Nothing but the form decides what it says, so
// no link can make it claim something.

// ActToken lets the bearer act under a name.
type ActToken struct{ Name, Token string }

// Actions is what people can do to tasks, queues and schedules; see store.Store.
type Actions interface {
	Cancel(ctx context.Context, id int64) (bool, error)
	Retry(ctx context.Context, id int64) (bool, error)
	Bulk(ctx context.Context, b store.Bulk, progress func(store.BulkResult)) (store.BulkResult, error)
	PauseQueue(ctx context.Context, name, reason string, until time.Time, after time.Duration) error
	ResumeQueue(ctx context.Context, name string) (bool, error)
	RunSchedule(ctx context.Context, name string) (int64, error)
	EnableSchedule(ctx context.Context, name string, enabled bool) (bool, error)
	PauseSchedule(ctx context.Context, name, reason string, until time.Time, after time.Duration) (bool, error)
	ResumeSchedule(ctx context.Context, name string) (bool, error)
	Record(ctx context.Context, action, target string) error
}

const (
	maxForm     = 16 << 10        // bytes of a form
	maxActions  = 4               // under way at once; each has a connection to Postgres
	formTimeout = 5 * time.Second // how long a form may take to arrive
	noteTimeout = 3 * time.Second // how long it may take to record what was done to a limit
)

const defaultActTimeout = 20 * time.Second

// admitAction returns who sends a POST, or why it is refused.
func (p *page) admitAction(r *http.Request) (actor string, no *refusal) {
	if err := p.origins.Check(r); err != nil {
		return "", &refusal{status: http.StatusForbidden, text: "The request comes from another website: " + err.Error() + "."}
	}
	actor, err := p.actor(r)
	switch {
	case err != nil:
		return "", &refusal{status: http.StatusInternalServerError, text: "The tokens cannot be read: " + err.Error()}
	case actor == "":
		return "", &refusal{http.StatusUnauthorized, "To act, send a name and its token of http.act_tokens_file, as user and password or as Authorization: Bearer TOKEN. " +
			"The token to read with is not enough.", "your name and your token of http.act_tokens_file"}
	}
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/x-www-form-urlencoded" {
		return "", &refusal{status: http.StatusUnsupportedMediaType, text: "An action is a form: Content-Type: application/x-www-form-urlencoded."}
	}
	return actor, nil
}

// actor returns the name whose token a request has, or "". The comparison takes the same time
// whichever token it is, and whatever differs.
func (p *page) actor(r *http.Request) (string, error) {
	tokens, err := p.cfg.ActTokens()
	if err != nil {
		return "", err
	}
	user, given, basic := r.BasicAuth()
	if !basic {
		var bearer bool
		if given, bearer = strings.CutPrefix(r.Header.Get("Authorization"), "Bearer "); !bearer {
			return "", nil
		}
	}
	same := func(a, b string) int {
		x, y := sha256.Sum256([]byte(a)), sha256.Sum256([]byte(b))
		return subtle.ConstantTimeCompare(x[:], y[:])
	}
	name := ""
	for _, t := range tokens {
		ok := same(given, t.Token)
		if basic {
			ok &= same(user, t.Name)
		}
		if ok == 1 && t.Token != "" {
			name = t.Name
		}
	}
	return name, nil
}

// result is what an action came to.
type result struct {
	Status int
	Text   string
	More   []string
	Task   int64  // the task that it is about; zero: none
	Again  *again // what can be pressed on the page; nil: nothing
}

// again is a button that retries failed tasks of a kind.
type again struct {
	Kind, Error string
	Until       time.Time
	Button      string
}

// done is the result of what was done, failed that of what could not be done.
func done(format string, args ...any) result {
	return result{Status: http.StatusOK, Text: fmt.Sprintf(format, args...)}
}

func failed(status int, format string, args ...any) result {
	return result{Status: status, Text: fmt.Sprintf(format, args...)}
}

// actionRoutes adds the routes of actions, and of the forms that need more than a button.
func (p *page) actionRoutes() {
	p.routes.HandleFunc("GET /queue", p.pauseForm(pauseForm{What: "queue", Text: "Replicas claim no more tasks from a paused queue. Tasks that run go on."}))
	p.routes.HandleFunc("GET /schedule", p.pauseForm(pauseForm{What: "schedule", Text: "A paused schedule creates no tasks; due times during the pause are left out. Tasks that exist go on."}))
	p.routes.HandleFunc("GET /limit", p.limitForm)
	for path, do := range map[string]func(*http.Request) result{
		"/tasks/{id}/cancel": p.cancelTask,
		"/tasks/{id}/retry":  p.retryTask,
		"/failures/retry":    named("kind", p.retryFailures),
		"/queues/pause":      named("queue", p.pauseQueue),
		"/queues/resume":     named("queue", p.resumeQueue),
		"/schedules/run":     named("schedule", p.runSchedule),
		"/schedules/pause":   named("schedule", p.pauseSchedule),
		"/schedules/resume":  named("schedule", p.resumeSchedule),
		"/schedules/enable":  named("schedule", p.enableSchedule(true)),
		"/schedules/disable": named("schedule", p.enableSchedule(false)),
		"/limits/resize":     named("limit", p.resizeLimit),
	} {
		root := strings.Repeat("../", strings.Count(path, "/")-1)
		p.routes.HandleFunc("POST "+path, func(w http.ResponseWriter, r *http.Request) {
			res := p.act(w, r, do)
			title := "Done"
			if res.Status != http.StatusOK {
				title = http.StatusText(res.Status)
			}
			p.show(w, res.Status, "result", layout{Title: title, Root: root, Content: res})
		})
	}
}

// act reads the form of an action, and does it.
func (p *page) act(w http.ResponseWriter, r *http.Request, do func(*http.Request) result) result {
	defer p.actions.Add(-1)
	if p.actions.Add(1) > maxActions {
		return failed(http.StatusServiceUnavailable, "This replica is busy with %d actions. Nothing was done; try again.", maxActions)
	}
	conn := http.NewResponseController(w)
	_ = conn.SetReadDeadline(time.Now().Add(formTimeout)) // a ResponseWriter without deadlines has no connection
	r.Body = http.MaxBytesReader(w, r.Body, maxForm)
	err := r.ParseForm()
	if err == nil {
		_ = conn.SetReadDeadline(time.Time{}) // or the context would end with it
	}
	if tooLong, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return failed(http.StatusRequestEntityTooLarge, "The form has more than %d bytes. Nothing was done.", tooLong.Limit)
	}
	if err != nil {
		return failed(http.StatusBadRequest, "The form cannot be read: %v. Nothing was done.", err)
	}
	for name, values := range r.Form {
		for _, text := range values {
			if !utf8.ValidString(text) || strings.ContainsRune(text, 0) {
				return failed(http.StatusBadRequest, "The field %q is not text. Nothing was done.", name)
			}
		}
	}
	ctx, cancel := context.WithTimeout(r.Context(), p.cfg.ActTimeout)
	defer cancel()
	return do(r.WithContext(ctx))
}

// named does something to what a field of the form names. Nothing has a longer name.
func named(field string, do func(r *http.Request, name string) result) func(*http.Request) result {
	return func(r *http.Request) result {
		name := r.Form.Get(field)
		if name == "" || len(name) > 2000 {
			return failed(http.StatusBadRequest, "Nothing was done: the field %q has %d bytes; it must name something.", field, len(name))
		}
		return do(r, name)
	}
}

// answer says what an action did, or why it did nothing.
func answer(did bool, err error, what, refused, success string) result {
	switch {
	case err != nil:
		return failed(http.StatusServiceUnavailable, "The %s failed: %v", what, err)
	case !did:
		return failed(http.StatusConflict, "%s Nothing was done.", refused)
	}
	return done("%s", success)
}

// withTask does something to the task in the path.
func withTask(r *http.Request, do func(ctx context.Context, id int64) result) result {
	id, err := strconv.ParseInt(r.PathValue("id"), 10, 64)
	if err != nil || id < 1 {
		return failed(http.StatusNotFound, "%q is not the ID of a task.", r.PathValue("id"))
	}
	res := do(r.Context(), id)
	res.Task = id
	return res
}

func (p *page) cancelTask(r *http.Request) result {
	return withTask(r, func(ctx context.Context, id int64) result {
		cancelled, err := p.cfg.Actions.Cancel(ctx, id)
		return answer(cancelled, err, "cancel", fmt.Sprintf("There is no task %d, or it has ended.", id),
			fmt.Sprintf("The cancel of task %d is requested. A pending task is cancelled at once, a running one within seconds.", id))
	})
}

// retryTask retries a task. The form of the page has the status that it showed, and when the task had
// finished: pressed twice, or after somebody else, it does not run again what has succeeded meanwhile.
func (p *page) retryTask(r *http.Request) result {
	seen, finished := r.PostForm.Get("status"), r.PostForm.Get("finished")
	return withTask(r, func(ctx context.Context, id int64) result {
		if seen != "" {
			return p.retryAsSeen(ctx, id, seen, finished)
		}
		retried, err := p.cfg.Actions.Retry(ctx, id)
		return answer(retried, err, "retry", fmt.Sprintf("There is no task %d, or it is running.", id), fmt.Sprintf("Task %d is due now, with all its attempts.", id))
	})
}

func (p *page) retryAsSeen(ctx context.Context, id int64, status, finished string) result {
	filter := store.TaskFilter{Status: status, IDs: []int64{id}}
	if at, err := time.Parse(time.RFC3339Nano, finished); err == nil { // or it had not finished, or at infinity
		filter.Until = &at
	}
	n, err := p.cfg.Actions.Bulk(ctx, store.Bulk{Action: store.ActionRetry, Filter: filter}, nil)
	switch {
	case err != nil:
		return failed(statusOf(err), "The retry failed: %v", err)
	case n.Matched == 0:
		return failed(http.StatusConflict, "Task %d is not as the page showed it any more: %s. Nothing was done.", id, status)
	case n.Affected == 0:
		return failed(http.StatusConflict, "Task %d is locked by others, changed a moment ago, or Postgres refuses the retry (another task has its unique key, for example). Nothing was done.", id)
	}
	return done("Task %d is due now, with all its attempts.", id)
}

// day is how far back the failures on the page go.
const day = 24 * time.Hour

// retryFailures retries the tasks of a group of failures. It counts them first, and asks.
func (p *page) retryFailures(r *http.Request, kind string) result {
	until, err := time.Parse(time.RFC3339Nano, r.Form.Get("until"))
	if err != nil {
		return failed(http.StatusBadRequest, "The field %q is not a time such as 2006-01-02T15:04:05Z. Nothing was done.", "until")
	}
	pattern := r.Form.Get("error")
	if strings.ContainsFunc(pattern, func(r rune) bool { return !unicode.IsGraphic(r) }) { // see snapshot.Pattern
		return failed(http.StatusBadRequest, "The field %q has a character that cannot be printed; %% stands for it. Nothing was done.", "error")
	}
	if pattern != "" && p.hides(kind) { // counting would tell what the errors are
		return failed(http.StatusForbidden, "Errors of this kind are %s, so they cannot choose tasks. Nothing was done.", hidden)
	}
	since := until.Add(-day)
	filter := store.TaskFilter{Status: "failed", Kind: kind, Error: pattern, Since: &since, Until: &until}
	of := fmt.Sprintf("Failed tasks of kind %s, whatever their error, that failed between %s and %s UTC.", kind, utcOf(since), utcOf(until))
	switch {
	case pattern != "":
		of = fmt.Sprintf("Failed tasks of kind %s that failed between %s and %s UTC, with this in the error, as in LIKE (%% is any text): %s", kind, utcOf(since), utcOf(until), pattern)
	case p.hides(kind):
		of = fmt.Sprintf("%s The errors of this kind are %s.", of, hidden)
	}
	press := &again{Kind: kind, Error: pattern, Until: until}

	if r.PostForm.Get("confirm") != "yes" {
		n, err := p.cfg.Actions.Bulk(r.Context(), store.Bulk{Action: store.ActionRetry, Filter: filter, Count: true}, nil)
		var res result
		switch {
		case err != nil && !late(r):
			return failed(statusOf(err), "The tasks cannot be counted: %v", err)
		case err != nil:
			res = done("The filter chooses at least %s; there was no time to count all of them. Retry them?", plaintext.Plural(n.Matched, "task"))
			press.Button = "Retry them"
		case n.Matched == 0:
			res, press = done("The filter chooses no task any more. Nothing was done."), nil
		default:
			res = done("The filter chooses %s. Retry them?", plaintext.Plural(n.Matched, "task"))
			press.Button = "Retry " + plaintext.Plural(n.Matched, "task")
		}
		res.More, res.Again = []string{of}, press
		return res
	}

	n, err := p.cfg.Actions.Bulk(r.Context(), store.Bulk{Action: store.ActionRetry, Filter: filter}, nil)
	var res result
	switch {
	case err != nil && late(r):
		res = done("%s retried. There are more; one request works for at most %v. Press again to go on.", plaintext.Plural(n.Affected, "task"), p.cfg.ActTimeout)
		press.Button = "Go on"
		res.Again = press
	case err != nil:
		res = failed(statusOf(err), "%s retried, then the action failed: %v", plaintext.Plural(n.Affected, "task"), err)
	default:
		res = done("%s retried: due now, with all attempts.", plaintext.Plural(n.Affected, "task"))
	}
	res.More = []string{of}
	if left := n.Left(); left > 0 {
		res.More = append(res.More, fmt.Sprintf("%s not retried: locked by others, changed meanwhile, or Postgres refuses it (another task has the unique key, for example).", plaintext.Plural(left, "task")))
	}
	if n.Slow > 0 {
		res.More = append(res.More, fmt.Sprintf("Of these, %s took longer than postgres.timeout.", plaintext.Plural(n.Slow, "task")))
	}
	return res
}

// late reports whether an action took too long.
func late(r *http.Request) bool { return errors.Is(r.Context().Err(), context.DeadlineExceeded) }

// statusOf returns the status for an error of the store.
func statusOf(err error) int {
	if errors.Is(err, store.ErrFilter) {
		return http.StatusBadRequest
	}
	return http.StatusServiceUnavailable
}

func utcOf(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05") }

// pauseForm is what the form of a pause says.
type pauseForm struct {
	What string // queue or schedule
	Name string
	Text string
}

func (p *page) pauseForm(f pauseForm) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		f := f
		f.Name = r.URL.Query().Get("name")
		if f.Name == "" || !utf8.ValidString(f.Name) {
			p.fail(w, http.StatusNotFound, "", "The address names no "+f.What+".")
			return
		}
		p.show(w, http.StatusOK, "pause", layout{Title: "Pause " + f.What + " " + f.Name, Content: f})
	}
}

func (p *page) pauseQueue(r *http.Request, name string) result {
	return pause(r, "queue", name, func(reason string, length time.Duration) (bool, error) {
		return true, p.cfg.Actions.PauseQueue(r.Context(), name, reason, time.Time{}, length)
	})
}

func (p *page) pauseSchedule(r *http.Request, name string) result {
	return pause(r, "schedule", name, func(reason string, length time.Duration) (bool, error) {
		return p.cfg.Actions.PauseSchedule(r.Context(), name, reason, time.Time{}, length)
	})
}

// pause pauses a queue or a schedule as a form says.
func pause(r *http.Request, what, name string, do func(reason string, length time.Duration) (found bool, err error)) result {
	reason := strings.TrimSpace(r.Form.Get("reason"))
	if n := utf8.RuneCountInString(reason); n > 1000 {
		return failed(http.StatusBadRequest, "The reason has %d characters, more than 1000. Nothing was done.", n)
	}
	var length time.Duration
	var err error
	if text := strings.TrimSpace(r.Form.Get("for")); text != "" {
		if length, err = time.ParseDuration(text); err != nil || length < time.Second {
			return failed(http.StatusBadRequest, "The duration %q is not one such as 30m or 2h, of at least 1s. Nothing was done.", text)
		}
	}
	found, err := do(reason, length)
	switch what := strings.ToUpper(what[:1]) + what[1:]; {
	case err != nil:
		return failed(http.StatusServiceUnavailable, "The pause failed: %v", err)
	case !found:
		return failed(http.StatusNotFound, "%s %s does not exist. Nothing was done.", what, name)
	case length > 0:
		return done("%s %s is paused for %v.", what, name, length)
	default:
		return done("%s %s is paused until it is resumed.", what, name)
	}
}

func (p *page) resumeQueue(r *http.Request, name string) result {
	resumed, err := p.cfg.Actions.ResumeQueue(r.Context(), name)
	return answer(resumed, err, "resume", "Queue "+name+" is not paused.", "Queue "+name+" is resumed.")
}

func (p *page) resumeSchedule(r *http.Request, name string) result {
	resumed, err := p.cfg.Actions.ResumeSchedule(r.Context(), name)
	return answer(resumed, err, "resume", "Schedule "+name+" is not paused.", "Schedule "+name+" is resumed: its next due time counts.")
}

func (p *page) runSchedule(r *http.Request, name string) result {
	id, err := p.cfg.Actions.RunSchedule(r.Context(), name)
	switch {
	case err != nil:
		return failed(http.StatusServiceUnavailable, "It is not certain that the schedule was run. Look at its tasks before you run it again. %v", err)
	case id == 0:
		return failed(http.StatusNotFound, "There is no schedule %s. Nothing was done.", name)
	}
	res := done("Task %d of schedule %s is due now.", id, name)
	res.Task = id
	return res
}

func (p *page) enableSchedule(enabled bool) func(*http.Request, string) result {
	return func(r *http.Request, name string) result {
		switch found, err := p.cfg.Actions.EnableSchedule(r.Context(), name, enabled); {
		case err != nil:
			return failed(http.StatusServiceUnavailable, "The change failed: %v", err)
		case !found:
			return failed(http.StatusNotFound, "There is no schedule %s. Nothing was done.", name)
		case enabled:
			return done("Schedule %s is enabled.", name)
		}
		return done("Schedule %s is disabled.", name)
	}
}

func (p *page) limitForm(w http.ResponseWriter, r *http.Request) {
	snap, err := p.cfg.Snapshots.Get(r.Context())
	if err != nil {
		return // the viewer is gone
	}
	for _, l := range snap.Limits {
		if l.Name == r.URL.Query().Get("name") && l.Error == "" {
			p.show(w, http.StatusOK, "limit", layout{Title: "Resize limit " + l.Name, Content: l})
			return
		}
	}
	p.fail(w, http.StatusNotFound, "", "The address names no limit that is on the page.")
}

func (p *page) resizeLimit(r *http.Request, name string) result {
	text := strings.TrimSpace(r.Form.Get("slots"))
	slots, err := strconv.Atoi(text)
	if err != nil {
		return failed(http.StatusBadRequest, "The number of slots, %q, is not a number. Nothing was done.", text)
	}
	if err := lock.CheckSemaphore(name, slots); err != nil {
		return failed(http.StatusBadRequest, "%v. Nothing was done.", err)
	}
	limits := p.cfg.Limits()
	if limits == nil {
		return failed(http.StatusServiceUnavailable, "This replica does not know yet where limits are kept. Nothing was done; try again.")
	}
	switch err := limits.Resize(r.Context(), name, slots); {
	case errors.Is(err, lock.ErrNoSemaphore):
		return failed(http.StatusNotFound, "There is no limit %s. Nothing was done.", name)
	case errors.Is(err, lock.ErrForeign):
		return failed(http.StatusConflict, "Limit %s: %v. Nothing was done.", name, err)
	case err != nil:
		return failed(http.StatusServiceUnavailable, "It is not certain that limit %s was changed, or by how much. Look at it again. %v", name, err)
	}
	res := done("Limit %s has %d slots.", name, slots)
	// It has happened, so it is recorded even if the browser is gone.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), noteTimeout)
	defer cancel()
	if err := p.cfg.Actions.Record(ctx, "resize limit", fmt.Sprintf("limit %s to %d slots", name, slots)); err != nil {
		res.More = []string{"It is not recorded in onejob.actions: " + err.Error()}
	}
	return res
}
