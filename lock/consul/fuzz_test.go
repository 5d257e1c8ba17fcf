package consul

import (
	"encoding/json"
	"errors"
	"maps"
	"math"
	"net/http"
	"testing"
	"unicode/utf8"

	"github.com/hashicorp/consul/api"

	"onejob/lock"
)

// FuzzLockDocument checks that a .lock is either called foreign, or means the
// same after it was written back.
func FuzzLockDocument(f *testing.F) {
	for _, seed := range []string{
		`{"Limit":3,"Holders":{"a":true,"b":false}}`, `{"Limit":3,"Holders":["a","b","a"]}`, `{"Limit":0,"Holders":null}`,
		`{"limit":1,"holders":{}}`, `{"Limit":-1,"Holders":{}}`, `{"Limit":1e3,"Holders":{}}`, `{"Limit":1,"Holders":{},"more":1}`,
		`{"Limit":1,"Holders":{}} x`, `[]`, `null`, ``, "\xff",
	} {
		f.Add([]byte(seed), uint64(api.SemaphoreFlagValue), "")
		f.Add([]byte(seed), uint64(0), "session")
	}
	f.Fuzz(func(t *testing.T, value []byte, flags uint64, session string) {
		got, err := decodeLock(&api.KVPair{Key: "k/.lock", Value: value, Flags: flags, Session: session})
		if err != nil {
			if !errors.Is(err, lock.ErrForeign) {
				t.Errorf("%q: error %v", value, err)
			}
			return
		}
		if got.Limit < 0 || session != "" {
			t.Errorf("%q of session %q is taken for a limit of %d", value, session, got.Limit)
		}
		again, err := decodeLock(&api.KVPair{Key: "k/.lock", Value: encode(got), Flags: flags})
		if err != nil || again.Limit != got.Limit || again.Holders.list != got.Holders.list || !maps.Equal(again.Holders.set, got.Holders.set) {
			t.Errorf("%q is written back as %s, which reads as %v, %v", value, encode(got), again, err)
		}
	})
}

// FuzzLimitSetting checks that a limit that is read is one that may be set.
func FuzzLimitSetting(f *testing.F) {
	for _, seed := range []string{`{"limit":3}`, `{"limit":-1}`, `{"limit":1e99}`, `{"limit":null}`, `{"limit":3,"x":1}`, `3`, ``} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, value []byte) {
		limit, err := decodeSetting(&api.KVPair{Key: "k", Value: value})
		if err == nil && (limit < 0 || limit > lock.MaxSlots) || err != nil && !errors.Is(err, lock.ErrForeign) {
			t.Errorf("%q: limit %d, error %v", value, limit, err)
		}
	})
}

// FuzzConflict checks that of a batch that was refused every lease is told so
// once, or is in the next try, whatever the answer says.
func FuzzConflict(f *testing.F) {
	for _, seed := range []string{
		`{"Results":null,"Errors":[{"OpIndex":1,"What":"lock is already held"}]}`,
		`{"Errors":[{"OpIndex":-1,"What":"x"},{"OpIndex":99,"What":"x"},{"OpIndex":0,"What":""}]}`,
		`{"Errors":[{"OpIndex":2,"What":"a"},{"OpIndex":3,"What":"b"}]}`, `{"Errors":{}}`, `rpc error`, ``,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, operations := range []int{1, 2} {
			list := []*lease{{key: "a"}, {key: "b"}, {key: "c"}}
			told := map[*lease]int{}
			sent := each(operations, func(b []byte, _ *lease, _ int) []byte { return b })(list)
			rest, _ := new(Locker).split(list, sent, api.StatusError{Code: http.StatusConflict, Body: string(body)}, func(ls *lease, what string) {
				if what == "" {
					t.Errorf("%q: %s is refused without a word", body, ls.key)
				}
				told[ls]++
			})
			for _, ls := range rest {
				told[ls]++
			}
			for _, ls := range list {
				if told[ls] != 1 {
					t.Errorf("%q: lease %s has %d answers", body, ls.key, told[ls])
				}
			}
		}
	})
}

// FuzzTxnResults checks that the index of a key is found as a decoder of JSON finds it,
// whatever the names of keys are.
func FuzzTxnResults(f *testing.F) {
	for _, seed := range [][2]string{
		{"service/onejob/running/1", "service/onejob/running/2"}, {`"`, `\`}, {`\"`, `","ModifyIndex":7`}, {`"Key":"`, `\"Key":"b`},
		{"<&>", "\u2028"}, {"a\x00\n", "\xff"}, {"", "x"}, {"a", "a"},
	} {
		f.Add(seed[0], seed[1], uint64(7))
	}
	f.Fuzz(func(t *testing.T, a, b string, index uint64) {
		if !utf8.ValidString(a) || !utf8.ValidString(b) || index == 0 || index > math.MaxUint64-2 {
			return
		}
		text, err := json.Marshal(api.TxnResponse{Results: api.TxnResults{
			{KV: &api.KVPair{Key: "before", ModifyIndex: 1}}, {KV: &api.KVPair{Key: a, Value: []byte(b), Session: "s", ModifyIndex: index}},
			{KV: &api.KVPair{Key: b, ModifyIndex: index + 1, LockIndex: 3}},
		}})
		if err != nil {
			t.Fatal(err)
		}
		if a == "before" || b == "before" {
			return
		}
		r := txnResults{text}
		if got := r.next("missing" + a + b); got != 0 {
			t.Errorf("%s: a key that is not there has index %d", text, got)
		}
		if got := r.next(a); got != index {
			t.Errorf("%s: the index of %q is %d, want %d", text, a, got, index)
		}
		if got := r.next(b); got != index+1 {
			t.Errorf("%s: the index of %q is %d, want %d", text, b, got, index+1)
		}
		for _, s := range []string{a, b} {
			var decoded string
			if err := json.Unmarshal(appendString(nil, s), &decoded); err != nil || decoded != s {
				t.Errorf("%q is written as %s", s, appendString(nil, s))
			}
		}
	})
}

// FuzzAnswer checks that no answer makes the reader fail.
func FuzzAnswer(f *testing.F) {
	for _, seed := range []string{`{"Results":[{"KV":{"Key":"a","ModifyIndex":7}}]}`, `"Key":"`, `"Key":"a`, `"Key":"a\`, `"Key":"a","ModifyIndex":`, ``} {
		f.Add([]byte(seed), "a")
	}
	f.Fuzz(func(t *testing.T, text []byte, key string) {
		r := txnResults{text}
		for r.next(key) != 0 {
		}
	})
}
