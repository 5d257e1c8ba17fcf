package main

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

func TestCountLocks(t *testing.T) {
	const two = `[{"KV":{"Verb":"lock","Key":"p/running/1"}},{"KV":{"Verb":"lock","Key":"p/tasks/b"}}]`
	const guarded = `[{"KV":{"Verb":"check-not-exists","Key":"p/running/1"}},{"KV":{"Verb":"lock","Key":"p/running/1"}},{"KV":{"Verb":"lock","Key":"p/tasks/b"}}]`
	for _, c := range []struct {
		name, request string
		status        int
		answer        string
		want          lockCount
	}{
		{"granted", two, 200, `{"Results":[],"Errors":null}`, lockCount{Attempts: 2}},
		{"one of two is refused", two, 409, `{"Errors":[{"OpIndex":1,"What":"lock is already held"}]}`, lockCount{Attempts: 2, Refused: 1, Vain: 2}},
		{"one refused twice counts once", two, 409, `{"Errors":[{"OpIndex":1},{"OpIndex":1}]}`, lockCount{Attempts: 2, Refused: 1, Vain: 2}},
		{"refused by the check before it", guarded, 409, `{"Errors":[{"OpIndex":0}]}`, lockCount{Attempts: 2, Refused: 1, Vain: 2}},
		{"Consul was away", two, 500, `No cluster leader`, lockCount{Attempts: 2, Vain: 2}},
		{"a release is no attempt", `[{"KV":{"Verb":"check-session","Key":"p/running/1"}},{"KV":{"Verb":"delete","Key":"p/running/1"}}]`, 409, `{"Errors":[{"OpIndex":0}]}`, lockCount{}},
		{"a bid for leadership is no lock of a task", `[{"KV":{"Verb":"lock","Key":"p/leader"}}]`, 409, `{"Errors":[{"OpIndex":0}]}`, lockCount{}},
		{"no transaction", `?`, 400, ``, lockCount{}},
	} {
		if got := countLocks([]byte(c.request), c.status, []byte(c.answer)); got != c.want {
			t.Errorf("%s: got %+v, want %+v", c.name, got, c.want)
		}
	}
}

// What goes through the proxy arrives as it was, and is counted.
func TestProxy(t *testing.T) {
	behind := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.WriteHeader(http.StatusConflict)
		_, _ = io.WriteString(w, r.Method+" "+r.URL.String()+" "+string(body))
	}))
	defer behind.Close()
	var seen []string
	p, err := startProxy(strings.TrimPrefix(behind.URL, "http://"), func(request []byte, status int, answer []byte) {
		seen = append(seen, string(request)+" "+http.StatusText(status)+" "+string(answer))
	})
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	for _, path := range []string{"/v1/kv/a?raw", "/v1/txn?dc=x"} {
		req, err := http.NewRequest(http.MethodPut, "http://"+p.address+path, strings.NewReader("hello"))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if got, want := string(body), "PUT "+path+" hello"; got != want || resp.StatusCode != http.StatusConflict {
			t.Errorf("got %d %q, want 409 %q", resp.StatusCode, got, want)
		}
	}
	if got := p.requests.Load(); got != 2 {
		t.Errorf("%d requests were counted, not 2", got)
	}
	if len(seen) != 1 || seen[0] != "hello Conflict PUT /v1/txn?dc=x hello" {
		t.Errorf("the transactions seen are %q", seen)
	}
}
