package consul

import (
	"testing"
	"time"

	"onejob/internal/testenv"
)

// TestOddKeys waits for keys that are not what they seem to be in the path of a request.
func TestOddKeys(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	l, other := start(t, patient(t, kv)), start(t, patient(t, kv))
	leader, err := l.Campaign(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { release(t, leader) })
	for _, key := range []string{
		"../leader", "a//b", "./x", "//x//", "x", "..", ".", "/", "a/../b", "b", "a/", "a/b/..", "a\u200db", "a\u00a0b", "\x00", "a b", "a%2Fb", "a?b", "a#b", "ä\\b",
	} {
		t.Run(key, func(t *testing.T) {
			t.Parallel()
			lease := acquire(t, l, key)
			if session, value, err := other.Holder(t.Context(), key); session != l.Session() || string(value) != `{"test":true}` || err != nil {
				t.Errorf("the holder is %q with %q (%v), want %s", session, value, err, l.Session())
			}
			woken := make(chan error, 1)
			go func() { woken <- other.Await(t.Context(), key) }()
			select {
			case err := <-woken:
				t.Errorf("while the key is held, waiting ended with %v", err)
				woken <- err
			case <-time.After(time.Second): // long enough for some looks
			}
			release(t, lease)
			select {
			case err := <-woken:
				if err != nil {
					t.Errorf("wait: %v", err)
				}
			case <-time.After(maxWait):
				t.Fatalf("nobody was told within %v", maxWait)
			}
			release(t, acquire(t, other, key))
			if session, value, err := other.Holder(t.Context(), key); session != "" || value != nil || err != nil {
				t.Errorf("after its release the holder is %q with %q (%v)", session, value, err)
			}
		})
	}
}
