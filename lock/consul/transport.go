package consul

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/hashicorp/consul/api"

	"onejob/internal/quiet"
)

// maxConns is how many connections are kept for the next request: one for
// each transaction that may be under way, and for each key that is watched.
const maxConns = 16

// keepAlive ends a connection about 11 s after the other side was last heard, while a query
// waits over it.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 2 * time.Second, Count: 3}

// scheme returns http, https or unix, by which the client reaches its address, and the
// address without it.
func scheme(client *api.Config) (scheme, address string) {
	defaults := api.DefaultConfig() // what the library takes in place of an empty field
	if scheme = client.Scheme; scheme == "" {
		scheme = defaults.Scheme
	}
	if address = client.Address; address == "" {
		address = defaults.Address
	}
	if before, after, ok := strings.Cut(address, "://"); ok {
		if before != "http" { // CONSUL_HTTP_SSL wins over http://
			scheme = before
		}
		address = after
	}
	return scheme, address
}

// checkClient returns what is wrong with how Consul is to be reached. The errors do
// not repeat an address that may have a password in it.
func checkClient(client *api.Config) error {
	var errs []error
	for _, name := range []string{api.HTTPSSLEnvName, api.HTTPSSLVerifyEnvName} {
		// The library goes on without TLS, or without verifying, if it cannot read them.
		if text := os.Getenv(name); text != "" {
			if _, err := strconv.ParseBool(text); err != nil {
				errs = append(errs, fmt.Errorf("variable %s: %q is neither true nor false", name, text))
			}
		}
	}
	scheme, address := scheme(client)
	switch {
	case scheme == "unix":
		return errors.Join(errs...)
	case scheme != "http" && scheme != "https":
		errs = append(errs, errors.New("consul.address: it must begin with http://, https:// or unix://, or be HOST:PORT"))
	case strings.Contains(address, "@"):
		errs = append(errs, errors.New("consul.address: it has a user or a password in it, which is not supported: "+
			"set consul.token or consul.token_file, or CONSUL_HTTP_AUTH=USER:PASSWORD for a proxy that asks for it"))
	case strings.ContainsAny(address, "?#"):
		errs = append(errs, errors.New("consul.address: it has a query in it, which is not supported: write HOST:PORT, http://HOST:PORT or https://HOST:PORT"))
	case scheme == "http":
		if name := firstTLS(client.TLSConfig); name != "" {
			errs = append(errs, fmt.Errorf("consul.address: %s is set, but http://%s is not encrypted: "+
				"write https:// and the agent's HTTPS port, or set CONSUL_HTTP_SSL=true", name, address))
		}
	}
	return errors.Join(errs...)
}

// firstTLS names a setting that makes sense with TLS only; empty if none is set.
// Whether certificates are verified is not among them: it asks for nothing.
func firstTLS(t api.TLSConfig) string {
	switch {
	case t.CAFile != "" || len(t.CAPem) > 0:
		return "consul.ca_file (CONSUL_CACERT)"
	case t.CAPath != "":
		return "consul.ca_path (CONSUL_CAPATH)"
	case t.CertFile != "" || len(t.CertPEM) > 0:
		return "consul.cert_file (CONSUL_CLIENT_CERT)"
	case t.KeyFile != "" || len(t.KeyPEM) > 0:
		return "consul.key_file (CONSUL_CLIENT_KEY)"
	case t.Address != "":
		return "consul.tls_server_name (CONSUL_TLS_SERVER_NAME)"
	}
	return ""
}

