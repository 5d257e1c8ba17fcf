package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/chaos/observer"
)

// perform does what a task is there for. ctx ends when the way of holding the
// lock says so, or with the row's timeout.
func (r *runner) perform(ctx context.Context, a *attempt) error {
	if a.Timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(a.Timeout*float64(time.Second)))
		defer cancel()
	}
	p, err := parsePayload(a.Payload)
	if err != nil {
		return err
	}
	switch a.Kind {
	case "exec":
		return r.performExec(ctx, a)
	case "go":
		return r.performGo(ctx, a, p)
	case "http":
		return r.http.perform(ctx, a, p.URL)
	case "sql":
		return r.performSQL(ctx, a, p.Params.Seconds)
	case "noop":
		return nil
	}
	return fmt.Errorf("there is no kind %q", a.Kind)
}

// payload is that of all kinds in one.
type payload struct {
	MS       int    `json:"ms"`       // go: how long it takes
	Failures int    `json:"failures"` // go: the first attempts fail
	URL      string `json:"url"`      // http
	Params   struct {
		Seconds float64 `json:"seconds"` // sql: how long it takes
	} `json:"params"`
}

func parsePayload(text []byte) (p payload, err error) {
	if err := json.Unmarshal(text, &p); err != nil {
		return p, fmt.Errorf("payload: %w", err)
	}
	return p, nil
}

// performExec runs the command, and kills it when ctx ends.
func (r *runner) performExec(ctx context.Context, a *attempt) error {
	cmd := exec.CommandContext(ctx, r.command, "task")
	cmd.Env = []string{
		"PATH=" + os.Getenv("PATH"), "CHAOS_WITNESS=" + r.observer,
		"ONEJOB_TASK_ID=" + strconv.FormatInt(a.ID, 10), "ONEJOB_ATTEMPT=" + strconv.Itoa(a.Attempt),
		"ONEJOB_FENCE=" + strconv.FormatInt(a.Fence, 10), "ONEJOB_LOCK_KEY=" + a.Key, "ONEJOB_REPLICA=" + r.replica,
	}
	cmd.Stdin = bytes.NewReader(a.Payload)
	cmd.Stderr = os.Stderr
	cmd.WaitDelay = time.Second
	return cmd.Run()
}

var errMeant = errors.New("it fails, as it was told to")

// performGo works under the observer's eyes.
func (r *runner) performGo(ctx context.Context, a *attempt, p payload) error {
	v, err := observer.Enter(ctx, r.observer, observer.Claim{Task: a.ID, Attempt: a.Attempt, Fence: a.Fence, Key: a.Key, Kind: "go", Replica: r.replica})
	if err != nil {
		return err
	}
	switch err := v.Stay(ctx, time.Duration(p.MS)*time.Millisecond); {
	case ctx.Err() != nil:
		return errors.Join(context.Cause(ctx), v.Leave(observer.Stopped))
	case err != nil:
		return err
	case a.Attempt <= p.Failures:
		return errors.Join(errMeant, v.Leave(observer.Failed))
	}
	return v.Leave(observer.Succeeded)
}

type httpClient struct{ *http.Client }

func newHTTPClient() httpClient {
	return httpClient{&http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 16, IdleConnTimeout: time.Minute}}}
}

// perform sends the request with the headers that onejob sends.
func (c httpClient) perform(ctx context.Context, a *attempt, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	id := strconv.FormatInt(a.ID, 10)
	req.Header.Set("Onejob-Task-Id", id)
	req.Header.Set("Onejob-Attempt", strconv.Itoa(a.Attempt))
	req.Header.Set("Onejob-Fence", strconv.FormatInt(a.Fence, 10))
	req.Header.Set("Idempotency-Key", "task-"+id)
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return err
	}
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("answered %s", resp.Status)
	}
	return nil
}

// performSQL lets the statement take effect, in a transaction of its own: the
// status is another write, as it is for every kind.
func (r *runner) performSQL(ctx context.Context, a *attempt, seconds float64) error {
	return pgx.BeginFunc(ctx, r.pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
SELECT set_config('onejob.task_id', $1, true), set_config('onejob.attempt', $2, true),
       set_config('onejob.fence', $3, true), set_config('onejob.lock_key', $4, true)`,
			strconv.FormatInt(a.ID, 10), strconv.Itoa(a.Attempt), strconv.FormatInt(a.Fence, 10), a.Key)
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, r.effect, seconds)
		return err
	})
}
