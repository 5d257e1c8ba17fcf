package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// FuzzConfig checks that a configuration is refused with a word, or can be used:
// none makes the program panic.
func FuzzConfig(f *testing.F) {
	example, err := os.ReadFile("../../config.example.yaml")
	if err != nil {
		f.Fatal(err)
	}
	for _, seed := range []string{
		string(example), "", "worker: {concurrency: 8}", "worker: 8", "- a", "worker: {concurrency: -1}", "consul: {check_ttl: 1}",
		"kinds: {exec: {commands: {a: {path: x}}}}", "kinds: {http: {allow: [x]}}", "limits: {slots: {a: 1e9}}", "a: &a [*a]", "? {}", "\x00",
		"worker: {poll: '@every 1ms'}", "kinds: {sql: {statements: {a: {sql: 'select $2', params: [x, x]}}}}",
	} {
		f.Add(seed)
	}
	path := filepath.Join(f.TempDir(), "config.yaml")
	f.Fuzz(func(t *testing.T, text string) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		cfg, err := loadConfig(path, nil)
		if err != nil {
			if strings.TrimSpace(err.Error()) == "" {
				t.Errorf("%q is refused without a word", text)
			}
			return
		}
		_ = cfg.storeConfig()
		if _, err := cfg.kinds(nil, nil); err != nil && strings.TrimSpace(err.Error()) == "" {
			t.Errorf("%q has kinds that are refused without a word", text)
		}
	})
}
