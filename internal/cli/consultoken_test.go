package cli

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// A token in the settings overrides one in Consul's variables, also one in a file.
func TestTheTokenOfTheSettingsIsSent(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("of the environment"), 0o600); err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	sent := map[string]bool{}
	consul := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		sent[r.Header.Get("X-Consul-Token")] = true
		http.NotFound(w, r)
	}))
	t.Cleanup(consul.Close)
	t.Setenv("CONSUL_HTTP_ADDR", consul.Listener.Addr().String())
	t.Setenv("CONSUL_HTTP_TOKEN", "of the environment")
	t.Setenv("CONSUL_HTTP_TOKEN_FILE", file)
	for _, token := range []string{"", "of the settings"} {
		t.Setenv("ONEJOB_CONSUL_TOKEN", token)
		want := token
		if want == "" {
			want = "of the environment"
		}
		clear(sent)
		var out, errs bytes.Buffer
		run(t.Context(), Program{}, []string{"leader"}, strings.NewReader(""), &out, &errs)
		if len(sent) != 1 || !sent[want] {
			t.Errorf("with the setting %q the tokens %v were sent, want %q: %s", token, sent, want, &errs)
		}
	}
}
