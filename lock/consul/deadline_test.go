package consul

import (
	"errors"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"onejob/boottime"
	"onejob/internal/testenv"
	"onejob/lock"
)

// slowAnswers delays the answers to requests for a path, and notes when the last one that was
// answered was sent. Requests for another path fail.
type slowAnswers struct {
	path, failing string
	by            time.Duration

	mu       sync.Mutex
	sent     boottime.Instant
	answered int
}

func (s *slowAnswers) RoundTrip(r *http.Request) (*http.Response, error) {
	if s.failing != "" && strings.HasPrefix(r.URL.Path, s.failing) {
		return nil, errors.New("not in this test")
	}
	sent := boottime.Now()
	answer, err := http.DefaultTransport.RoundTrip(r)
	if err == nil && strings.HasPrefix(r.URL.Path, s.path) {
		select {
		case <-time.After(s.by):
		case <-r.Context().Done():
			_ = answer.Body.Close()
			return nil, r.Context().Err()
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.sent = sent
		s.answered++
	}
	return answer, err
}

func (s *slowAnswers) last() (sent boottime.Instant, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sent, s.answered
}

// Consul counts from when it got a request, which is before the answer. So a deadline counts
// from before the request was sent, however long the answer takes.
func TestDeadlinesCountFromTheRequest(t *testing.T) {
	kv := testenv.Consul(t)
	for name, test := range map[string]struct {
		path   string
		times  int // that the request is answered at least
		change func(*Config)
		timing func(Config) lock.Timing
	}{
		"creation": {"/v1/session/create", 1, func(cfg *Config) { cfg.Liveness = TTL }, Config.session},
		"renewal":  {"/v1/session/renew", 4, func(cfg *Config) { cfg.Liveness, cfg.Renew = TTL, 100*time.Millisecond }, Config.session},
		"heartbeat": {"/v1/agent/check/update", 4, func(cfg *Config) {
			cfg.CheckTTL, cfg.Heartbeat, cfg.Renew = time.Minute, 100*time.Millisecond, time.Minute
			cfg.SessionTTL = time.Hour
		}, Config.check},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			slow := &slowAnswers{path: test.path, by: 500 * time.Millisecond}
			if name == "creation" {
				slow.failing = "/v1/session/renew"
			}
			cfg := config(t, kv)
			cfg.SessionTTL, cfg.RoundTripper = 3*time.Minute, slow
			test.change(&cfg)
			l := start(t, cfg)
			lease := acquire(t, l, name)
			timing := test.timing(cfg.WithDefaults())
			testenv.Eventually(t, maxWait, "some answers", func() bool {
				deadline := lease.Deadline()
				sent, n := slow.last()
				if latest := timing.Deadline(sent); n > 0 && deadline > latest {
					t.Fatalf("after %d answers the lease ends %v later than the last request allows", n, deadline.Sub(latest))
				}
				return n >= test.times
			})
			release(t, lease)
		})
	}
}
