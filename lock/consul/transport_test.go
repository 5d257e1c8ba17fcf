package consul

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hashicorp/consul/api"

	"onejob/internal/servers"
	"onejob/internal/testenv"
)

// TestTLS talks to an agent that demands a certificate, and whose own is signed by a
// private authority for the name consul.test.
func TestTLS(t *testing.T) {
	t.Parallel()
	server, client := testenv.Certificates(t, "consul.test")
	_, kv := testenv.OwnConsul(t, servers.ConsulConfig{TLS: &server, Client: client, ServerName: "consul.test"})
	right := api.TLSConfig{Address: "consul.test", CAFile: client.CA, CertFile: client.Cert, KeyFile: client.Key}
	with := func(t *testing.T, address string, tls api.TLSConfig) Config {
		cfg := config(t, kv)
		cfg.Client.Address, cfg.Client.TLSConfig = address, tls
		return cfg
	}
	address := "https://" + kv.Addr

	for name, liveness := range map[string]Liveness{"check": Check, "ttl": TTL} {
		t.Run("locks/"+name, func(t *testing.T) {
			t.Parallel()
			cfg := with(t, address, right)
			cfg.Liveness = liveness
			l := start(t, cfg)
			lease := acquire(t, l, name)
			before := lease.Deadline()
			testenv.Eventually(t, maxWait, "the lease is extended", func() bool { return before.Before(lease.Deadline()) })
			if holder(t, kv, "tasks/"+name) != l.Session() {
				t.Error("the key is not held")
			}
			release(t, lease)
		})
	}
	t.Run("a certificate is replaced", func(t *testing.T) {
		t.Parallel()
		tls := right
		dir := t.TempDir()
		tls.CertFile, tls.KeyFile = filepath.Join(dir, "cert"), filepath.Join(dir, "key")
		put := func(files servers.TLS) {
			for from, to := range map[string]string{files.Cert: tls.CertFile, files.Key: tls.KeyFile} {
				content, err := os.ReadFile(from)
				if err == nil {
					err = os.WriteFile(to, content, 0o600)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
		}
		_, foreign := testenv.Certificates(t)
		put(foreign)
		l := create(t, with(t, address, tls))
		run(t, l)
		if refusal(t, l) == nil {
			t.Error("the certificate of a stranger was accepted")
		}
		put(client)
		ready(t, l)
	})
	for name, test := range map[string]struct {
		address string
		tls     api.TLSConfig
		want    string
	}{
		"no authority":     {address, api.TLSConfig{Address: "consul.test", CertFile: client.Cert, KeyFile: client.Key}, "; set consul.ca_file (CONSUL_CACERT) "},
		"no server name":   {address, api.TLSConfig{CAFile: client.CA, CertFile: client.Cert, KeyFile: client.Key}, "; set consul.tls_server_name (CONSUL_TLS_SERVER_NAME) "},
		"no certificate":   {address, api.TLSConfig{Address: "consul.test", CAFile: client.CA}, "; does the agent accept the client certificate? (consul.cert_file and consul.key_file, "},
		"http, not https":  {kv.Addr, api.TLSConfig{}, "; write consul.address (CONSUL_HTTP_ADDR) with https://"},
		"nothing but name": {address, api.TLSConfig{Address: "consul.test"}, "; set consul.ca_file (CONSUL_CACERT) "},
	} {
		t.Run("refused/"+name, func(t *testing.T) {
			t.Parallel()
			l := create(t, with(t, test.address, test.tls))
			run(t, l)
			err := refusal(t, l)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got error %v, want %s", err, test.want)
			}
		})
	}
}

func TestClientProblems(t *testing.T) {
	_, client := testenv.Certificates(t)
	_, other := testenv.Certificates(t)
	empty := t.TempDir()
	const https = "https://consul:8501"
	for name, test := range map[string]struct {
		address string
		tls     api.TLSConfig
		want    string // empty if it is right
	}{
		"all":                  {https, api.TLSConfig{Address: "x", CAFile: client.CA, CertFile: client.Cert, KeyFile: client.Key}, ""},
		"https alone":          {https, api.TLSConfig{}, ""},
		"directory":            {https, api.TLSConfig{CAPath: filepath.Dir(client.CA)}, "consul.ca_file or consul.cert_file: "}, // there are keys in it
		"missing authority":    {https, api.TLSConfig{CAFile: "/no/ca"}, "consul.ca_file: open /no/ca: no such file or directory; name a PEM file "},
		"authority is no PEM":  {https, api.TLSConfig{CAFile: "/proc/self/cmdline"}, "consul.ca_file: /proc/self/cmdline has no certificate in PEM format"},
		"missing directory":    {https, api.TLSConfig{CAPath: "/no/dir"}, "consul.ca_path: open /no/dir: no such file or directory; name a directory "},
		"empty directory":      {https, api.TLSConfig{CAPath: empty}, "is empty; it must have PEM files in it"},
		"key alone":            {https, api.TLSConfig{KeyFile: client.Key}, "consul.cert_file: it is missing; consul.key_file needs the certificate"},
		"certificate alone":    {https, api.TLSConfig{CertFile: client.Cert}, "consul.key_file: it is missing; consul.cert_file needs the key"},
		"missing key":          {https, api.TLSConfig{CertFile: client.Cert, KeyFile: "/no/key"}, "consul.cert_file: open /no/key: no such file or directory; "},
		"key of another":       {https, api.TLSConfig{CertFile: client.Cert, KeyFile: other.Key}, "consul.cert_file: tls: private key does not match public key; "},
		"plain with authority": {"http://consul:8500", api.TLSConfig{CAFile: client.CA}, "consul.address: consul.ca_file (CONSUL_CACERT) is set, but http://consul:8500 is not encrypted: write https:// "},
		"plain with directory": {"consul:8500", api.TLSConfig{CAPath: empty}, "consul.address: consul.ca_path (CONSUL_CAPATH) is set, but http://consul:8500 is not encrypted"},
		"plain with key":       {"consul:8500", api.TLSConfig{CertFile: client.Cert, KeyFile: client.Key}, "consul.address: consul.cert_file (CONSUL_CLIENT_CERT) is set, but "},
		"plain with name":      {"consul:8500", api.TLSConfig{Address: "x"}, "consul.address: consul.tls_server_name (CONSUL_TLS_SERVER_NAME) is set, but "},
		"socket":               {"unix:///run/consul@1", api.TLSConfig{CAFile: client.CA}, ""},
		"other scheme":         {"ftp://u:sEcReT@consul", api.TLSConfig{}, "consul.address: it must begin with http://, https:// or unix://"},
		"password":             {"http://u:sEcReT@consul:8500", api.TLSConfig{}, "consul.address: it has a user or a password in it, which is not supported: set consul.token "},
		"password, bare":       {"u:sEcReT@consul:8500", api.TLSConfig{CAFile: client.CA}, "consul.address: it has a user or a password in it"},
		"token":                {"http://consul:8500/?token=sEcReT", api.TLSConfig{}, "consul.address: it has a query in it"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := New(Config{Client: &api.Config{Address: test.address, TLSConfig: test.tls}})
			switch {
			case test.want == "" && err != nil:
				t.Errorf("refused: %v", err)
			case test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)):
				t.Errorf("got error %v, want %s", err, test.want)
			case err != nil && strings.Contains(err.Error(), "sEcReT"):
				t.Errorf("told: %v", err)
			}
		})
	}
	for name, test := range map[string]struct{ name, value, address, want string }{
		"verify is no bool": {"CONSUL_HTTP_SSL_VERIFY", "no", https, `variable CONSUL_HTTP_SSL_VERIFY: "no" is neither true nor false`},
		"ssl is no bool":    {"CONSUL_HTTP_SSL", "yes", https, `variable CONSUL_HTTP_SSL: "yes" is neither true nor false`},
		"ssl":               {"CONSUL_HTTP_SSL", "true", "consul:8501", ""},
		"ssl over http":     {"CONSUL_HTTP_SSL", "true", "http://consul:8501", ""},
		"authority":         {"CONSUL_CACERT", "/no/ca", https, "consul.ca_file: open /no/ca"},
		"certificate":       {"CONSUL_CLIENT_CERT", "/no/cert", https, "consul.key_file: it is missing"},
	} {
		t.Run("variable/"+name, func(t *testing.T) {
			t.Setenv(test.name, test.value)
			cfg := Config{Client: api.DefaultConfig()}
			cfg.Client.Address = test.address
			_, err := New(cfg)
			switch {
			case test.want == "" && err != nil:
				t.Errorf("refused: %v", err)
			case test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)):
				t.Errorf("got error %v, want %s", err, test.want)
			}
		})
	}
}

