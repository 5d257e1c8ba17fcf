package consul

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"
)

func TestValidate(t *testing.T) {
	if err := (Config{}).Validate(); err != nil {
		t.Errorf("the defaults are refused: %v", err)
	}
	for _, test := range []struct {
		cfg  Config
		want string // in the error
	}{
		{Config{Prefix: "/a"}, `consul.prefix: "/a" must neither begin nor end with a slash`},
		{Config{Prefix: "a/"}, `consul.prefix: "a/" must neither begin nor end with a slash`},
		{Config{Prefix: "a//b"}, `consul.prefix: "a//b" must not have //, /./ or /../ in it`},
		{Config{Prefix: "../b"}, `consul.prefix: "../b" must not have //, /./ or /../ in it`},
		{Config{Liveness: "hope"}, `consul.liveness: "hope" is neither check nor ttl`},
		{Config{CheckTTL: 2 * time.Second}, "consul.check_ttl: a lease lasts TTL 2s - margin 1s = 1s after a heartbeat"},
		{Config{Margin: -time.Second}, "margin -1s must all be above zero"},
		{Config{SessionTTL: 9 * time.Second}, "consul.session_ttl: 9s is outside what Consul accepts, 10s to 24h"},
		{Config{SessionTTL: 10 * time.Second, Renew: 5 * time.Second}, "consul.session_ttl: a lease lasts TTL 10s - margin 1s = 9s after a heartbeat"},
		{Config{SessionTTL: 25 * time.Hour}, "consul.session_ttl: 25h0m0s is outside"},
		{Config{LockDelay: 2 * time.Minute}, "consul.lock_delay: 2m0s is outside 1ms to 1m"},
		{Config{LockDelay: -1}, "consul.lock_delay: -1ns is outside 1ms to 1m"},
		{Config{Verify: time.Millisecond}, "consul.verify: 1ms is below 100ms"},
		{Config{Heartbeat: time.Millisecond}, "consul.heartbeat: 1ms is below 50ms"},
	} {
		if err := test.cfg.Validate(); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("got error %v, want %s", err, test.want)
		}
	}
	err := Config{Prefix: "/", Verify: 1, LockDelay: 1}.Validate()
	for _, want := range []string{"prefix", "verify", "lock_delay"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("not all is told at once: %v", err)
		}
	}
	if _, err := New(Config{Client: &api.Config{HttpClient: &http.Client{}}}); err == nil {
		t.Error("a ready-made HTTP client was accepted, though connections would be shared")
	}
}

func TestTokenFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "token")
	write := func(text string) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cfg := Config{Client: &api.Config{Token: "other", TokenFile: path}}
	if _, err := New(cfg); err == nil {
		t.Error("a token file that does not exist was accepted")
	}
	write("one\n")
	l := create(t, cfg)
	for _, step := range []struct{ text, want string }{
		{"one\n", "one"}, // before the token
		{"", "one"},      // just being written
		{" two \n", "two"},
	} {
		write(step.text)
		l.token.looked = time.Time{} // a second is over
		if got := l.token.current(); got != step.want {
			t.Errorf("with %q in the file the token is %q, want %q", step.text, got, step.want)
		}
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	l.token.looked = time.Time{}
	if got := l.token.current(); got != "two" {
		t.Errorf("without the file the token is %q, want the last", got)
	}
}

func TestNextIndex(t *testing.T) {
	for _, test := range []struct{ before, told, want uint64 }{
		{0, 5, 5}, {5, 5, 5}, {5, 7, 7},
		{7, 5, 0}, // Consul was rebuilt
		{0, 0, 1}, // zero would not wait
	} {
		if got := nextIndex(test.before, &api.QueryMeta{LastIndex: test.told}); got != test.want {
			t.Errorf("after %d Consul tells %d: watch from %d, want %d", test.before, test.told, got, test.want)
		}
	}
}
