package snapshot

import "testing"

// A URL may have a secret in its query or for its user, and a header one anywhere. What cannot be
// taken apart, because it is of another form or was cut off, is not shown.
func TestTargetShowsNoSecrets(t *testing.T) {
	for payload, want := range map[string]string{
		`{"url": "https://user:secret@example.com/a?token=secret", "method": "PUT"}`: "PUT https://example.com/a",
		`{"url": "https://example.com/a?token=secret", "body": "xxx`:                 "",
		`{"uri": "https://example.com/a?token=secret"}`:                              "",
		`{"url": 5, "headers": {"authorization": "secret"}}`:                         "",
		`{"url": "://secret"}`: "",
	} {
		if got := Target("http", []byte(payload)); got != want {
			t.Errorf("of %s it shows %q, want %q", payload, got, want)
		}
	}
	if got := Target("pdf", []byte(`{"page": 1}`)); got != `{"page": 1}` {
		t.Errorf("of another kind it shows %q", got)
	}
}