// Namespaces and partitions are left to the library.
func TestNamespaceAndPartition(t *testing.T) {
	queries := make(chan url.Values, 10)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		queries <- r.URL.Query()
		w.WriteHeader(http.StatusNotFound)
	}))
	defer server.Close()
	t.Setenv("CONSUL_HTTP_ADDR", server.URL)
	t.Setenv("CONSUL_NAMESPACE", "n")
	t.Setenv("CONSUL_PARTITION", "p")
	l := create(t, Config{})
	defer func() {
		for _, transport := range l.transports {
			transport.CloseIdleConnections()
		}
	}()
	_, _ = l.Leader(t.Context())
	_, _, _ = l.Holder(t.Context(), "k")
	for range 2 {
		if q := <-queries; q.Get("ns") != "n" || q.Get("partition") != "p" {
			t.Errorf("a request has %v", q)
		}
	}
}

// A proxy whose address cannot be understood may have a password in it.
func TestProxyPasswordIsNotTold(t *testing.T) {
	client := api.DefaultConfig()
	client.Address = "http://consul.invalid:8500"
	client.Transport.Proxy = func(*http.Request) (*url.URL, error) {
		return nil, errors.New(`invalid proxy address "http://u:sEcReT@proxy:port": invalid port`) // as net/http says it
	}
	l := create(t, Config{Client: client})
	_, _, err := l.Holder(t.Context(), "a")
	if err == nil || strings.Contains(err.Error(), "sEcReT") || !strings.Contains(err.Error(), "HTTP_PROXY or HTTPS_PROXY") {
		t.Errorf("told: %v", err)
	}
}

func TestPlain(t *testing.T) {
	for key, want := range map[string]bool{
		"a": true, "service/onejob/tasks/a": true, "a/": true, "a b": true, "a%2Fb": true, "ä": true, "a.b/..c/.d": true, "a?b#c": true,
		"../leader": false, "a//b": false, "./x": false, "a/..": false, "a/.": false, "//x//": false, "/x": false, "a//": false,
		"a\u200db": false, "a\x00": false, "a\u00a0b": false,
	} {
		if got := plain(key); got != want {
			t.Errorf("%q is plain: %v, want %v", key, got, want)
		}
	}
}