// tlsConfig returns how to speak TLS, nil if nothing is configured about it. A client
// certificate is read again for each connection, so that it can be replaced.
func tlsConfig(t api.TLSConfig) (*tls.Config, error) {
	if firstTLS(t) == "" && !t.InsecureSkipVerify {
		return nil, nil
	}
	var errs []error
	add := func(format string, a ...any) { errs = append(errs, fmt.Errorf(format, a...)) }
	switch pem, err := os.ReadFile(t.CAFile); {
	case t.CAFile == "":
	case err != nil:
		add("consul.ca_file: %w; name a PEM file with the certificate of the authority that signed the agent's (also CONSUL_CACERT)", err)
	case !x509.NewCertPool().AppendCertsFromPEM(pem):
		add("consul.ca_file: %s has no certificate in PEM format", t.CAFile)
	}
	switch files, err := os.ReadDir(t.CAPath); {
	case t.CAPath == "" || t.CAFile != "":
	case err != nil:
		add("consul.ca_path: %w; name a directory of PEM files (also CONSUL_CAPATH)", err)
	case len(files) == 0:
		add("consul.ca_path: %s is empty; it must have PEM files in it", t.CAPath)
	}
	var pair func() (*tls.Certificate, error)
	switch {
	case t.CertFile != "" && t.KeyFile == "":
		add("consul.key_file: it is missing; consul.cert_file needs the key that belongs to it (also CONSUL_CLIENT_KEY)")
	case t.CertFile == "" && t.KeyFile != "":
		add("consul.cert_file: it is missing; consul.key_file needs the certificate that belongs to it (also CONSUL_CLIENT_CERT)")
	case t.CertFile != "":
		pair = func() (*tls.Certificate, error) {
			c, err := tls.LoadX509KeyPair(t.CertFile, t.KeyFile)
			return &c, err
		}
		if _, err := pair(); err != nil {
			add("consul.cert_file: %w; consul.cert_file and consul.key_file must be PEM files that belong together (also CONSUL_CLIENT_CERT and CONSUL_CLIENT_KEY)", err)
		}
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	c, err := api.SetupTLSConfig(&t)
	if err != nil {
		return nil, fmt.Errorf("consul.ca_file or consul.cert_file: %w", err)
	}
	c.MinVersion = tls.VersionTLS12
	if pair != nil {
		first := &c.Certificates[0]
		c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			if now, err := pair(); err == nil {
				return now, nil
			}
			return first, nil // the files are just being replaced
		}
	}
	return c, nil
}

// transport returns a transport with connections of its own, for a client with the
// given settings.
func transport(client *api.Config, tls *tls.Config) *http.Transport {
	t := client.Transport.Clone()
	// Clone, too, makes net/http fill in a TLSClientConfig, and the library leaves alone
	// what is not nil.
	if tls != nil {
		t.TLSClientConfig = tls.Clone()
	}
	// HTTP/2 would put all requests on one connection, and leave them there when it
	// has gone dead. With HTTP/1 a request that gets no answer takes its connection along.
	t.Protocols = new(http.Protocols)
	t.Protocols.SetHTTP1(true)
	t.ForceAttemptHTTP2 = false
	if t.TLSClientConfig != nil {
		t.TLSClientConfig.NextProtos = nil
	}
	t.WriteBufferSize = 64 << 10 // a transaction in one write
	t.MaxIdleConnsPerHost = max(t.MaxIdleConnsPerHost, maxConns)
	if dial := t.DialContext; dial != nil {
		t.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := dial(ctx, network, address)
			if tcp, ok := conn.(*net.TCPConn); ok && err == nil {
				_ = tcp.SetKeepAliveConfig(keepAlive) // without it a dead connection is noticed later
			}
			return conn, err
		}
	}
	if t.Proxy != nil {
		t.Proxy = quiet.Proxy(t.Proxy)
	}
	return t
}

// A rawBody is the body of a request that goes past the library, which would check and copy
// each byte several times.
type rawBody struct {
	sent   []byte
	answer []byte // of an answer with status 200
	wanted bool   // or else the answer is read and forgotten
}

// rawBodyKey is the key of a *rawBody in the context of its request.
type rawBodyKey struct{}

// rawBodies puts raw bodies into requests whose contexts have one, and takes the answers out.
type rawBodies struct{ http.RoundTripper }

func (t rawBodies) RoundTrip(r *http.Request) (*http.Response, error) {
	raw, is := r.Context().Value(rawBodyKey{}).(*rawBody)
	if !is {
		return t.RoundTripper.RoundTrip(r)
	}
	r = r.Clone(r.Context())                    // the request is not ours to change
	r.Header.Set("Accept-Encoding", "identity") // to compress the answer takes both longer than to send it
	r.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(raw.sent)), nil }
	r.Body, _ = r.GetBody()
	r.ContentLength = int64(len(raw.sent))
	resp, err := t.RoundTripper.RoundTrip(r)
	if err != nil || resp.StatusCode != http.StatusOK {
		return resp, err
	}
	defer resp.Body.Close()
	if raw.wanted {
		answer := bytes.NewBuffer(make([]byte, 0, len(raw.sent)+1024))
		_, err = answer.ReadFrom(resp.Body)
		raw.answer = answer.Bytes()
	} else {
		_, err = io.Copy(io.Discard, resp.Body)
	}
	if err != nil {
		return nil, err
	}
	resp.Body = http.NoBody
	return resp, nil
}

// plain reports whether a key can be read by GET /v1/kv/KEY. Consul cleans the path of
// a request, as a file name is, and refuses what cannot be printed, while a
// transaction takes a key as it is.
func plain(key string) bool {
	cleaned := path.Clean("/" + key)
	if strings.HasSuffix(key, "/") {
		cleaned += "/"
	}
	return cleaned == "/"+key && !strings.ContainsFunc(key, func(r rune) bool { return !unicode.IsPrint(r) })
}
