package consul

import (
	"os"
	"strings"
	"sync"
	"time"
)

// tokenFile is a token that an operator may replace while we run. The library
// reads a token file once.
type tokenFile struct {
	path string

	mu     sync.Mutex
	token  string
	looked time.Time
}

// current returns the token, or "" if there is no file, which leaves the
// client's own. While the file cannot be read, or is empty because it is just
// being written, the token that was in it is still good.
func (f *tokenFile) current() string {
	if f.path == "" {
		return ""
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if time.Since(f.looked) >= time.Second {
		_ = f.read()
	}
	return f.token
}

// read looks at the file. f.mu is held, or nobody else knows f yet.
func (f *tokenFile) read() error {
	f.looked = time.Now()
	b, err := os.ReadFile(f.path)
	if err != nil {
		return err
	}
	if token := strings.TrimSpace(string(b)); token != "" {
		f.token = token
	}
	return nil
}
