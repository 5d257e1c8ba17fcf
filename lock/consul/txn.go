package consul

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/hashicorp/consul/api"
)

const (
	// maxBatch is how many operations Consul takes in one transaction.
	maxBatch = 128

	// maxTxn is how many bytes of JSON we send in one transaction; Consul takes
	// 512 KiB (txn_max_req_len).
	maxTxn = 500_000
)

// appendOp appends an operation on a key as JSON. Session, value and index are
// left out if they are empty.
func appendOp(b []byte, verb api.KVOp, path, session string, value []byte, index uint64) []byte {
	b = append(append(b, `{"KV":{"Verb":"`...), verb...)
	b = appendString(append(b, `","Key":`...), path)
	if len(value) > 0 {
		b = append(b, `,"Value":"`...)
		b = base64.StdEncoding.AppendEncode(b, value)
		b = append(b, '"')
	}
	if session != "" {
		b = append(append(b, `,"Session":"`...), session...)
		b = append(b, '"')
	}
	if index != 0 {
		b = append(b, `,"Index":`...)
		b = strconv.AppendUint(b, index, 10)
	}
	return append(b, "}}"...)
}

// appendString appends a string as JSON.
func appendString(b []byte, s string) []byte {
	if strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == '"' || r == '\\' || r >= utf8.RuneSelf }) {
		return append(b, encode(s)...)
	}
	return append(append(append(b, '"'), s...), '"')
}

// txnResults is what Consul answers to a transaction that it applied, as JSON: an entry for
// every operation that leaves a key there. Only what is needed is read, without decoding
// the rest.
type txnResults struct{ json []byte }

var (
	resultsField = []byte(`"Results":[`)
	keyField     = []byte(`"Key":"`)
	indexField   = []byte(`"ModifyIndex":`)
)

// next returns the ModifyIndex of a key, zero if there is no entry of it. It is called with
// the keys in the order of their operations.
//
// In JSON a quotation mark within a string comes after a backslash. So the name of a field,
// with the mark before it and the colon after it, is found nowhere else.
func (r *txnResults) next(path string) (index uint64) {
	for rest := r.json; ; {
		var found bool
		if _, rest, found = bytes.Cut(rest, keyField); !found {
			return 0
		}
		var is bool
		is, rest = cutString(rest, path)
		if _, rest, found = bytes.Cut(rest, indexField); !found {
			return 0
		}
		if is {
			for len(rest) > 0 && '0' <= rest[0] && rest[0] <= '9' {
				index, rest = 10*index+uint64(rest[0]-'0'), rest[1:]
			}
			r.json = rest
			return index
		}
	}
}

// cutString reports whether the string whose first quotation mark is before text is s, and
// returns what comes after it.
func cutString(text []byte, s string) (is bool, rest []byte) {
	if len(text) > len(s) && text[len(s)] == '"' && string(text[:len(s)]) == s && !strings.ContainsAny(s, `"\`) {
		return true, text[len(s)+1:]
	}
	end := 0
	for end < len(text) && text[end] != '"' {
		if text[end] == '\\' {
			end++
		}
		end++
	}
	if end >= len(text) {
		return false, nil
	}
	if bytes.IndexByte(text[:end], '\\') < 0 {
		return string(text[:end]) == s, text[end+1:]
	}
	var decoded string
	_ = json.Unmarshal(append(append([]byte{'"'}, text[:end]...), '"'), &decoded)
	return decoded == s, text[end+1:]
}

// index returns the index for a Check-And-Set; zero means that the key must not
// exist.
func index(pair *api.KVPair) uint64 {
	if pair == nil {
		return 0
	}
	return pair.ModifyIndex
}

func op(verb api.KVOp, o api.KVTxnOp) *api.TxnOp {
	o.Verb = verb
	return &api.TxnOp{KV: &o}
}
