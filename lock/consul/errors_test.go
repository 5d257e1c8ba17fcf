package consul

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"testing"

	"github.com/google/uuid"
	"github.com/hashicorp/consul/api"

	"onejob/boottime"
	"onejob/internal/testenv"
	"onejob/lock"
)

// TestConsulsWords holds the texts and codes that this package goes by against
// the real server.
func TestConsulsWords(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	l := start(t, patient(t, kv))
	session := l.Session()
	key := func(name string) string { return kv.Prefix + "/words/" + name }
	newSession := func() string {
		id, _, err := kv.Client.Session().CreateNoChecks(&api.SessionEntry{TTL: "60s", Behavior: "delete", LockDelay: 60e9}, nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _, _ = kv.Client.Session().Destroy(id, nil) })
		return id
	}
	op := func(verb api.KVOp, key, session string) *api.TxnOp {
		return &api.TxnOp{KV: &api.KVTxnOp{Verb: verb, Key: key, Session: session}}
	}
	txn := func(ops ...*api.TxnOp) error { return l.txn(t.Context(), l.keys, ops) }
	other := newSession()
	dying := newSession()
	if err := txn(op(api.KVLock, key("held"), other), op(api.KVLock, key("delayed"), dying)); err != nil {
		t.Fatal(err)
	}
	if _, err := kv.Client.Session().Destroy(dying, nil); err != nil {
		t.Fatal(err)
	}

	for _, test := range []struct {
		name string
		op   *api.TxnOp
		want string
	}{
		{"lock a held key", op(api.KVLock, key("held"), session), "lock is already held"},
		{"lock a key in its lock-delay", op(api.KVLock, key("delayed"), session), "due to lock delay"},
		{"lock under a session that has ended", op(api.KVLock, key("free"), dying), "invalid session"},
		{"check the session of a key of another", op(api.KVCheckSession, key("held"), session), "failed session check"},
		{"check the session of a key that is gone", op(api.KVCheckSession, key("free"), session), "failed to check session"},
	} {
		t.Run(test.name, func(t *testing.T) {
			// The second of three: the others change nothing, and are not named.
			err := txn(op(api.KVLock, key("mine"), session), test.op, op(api.KVDelete, key("mine"), ""))
			if got := classify(err); got != conflict {
				t.Fatalf("error %v is classified as %d, want a conflict", err, got)
			}
			failed := txnErrors(err)
			if len(failed) != 1 || failed[0].OpIndex != 1 || !strings.Contains(failed[0].What, test.want) {
				t.Errorf("the conflict lists %+v, want %q for operation 1", failed, test.want)
			}
			if holder(t, kv, "words/mine") != "" {
				t.Error("part of a refused transaction was applied")
			}
		})
	}

	t.Run("all conflicts of a phase are listed", func(t *testing.T) {
		err := txn(op(api.KVLock, key("held"), session), op(api.KVLock, key("mine"), session), op(api.KVLock, key("held"), session))
		if failed := txnErrors(err); len(failed) != 2 || failed[0].OpIndex != 0 || failed[1].OpIndex != 2 {
			t.Errorf("the conflict lists %+v, want operations 0 and 2", failed)
		}
	})
	t.Run("a lock may be repeated within a session", func(t *testing.T) {
		for range 2 {
			if err := txn(op(api.KVLock, key("mine"), session)); err != nil {
				t.Error(err)
			}
		}
		if err := txn(op(api.KVDelete, key("mine"), "")); err != nil {
			t.Error(err)
		}
	})
	t.Run("the agent does not know a check", func(t *testing.T) {
		err := l.heartbeats.Agent().UpdateTTLOpts(checkID("nobody"), "", api.HealthPassing, l.query(t.Context()))
		if err == nil || !strings.Contains(err.Error(), "Unknown check ID") {
			t.Errorf("a heartbeat for an unknown check: got error %v", err)
		}
	})
	t.Run("a session names a check that is not there", func(t *testing.T) {
		entry := map[string]any{"TTL": "10s", "NodeChecks": []string{}, "ServiceChecks": []api.ServiceCheck{{ID: checkID("nobody")}}}
		_, err := l.heartbeats.Raw().Write("/v1/session/create", entry, nil, l.write(t.Context()))
		if err == nil || !strings.Contains(err.Error(), "Missing check") {
			t.Errorf("a session with an unknown check: got error %v", err)
		}
	})
	t.Run("a session names a check that fails", func(t *testing.T) {
		id := "words-" + uuid.NewString()
		err := kv.Client.Agent().ServiceRegister(&api.AgentServiceRegistration{ID: id, Name: id,
			Check: &api.AgentServiceCheck{CheckID: checkID(id), TTL: "60s", Status: api.HealthCritical}})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = kv.Client.Agent().ServiceDeregister(id) }()
		entry := map[string]any{"TTL": "10s", "NodeChecks": []string{}, "ServiceChecks": []api.ServiceCheck{{ID: checkID(id)}}}
		testenv.Eventually(t, maxWait, "the servers know the check", func() bool {
			_, err = l.heartbeats.Raw().Write("/v1/session/create", entry, nil, l.write(t.Context()))
			return err == nil || !strings.Contains(err.Error(), "Missing check")
		})
		if err == nil || !strings.Contains(err.Error(), "critical state") {
			t.Errorf("a session with a failing check: got error %v", err)
		}
	})
	t.Run("renewing a session that has ended", func(t *testing.T) {
		if entry, _, err := kv.Client.Session().Renew(dying, nil); entry != nil || err != nil {
			t.Errorf("got %v, %v, want neither a session nor an error", entry, err)
		}
	})
	t.Run("more than 128 operations", func(t *testing.T) {
		ops := make(api.TxnOps, maxBatch+1)
		for i := range ops {
			ops[i] = op(api.KVDelete, key(fmt.Sprint("many-", i)), "")
		}
		if err := txn(ops...); classify(err) != wrong {
			t.Errorf("%d operations: got error %v", len(ops), err)
		}
		if err := txn(ops[1:]...); err != nil {
			t.Errorf("%d operations: got error %v", len(ops)-1, err)
		}
	})
	t.Run("the largest locks are taken, in as many transactions as it needs", func(t *testing.T) {
		list := make([]*lease, 2*maxBatch)
		for i := range list {
			k := fmt.Sprintf("%03d", i) + strings.Repeat("<", maxKey-3) // the longest in JSON
			list[i] = &lease{in: l.current().leases, key: k, own: l.taskKey(k), path: l.taskKey(k), value: make([]byte, maxValue)}
		}
		l.lockKeys(t.Context(), list)
		for _, ls := range list {
			if ls.err != nil || ls.index == 0 {
				t.Fatalf("lock: error %v, index %d", ls.err, ls.index)
			}
		}
		l.deleteKeys(t.Context(), list)
		for _, ls := range list {
			if ls.err != nil {
				t.Fatalf("delete: %v", ls.err)
			}
		}
		if keys, _, err := kv.Client.KV().Keys(l.taskKey(""), "", nil); len(keys) > 0 || err != nil {
			t.Errorf("%d keys are left, error %v", len(keys), err)
		}
	})
}

