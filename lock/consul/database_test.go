package consul

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/hashicorp/consul/api"

	"onejob/internal/servers"
	"onejob/internal/testenv"
	"onejob/lock"
)

// I10: what was claimed under another record of the database is not locked, in whatever
// company it is sent.
func TestLocksNeedTheRecord(t *testing.T) {
	t.Parallel()
	l := start(t, patient(t, testenv.Consul(t)))
	if record, version, err := databaseOf(t, l); err != nil || version != 0 || record != "" {
		t.Fatalf("before there is one: %q %d %v", record, version, err)
	}
	refused := func(text string, version uint64) error {
		return persist(func() error {
			_, err := l.SetDatabase(t.Context(), []byte(text), version)
			return err
		})
	}
	old := setDatabase(t, l, "one", 0)
	if err := refused("again", 0); !errors.Is(err, lock.ErrChanged) {
		t.Errorf("a second one is made: %v", err)
	}
	now := setDatabase(t, l, "two", old)
	if err := refused("three", old); !errors.Is(err, lock.ErrChanged) {
		t.Errorf("an old one is replaced: %v", err)
	}
	if record, version, err := databaseOf(t, l); err != nil || version != now || record != "two" {
		t.Errorf("the record is %q %d %v", record, version, err)
	}

	var wg sync.WaitGroup
	for i := range 300 { // more than one transaction
		wg.Go(func() {
			version := []uint64{old, now, 0}[i%3]
			var lease lock.Lease
			var err error
			late := false
			for range testenv.Tries(maxWait) {
				lease, err = l.Acquire(t.Context(), lock.Request{Session: l.Session(), Key: fmt.Sprint("key ", i), Value: []byte("x"), Database: version})
				late = late || Unavailable(err)
				if !Unavailable(err) && !(late && errors.Is(err, lock.ErrHeldHere)) { // what was asked for before may be there
					break
				}
			}
			switch {
			case version == old && !errors.Is(err, lock.ErrChanged):
				t.Errorf("under the old record: %v", err)
			case version != old && err != nil:
				t.Errorf("under version %d: %v", version, err)
			}
			if err == nil {
				release(t, lease)
			}
		})
	}
	wg.Wait()
}

// setDatabase replaces the record of the database. If Consul has not answered in time, the record may be
// there.
func setDatabase(t testing.TB, l *Locker, text string, version uint64) (next uint64) {
	t.Helper()
	late := false
	err := persist(func() (err error) {
		next, err = l.SetDatabase(t.Context(), []byte(text), version)
		if late && errors.Is(err, lock.ErrChanged) {
			var record string
			if record, next, err = databaseOf(t, l); err == nil && record != text {
				err = lock.ErrChanged
			}
		}
		late = true
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return next
}

func databaseOf(t testing.TB, l *Locker) (text string, version uint64, err error) {
	t.Helper()
	err = persist(func() error {
		var record []byte
		record, version, err = l.Database(t.Context())
		text = string(record)
		return err
	})
	return text, version, err
}

// A Consul that does not know our session is another cluster's, until the next renewal finds that out.
// Its record is not believed, and not replaced.
func TestRecordOfAnotherConsul(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	_, fresh := testenv.OwnConsul(t, servers.ConsulConfig{})
	p, astray := newProxy(t, kv.Addr), newProxy(t, fresh.Addr)
	cfg := patient(t, kv)
	cfg.Client.Address = p.Addr
	l := start(t, cfg)
	version := setDatabase(t, l, "ours", 0)
	record := func() string {
		t.Helper()
		pair, _, err := fresh.Client.KV().Get(kv.Prefix+"/database", nil)
		switch {
		case err != nil:
			t.Fatal(err)
		case pair != nil:
			return string(pair.Value)
		}
		return ""
	}
	p.inject(func(w http.ResponseWriter, r *http.Request, forward http.HandlerFunc) {
		if r.URL.Path == "/v1/txn" || strings.HasSuffix(r.URL.Path, "/database") {
			forward = astray.forward.ServeHTTP
		}
		forward(w, r)
	})
	for _, theirs := range []string{"", "theirs"} {
		if theirs != "" {
			if _, err := fresh.Client.KV().Put(&api.KVPair{Key: kv.Prefix + "/database", Value: []byte(theirs)}, nil); err != nil {
				t.Fatal(err)
			}
		}
		if text, _, err := databaseOf(t, l); err == nil || !strings.Contains(err.Error(), "is not known here") {
			t.Errorf("the record %q is read: %q, %v", theirs, text, err)
		}
		if _, err := l.SetDatabase(t.Context(), []byte("ours"), 0); err == nil || errors.Is(err, lock.ErrChanged) {
			t.Errorf("the record %q is replaced: %v", theirs, err)
		}
		if now := record(); now != theirs {
			t.Errorf("the record %q is %q now", theirs, now)
		}
	}
	p.inject(nil)
	if text, now, err := databaseOf(t, l); err != nil || now != version || text != "ours" {
		t.Errorf("our own is %q in version %d, %v; want version %d", text, now, err, version)
	}
}
