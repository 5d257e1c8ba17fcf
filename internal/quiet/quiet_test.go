package quiet

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
)

func TestURL(t *testing.T) {
	for text, want := range map[string]string{
		"amqp://u:sEcReT@host:port/": "invalid port",
		"amqp://u:sEcReT/x@host/":    "invalid port",
		"amqp://u:%zzsEcReT@host/":   "invalid URL escape",
		"amqp://u:a sEcReT@host/":    "net/url: invalid userinfo",
		"amqp://u@h sEcReT/":         "invalid character",
		":sEcReT":                    "missing protocol scheme",
	} {
		_, err := url.Parse(text)
		if err == nil {
			t.Errorf("%s: it was parsed", text)
			continue
		}
		if got := URL(fmt.Errorf("wrapped: %w", err)).Error(); got != want {
			t.Errorf("%s: got %q, want %q", text, got, want)
		}
	}
	if got := URL(errors.New(`no URL "sEcReT"`)).Error(); strings.Contains(got, "sEcReT") {
		t.Errorf("told: %s", got)
	}
}

func TestProxy(t *testing.T) {
	want := &url.URL{Host: "proxy"}
	got, err := Proxy(func(*http.Request) (*url.URL, error) { return want, nil })(nil)
	if got != want || err != nil {
		t.Errorf("got %v, %v", got, err)
	}
	_, err = Proxy(func(*http.Request) (*url.URL, error) { return nil, errors.New("sEcReT") })(nil)
	if err == nil || strings.Contains(err.Error(), "sEcReT") {
		t.Errorf("told: %v", err)
	}
}
