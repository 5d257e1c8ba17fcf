package snapshot_test

import (
	"testing"

	"onejob/internal/snapshot"
)

func TestPatternsMatchWhatIsMasked(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ text, pattern string }{
		{"exit status 3", "exit status %"},
		{"Not found: N", "Not found: N"},
		{"dial 10.0.4.7:443: refused", "dial %: refused"},
		{"task 6f1c9f6e-0b53-4c6e-9a53-7c1f9d0a2b11 of 0xdeadbeef", "task % of %"},
		{"defaced a12345678.5b", "defaced %.%b"},
		{`100% of C:\a_b`, `%\% of C:\\a\_b`},
		{"first\r\n\tsecond\u202e\x00end", "first%second% end"},
		{"a\xffb", "a%b"},
		{"", ""},
	} {
		if got := snapshot.Pattern(test.text); got != test.pattern {
			t.Errorf("the pattern of %q is %q, want %q", test.text, got, test.pattern)
		}
	}
}
