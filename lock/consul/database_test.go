package consul

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"onejob/internal/testenv"
	"onejob/lock"
)

// I10: what was claimed under another record of the database is not locked, in whatever
// company it is sent.
func TestLocksNeedTheRecord(t *testing.T) {
	t.Parallel()
	l := start(t, config(t, testenv.Consul(t)))
	set := func(text string, version uint64) uint64 {
		t.Helper()
		version, err := l.SetDatabase(t.Context(), []byte(text), version)
		if err != nil {
			t.Fatal(err)
		}
		return version
	}
	if record, version, err := l.Database(t.Context()); err != nil || version != 0 || record != nil {
		t.Fatalf("before there is one: %q %d %v", record, version, err)
	}
	old := set("one", 0)
	if _, err := l.SetDatabase(t.Context(), []byte("again"), 0); !errors.Is(err, lock.ErrChanged) {
		t.Errorf("a second one is made: %v", err)
	}
	now := set("two", old)
	if _, err := l.SetDatabase(t.Context(), []byte("three"), old); !errors.Is(err, lock.ErrChanged) {
		t.Errorf("an old one is replaced: %v", err)
	}
	if record, version, err := l.Database(t.Context()); err != nil || version != now || string(record) != "two" {
		t.Errorf("the record is %q %d %v", record, version, err)
	}

	var wg sync.WaitGroup
	for i := range 300 { // more than one transaction
		wg.Go(func() {
			version := []uint64{old, now, 0}[i%3]
			lease, err := l.Acquire(t.Context(), lock.Request{Session: l.Session(), Key: fmt.Sprint("key ", i), Value: []byte("x"), Database: version})
			switch {
			case version == old && !errors.Is(err, lock.ErrChanged):
				t.Errorf("under the old record: %v", err)
			case version != old && err != nil:
				t.Errorf("under version %d: %v", version, err)
			}
			if err == nil {
				if err := lease.Release(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}
