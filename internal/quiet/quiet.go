// Package quiet keeps passwords out of errors. Those of net/url and net/http repeat
// what they could not understand, which may be a URL with a password in it, or the part
// of a password that comes after a slash.
package quiet

import (
	"errors"
	"net/http"
	"net/url"
	"strings"
)

// URL returns why a URL could not be parsed, without repeating any of it. It takes the
// error of url.Parse, or one that wraps it.
func URL(err error) error {
	text := "it cannot be parsed"
	if parse, ok := errors.AsType[*url.Error](err); ok {
		text = parse.Err.Error()
	}
	text, _, _ = strings.Cut(text, `"`)
	return errors.New(strings.TrimSpace(text))
}

// Proxy returns a function for http.Transport.Proxy that does what proxy does, and does
// not repeat a proxy's address.
func Proxy(proxy func(*http.Request) (*url.URL, error)) func(*http.Request) (*url.URL, error) {
	return func(r *http.Request) (*url.URL, error) {
		u, err := proxy(r)
		if err != nil {
			return nil, errors.New("the proxy's address in HTTP_PROXY or HTTPS_PROXY cannot be understood; correct it, or name the host in NO_PROXY")
		}
		return u, nil
	}
}
