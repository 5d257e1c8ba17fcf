package cli

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"onejob/internal/web"
)

func TestActTokens(t *testing.T) {
	t.Parallel()
	const token, other = "0123456789abcdef", "fedcba9876543210"
	for _, test := range []struct{ name, content, want string }{
		{"Empty", "", "no line has a NAME and a TOKEN"},
		{"OnlyComments", "# nobody yet\n\n", "no line has a NAME and a TOKEN"},
		{"NameAlone", "alice " + token + "\n\n# bob\nbob\n", "line 4 has 1 word; write it as NAME TOKEN"},
		{"ThreeWords", "alice smith " + token, "line 1 has 3 words; write it as NAME TOKEN"},
		{"ShortToken", "alice 0123456789abcde", "line 1: the token has 15 characters, fewer than 16"},
		{"LongName", strings.Repeat("a", 101) + " " + token, "line 1: the name has 101 characters, more than 100"},
		{"UnprintableName", "al\u202eice " + token, "line 1: the name has a character that cannot be printed"},
		{"InvalidName", "al\xffice " + token, "line 1: the name has a character that cannot be printed"},
		{"Colon", "al:ice " + token, "line 1: the name has a colon, which a browser cannot send"},
		{"SameName", "alice " + token + "\nbob " + token + "x\nalice " + other, "line 3: line 1 has the same name"},
		{"SameToken", "alice " + token + "\nbob " + token, "line 2: line 1 has the same token"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			tokens, err := parseActTokens([]byte(test.content))
			if err == nil || err.Error() != test.want {
				t.Fatalf("%v, %v; want %s", tokens, err, test.want)
			}
		})
	}
	t.Run("Valid", func(t *testing.T) {
		t.Parallel()
		got, err := parseActTokens([]byte("# who may act\r\n\n  alice\t" + token + "\r\n#bob " + token + "\n" + strings.Repeat("é", 100) + " " + other + "\n"))
		want := []web.ActToken{{Name: "alice", Token: token}, {Name: strings.Repeat("é", 100), Token: other}}
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%v, %v; want %v", got, err, want)
		}
	})
}

func TestActTokensFile(t *testing.T) {
	t.Parallel()
	none := mustLoad(t, "")
	if read, err := none.actTokens(); read != nil || err != nil {
		t.Errorf("without the setting: %v", err)
	}
	path := filepath.Join(t.TempDir(), "act-tokens")
	c := defaults()
	c.HTTP.ActTokensFile = path
	if _, err := c.actTokens(); err == nil || !strings.HasPrefix(err.Error(), "http.act_tokens_file: open "+path) {
		t.Errorf("of no file: %v", err)
	}
	write := func(content string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("alice secret\n")
	if _, err := c.actTokens(); err == nil || err.Error() != "http.act_tokens_file: "+path+": line 1: the token has 6 characters, fewer than 16" {
		t.Errorf("of a short token: %v", err)
	}
	write("alice 0123456789abcdef\n")
	read, err := c.actTokens()
	if err != nil {
		t.Fatal(err)
	}
	write("bob fedcba9876543210\n")
	if tokens, err := read(); err != nil || !slices.Equal(tokens, []web.ActToken{{Name: "bob", Token: "fedcba9876543210"}}) {
		t.Errorf("after a change: %v, %v", tokens, err)
	}
	write("bob\n")
	if tokens, err := read(); err == nil || tokens != nil {
		t.Errorf("after a wrong change: %v, %v", tokens, err)
	}
}
