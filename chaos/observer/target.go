package observer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

type connKey struct{} // under which a request's context has its connection

// target answers http tasks, and those who sit at the Desk.
func (l *ledger) target() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/work", l.work)
	mux.HandleFunc("GET /inside", func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(l.guests()) })
	mux.HandleFunc("GET /leases", func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(l.leases()) })
	mux.HandleFunc("GET /now", func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(l.now()) })
	for path, begins := range map[string]bool{"POST /begin": true, "POST /end": false} {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			var m Mark
			if err := json.NewDecoder(r.Body).Decode(&m); err != nil {
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			}
			l.mark(m, begins)
		})
	}
	return mux
}

// WorkURL is the address of an http task, as it stands in its payload. What the
// task does not send with every request has to be in the address.
func (w Where) WorkURL(key, limit string, work time.Duration, failures int) string {
	q := url.Values{
		"ms": {strconv.FormatInt(work.Milliseconds(), 10)}, "failures": {strconv.Itoa(failures)},
		"key": {key}, "limit": {limit},
	}
	return w.Target + "/work?" + q.Encode()
}

// work is what an http task does: it takes as long as the address says, and
// fails the first attempts. Whoever comes with a lower fence than one that was
// here before is refused, as a target should do. The work goes on until it is
// done, or until the connection is closed: a caller that is frozen closes none.
func (l *ledger) work(w http.ResponseWriter, r *http.Request) {
	number := func(text string) int64 {
		n, _ := strconv.ParseInt(text, 10, 64) // the harness wrote the address, and onejob the headers
		return n
	}
	q := r.URL.Query()
	c := Claim{
		Task: number(r.Header.Get("Onejob-Task-Id")), Attempt: int(number(r.Header.Get("Onejob-Attempt"))),
		Fence: number(r.Header.Get("Onejob-Fence")), Key: q.Get("key"), Limit: q.Get("limit"), Kind: "http",
	}
	if c.Key == "" {
		c.Key = strconv.FormatInt(c.Task, 10)
	}
	g, err := l.begin(c, r.Context().Value(connKey{}).(net.Conn))
	switch {
	case errors.Is(err, ErrStale):
		http.Error(w, err.Error(), http.StatusConflict)
		return
	case err != nil:
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	tick := time.NewTicker(Interval)
	defer tick.Stop()
	done := time.NewTimer(time.Duration(number(q.Get("ms"))) * time.Millisecond)
	defer done.Stop()
	for {
		select {
		case <-r.Context().Done():
			l.end(g, Gone)
			return
		case <-tick.C:
			l.beat(g)
		case <-done.C:
			if int64(c.Attempt) <= number(q.Get("failures")) {
				l.end(g, Failed)
				http.Error(w, "not yet", http.StatusServiceUnavailable)
				return
			}
			l.end(g, Succeeded)
			fmt.Fprintln(w, "done")
			return
		}
	}
}

// MarkClient is where those who harm the cluster tell the observer so.
type MarkClient struct {
	URL string // the target
}

// Begin notes that something begins, End that it ends.
func (d MarkClient) Begin(m Mark) error { return d.ask(http.MethodPost, "/begin", m, nil) }

// End notes that what began as m.ID ends.
func (d MarkClient) End(m Mark) error { return d.ask(http.MethodPost, "/end", m, nil) }

// Inside returns who is inside now.
func (d MarkClient) Inside() (stays []Stay, err error) {
	return stays, d.ask(http.MethodGet, "/inside", nil, &stays)
}

// Leases returns what was said of the leases of attempts, by fence.
func (d MarkClient) Leases() (leases map[int64]Lease, err error) {
	return leases, d.ask(http.MethodGet, "/leases", nil, &leases)
}

// Now is the time by the observer's clock.
func (d MarkClient) Now() (now Time, err error) {
	return now, d.ask(http.MethodGet, "/now", nil, &now)
}

func (d MarkClient) ask(method, path string, question, answer any) error {
	ctx, cancel := context.WithTimeout(context.Background(), maxWait)
	defer cancel()
	body, err := json.Marshal(question)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, method, d.URL+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return fmt.Errorf("ask the observer: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("the observer answered %s", resp.Status)
	}
	if answer == nil {
		return nil
	}
	return json.NewDecoder(resp.Body).Decode(answer)
}
