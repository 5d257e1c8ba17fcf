package consul

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"strconv"

	"github.com/hashicorp/consul/api"
)

// maxTxn is how many bytes of JSON we send in one transaction; Consul takes
// 512 KiB (txn_max_req_len).
const maxTxn = 500_000

// txn applies operations, all or none. Unlike the library's own it keeps the
// status code of a refusal.
func (l *Locker) txn(ctx context.Context, client *api.Client, ops api.TxnOps) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	_, err := client.Raw().Write("/v1/txn", ops, nil, l.write(ctx))
	return err
}

// txnJSON is txn for operations that are JSON already, those of task locks: with
// the library's types, half of what a task costs this process went into their
// fields that are never used. Consul's answer is decoded into out, unless that is nil.
func (l *Locker) txnJSON(ctx context.Context, ops json.RawMessage, out any) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	_, err := l.keys.Raw().Write("/v1/txn", ops, out, l.write(ctx))
	return err
}

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

// sizeOf bounds how long an operation on the key of a lease is. In JSON a byte of a key
// may be six, and three of a value are four.
func sizeOf(ls *lease) int { return 180 + 6*len(ls.own) + 4*(len(ls.value)+2)/3 }

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
