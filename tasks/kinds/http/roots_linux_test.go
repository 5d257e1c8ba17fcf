package http

import (
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

// The first request of a process finds no file descriptor left but that of its connection. It is sent anyway:
// the certificate authorities were read before.
func TestNoFileForTheAuthorities(t *testing.T) {
	const where = "HTTP_TEST_SERVER"
	if url := os.Getenv(where); url != "" {
		k := newKind(t, Config{Allow: []string{url}})
		warm := newKind(t, Config{Allow: []string{"http://127.0.0.1:1"}}) // the runtime opens files of its own for the first connection
		_, _ = run(t.Context(), warm, httpAttempt(t, object{"url": "http://127.0.0.1:1"}))
		next, err := os.Open(os.DevNull)
		if err != nil {
			t.Fatal(err)
		}
		free := uint64(next.Fd())
		next.Close()
		limit := syscall.Rlimit{Cur: free + 1, Max: free + 1}
		if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
			t.Fatal(err)
		}
		if _, err := run(t.Context(), k, httpAttempt(t, object{"url": url})); err != nil {
			t.Error(err)
		}
		return
	}
	server := httptest.NewTLSServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer server.Close()
	file := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	child := exec.Command(os.Args[0], "-test.run", "^TestNoFileForTheAuthorities$")
	child.Env = append(os.Environ(), where+"="+server.URL, "SSL_CERT_FILE="+file, "NO_PROXY=*")
	if out, err := child.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}
