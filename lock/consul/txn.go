package consul

import (
	"encoding/base64"
	"encoding/json"
	"strconv"

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
	key, err := json.Marshal(path)
	if err != nil {
		panic(err) // a string
	}
	b = append(append(b, `{"KV":{"Verb":"`...), verb...)
	b = append(append(b, `","Key":`...), key...)
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

// txnResults is what Consul answers to a transaction that it applied: an entry
// for every operation that leaves a key there.
type txnResults struct {
	Results []txnResult
	read    int
}

type txnResult struct {
	KV struct {
		Key         string
		ModifyIndex uint64
	}
}

// next returns the ModifyIndex of a key, zero if there is no entry of it. It is called with
// the keys in the order of their operations.
func (r *txnResults) next(path string) (index uint64) {
	for i := r.read; i < len(r.Results); i++ {
		if r.Results[i].KV.Key == path {
			r.read = i + 1
			return r.Results[i].KV.ModifyIndex
		}
	}
	return 0
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