func TestClassify(t *testing.T) {
	status := func(code int, body string) error {
		return fmt.Errorf("wrapped: %w", api.StatusError{Code: code, Body: body})
	}
	for _, test := range []struct {
		err  error
		want answer
	}{
		{nil, applied},
		{status(409, "{}"), conflict},
		{status(429, ""), notApplied},
		{status(503, ""), notApplied},
		{status(500, "No cluster leader"), notApplied},
		{status(500, "leadership lost while committing log"), unknown},
		{status(502, ""), unknown},
		{status(400, ""), wrong},
		{status(403, "Permission denied"), wrong},
		{status(413, ""), wrong},
		{&net.OpError{Op: "dial", Err: errors.New("no route")}, notApplied},
		{&net.OpError{Op: "read", Err: errors.New("reset")}, unknown},
		{io.EOF, unknown},
		{context.DeadlineExceeded, unknown},
		{http.ErrHandlerTimeout, unknown},
	} {
		if got := classify(test.err); got != test.want {
			t.Errorf("%v is classified as %d, want %d", test.err, got, test.want)
		}
	}
}

func TestUnavailable(t *testing.T) {
	status := func(code int, body string) error {
		return fmt.Errorf("wrapped: %w", api.StatusError{Code: code, Body: body})
	}
	request := func(err error) error { return &url.Error{Op: "Put", URL: "http://consul/v1/txn", Err: err} }
	for _, test := range []struct {
		err  error
		want bool
	}{
		{nil, false},
		{request(&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}), true},
		{request(&net.OpError{Op: "read", Err: syscall.ECONNRESET}), true},
		{request(io.EOF), true},
		{request(context.DeadlineExceeded), true},
		{fmt.Errorf("the answer: %w", io.ErrUnexpectedEOF), true},
		{status(500, "No cluster leader"), true},
		{status(500, "leadership lost while committing log"), true},
		{status(429, "Your IP is issuing too many concurrent connections"), true},
		{status(502, ""), true},
		{status(503, ""), true},
		{status(409, `{"Errors":[{"OpIndex":0,"What":"current modify index"}]}`), true},
		{status(409, `{"Errors":[{"OpIndex":0,"What":"Permission denied"}]}`), false},
		{status(400, "Must have at least one operation"), false},
		{status(403, "Permission denied: token lacks permission"), false},
		{status(403, "ACL not found"), false},
		{status(500, "rpc error making call: ACL not found"), false},
		{status(413, ""), false},
		{request(&tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}}), false},
		{request(&net.OpError{Op: "remote error", Err: errors.New("tls: bad certificate")}), false},
		{lock.ErrNoSemaphore, false},
		{context.Canceled, false},
		{errors.New("acquire a lock: the key is 600 bytes long, not 1 to 512"), false},
	} {
		if got := Unavailable(test.err); got != test.want {
			t.Errorf("%v: %v, want %v", test.err, got, test.want)
		}
		if test.err != nil {
			if got := Unavailable((Config{Client: api.DefaultConfig()}).explain(test.err)); got != test.want {
				t.Errorf("%v, explained: %v, want %v", test.err, got, test.want)
			}
		}
	}
}

func TestDoubt(t *testing.T) {
	now := boottime.Now()
	for _, test := range []struct {
		doubt boottime.Instant
		want  bool
	}{
		{0, false}, {now, true}, {now.Add(-lateness), false}, {now.Add(-lateness / 2), true},
	} {
		if got := doubtful(test.doubt); got != test.want {
			t.Errorf("doubtful %v after the doubt: %v", now.Sub(test.doubt), got)
		}
	}
}
