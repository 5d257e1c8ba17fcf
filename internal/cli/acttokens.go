package cli

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"unicode"
	"unicode/utf8"

	"onejob/internal/plaintext"
	"onejob/internal/web"
)

// actTokens returns where to get the tokens from with which people act on the web page, nil
// if there are none. The file is read again for each request: an operator may change it.
func (c *Config) actTokens() (func() ([]web.ActToken, error), error) {
	path := c.HTTP.ActTokensFile
	if path == "" {
		return nil, nil
	}
	read := func() ([]web.ActToken, error) {
		b, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("http.act_tokens_file: %w", err)
		}
		tokens, err := parseActTokens(b)
		if err != nil {
			return nil, fmt.Errorf("http.act_tokens_file: %s: %w", path, err)
		}
		return tokens, nil
	}
	_, err := read()
	return read, err
}

// parseActTokens reads lines of a name and a token. Its errors name the line, and repeat
// nothing of it: what stands in place of a name may be a token.
func parseActTokens(content []byte) ([]web.ActToken, error) {
	var tokens []web.ActToken
	names, secrets := map[string]int{}, map[string]int{} // the line of each
	lines := bufio.NewScanner(bytes.NewReader(content))
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		fields := strings.Fields(line)
		if len(fields) != 2 {
			return nil, fmt.Errorf("line %d has %s; write it as NAME TOKEN", n, plaintext.Plural(len(fields), "word"))
		}
		name, token := fields[0], fields[1]
		switch {
		case !utf8.ValidString(name) || strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) }):
			return nil, fmt.Errorf("line %d: the name has a character that cannot be printed", n)
		case utf8.RuneCountInString(name) > 100:
			return nil, fmt.Errorf("line %d: the name has %d characters, more than 100", n, utf8.RuneCountInString(name))
		case strings.Contains(name, ":"):
			return nil, fmt.Errorf("line %d: the name has a colon, which a browser cannot send", n)
		case utf8.RuneCountInString(token) < minReadToken:
			return nil, fmt.Errorf("line %d: the token has %d characters, fewer than %d", n, utf8.RuneCountInString(token), minReadToken)
		case names[name] > 0:
			return nil, fmt.Errorf("line %d: line %d has the same name", n, names[name])
		case secrets[token] > 0:
			return nil, fmt.Errorf("line %d: line %d has the same token", n, secrets[token])
		}
		names[name], secrets[token] = n, n
		tokens = append(tokens, web.ActToken{Name: name, Token: token})
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	if len(tokens) == 0 {
		return nil, errors.New("no line has a NAME and a TOKEN")
	}
	return tokens, nil
}
