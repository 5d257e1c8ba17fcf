package fakeconsul

import (
	"encoding/json"
	"reflect"
	"testing"
)

// TestJSON compares what is encoded here with encoding/json.
func TestJSON(t *testing.T) {
	keys := []string{"a", "service/onejob/tasks/17", `q"u\o`, "a<b>&c", "ü", "new\nline", "\x7f\xff", ""}
	values := [][]byte{nil, {}, []byte("x"), []byte(`{"replica":"r1"}`), {0, 255}}
	var list []*pair
	for i, key := range keys {
		for j, value := range values {
			p := &pair{LockIndex: uint64(i), Key: key, Flags: 1<<64 - 1, Value: value, CreateIndex: 17, ModifyIndex: uint64(j)}
			if j%2 == 0 {
				p.Session = "s" + key
			}
			list = append(list, p)
		}
	}
	same := func(got []byte, v any) {
		t.Helper()
		if want, err := json.Marshal(v); err != nil || string(got) != string(want) {
			t.Errorf("it is\n%s\nand with encoding/json (error %v)\n%s", got, err, want)
		}
	}
	type result struct{ KV *pair }
	type answer struct {
		Results []result
		Errors  []txnError
	}
	same(appendPairs(nil, list), list)
	same(appendPairs(nil, nil), []*pair{})
	same(appendTxn(nil, nil, nil), answer{Results: []result{}})
	whole, bare := answer{}, answer{}
	var results, without []txnResult
	for _, p := range list {
		whole.Results = append(whole.Results, result{p})
		results = append(results, txnResult{p, false})
		b := *p
		b.Value = nil
		bare.Results = append(bare.Results, result{&b})
		without = append(without, txnResult{p, true})
	}
	same(appendTxn(nil, results, nil), whole)
	same(appendTxn(nil, without, nil), bare)
	errors := []txnError{{0, "plain"}, {3, `key "a<b" is\nheld`}}
	same(appendTxn(nil, nil, errors), answer{Errors: errors})
}

// TestReadOps compares how transactions are read with encoding/json.
func TestReadOps(t *testing.T) {
	for _, body := range []string{
		`[{"KV":{"Verb":"lock","Key":"a/b","Value":"eyJ9","Session":"s","Flags":18446744073709551615,"Index":7}}]`,
		`[{"KV":{"Verb":"get","Key":"a","Value":null,"Flags":0,"Index":0,"Session":""},"Node":null,"Service":null,"Check":null},{"KV":{"Verb":"other","Key":"b"}}]` + "\n",
		`[]`, `[{"KV":null}]`, `[{}]`, ` [ {"KV" : {"Verb":"set","Key":"a\u0026b","Value":""}} ] `, `null`,
		`[{"KV":{"Verb":"set","Key":"ü"}}]`, `[{"kv":{"verb":"set","key":"x"}}]`, `[{"KV":{}}]`,
		``, `[`, `{}`, `[{"KV":{"Verb":"set","Key":"a","Value":"*"}}]`, `[{"KV":{"Verb":"set"}}] x`, `[{"KV":{"Flags":-1}}]`, `[{"KV":{"Flags":1e3}}]`,
		`[{"KV":{"Verb":"set"}},]`, `[{"KV":{"Flags":01}}]`, `[{"KV":{"Verb":"set"},"KV":{"Key":"a"}}]`,
	} {
		var want []txnOp
		wantErr := json.Unmarshal([]byte(body), &want)
		got, err := readOps([]byte(body))
		if (err == nil) != (wantErr == nil) || err == nil && len(got)+len(want) > 0 && !reflect.DeepEqual(got, want) {
			t.Errorf("%s\nis %v (error %v), and with encoding/json %v (error %v)", body, got, err, want, wantErr)
		}
	}
}
