package fakeconsul

import (
	"encoding/base64"
	"encoding/json"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Requests and answers are encoded here as encoding/json does it, byte for byte, because a
// simulation spends much of its time on that. TestJSON compares the two.

// appendString appends a text as JSON.
func appendString(b []byte, s string) []byte {
	from := len(b)
	b = append(b, '"')
	for i := range len(s) {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			b = append(b, '\\', c)
		case c < ' ' || c >= utf8.RuneSelf || c == '<' || c == '>' || c == '&':
			text, err := json.Marshal(s)
			if err != nil {
				panic(err)
			}
			return append(b[:from], text...)
		default:
			b = append(b, c)
		}
	}
	return append(b, '"')
}

// appendPair appends an entry, with its value or without.
func appendPair(b []byte, p *pair, value bool) []byte {
	b = append(b, `{"LockIndex":`...)
	b = strconv.AppendUint(b, p.LockIndex, 10)
	b = append(b, `,"Key":`...)
	b = appendString(b, p.Key)
	b = append(b, `,"Flags":`...)
	b = strconv.AppendUint(b, p.Flags, 10)
	if p.Value == nil || !value {
		b = append(b, `,"Value":null`...)
	} else {
		b = append(b, `,"Value":"`...)
		b = base64.StdEncoding.AppendEncode(b, p.Value)
		b = append(b, '"')
	}
	if p.Session != "" {
		b = append(b, `,"Session":`...)
		b = appendString(b, p.Session)
	}
	b = append(b, `,"CreateIndex":`...)
	b = strconv.AppendUint(b, p.CreateIndex, 10)
	b = append(b, `,"ModifyIndex":`...)
	b = strconv.AppendUint(b, p.ModifyIndex, 10)
	return append(b, '}')
}

func appendPairs(b []byte, list []*pair) []byte {
	b = append(b, '[')
	for i, p := range list {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendPair(b, p, true)
	}
	return append(b, ']')
}

// appendTxn appends the answer to a transaction.
func appendTxn(b []byte, results []txnResult, errors []txnError) []byte {
	if errors != nil {
		b = append(b, `{"Results":null,"Errors":[`...)
		for i, e := range errors {
			if i > 0 {
				b = append(b, ',')
			}
			b = append(b, `{"OpIndex":`...)
			b = strconv.AppendInt(b, int64(e.OpIndex), 10)
			b = append(b, `,"What":`...)
			b = appendString(b, e.What)
			b = append(b, '}')
		}
		return append(b, "]}"...)
	}
	b = append(b, `{"Results":[`...)
	for i, r := range results {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, `{"KV":`...)
		b = appendPair(b, r.KV, !r.bare)
		b = append(b, '}')
	}
	return append(b, `],"Errors":null}`...)
}

// sizeOf is about how long the answer with these entries is.
func sizeOf(list []*pair) (n int) {
	for _, p := range list {
		n += 170 + len(p.Key) + len(p.Session) + len(p.Value)*4/3
	}
	return n
}

// readOps reads the operations of a transaction.
func readOps(body []byte) (ops []txnOp, err error) {
	p := parser{body, true}
	if ops = p.ops(); p.ok {
		return ops, nil
	}
	ops = nil
	err = json.Unmarshal(body, &ops) // it is not what clients send, or has a letter that is rare
	return ops, err
}

// A parser reads the JSON that clients send. Whatever else it meets, it is not ok any more.
type parser struct {
	rest []byte
	ok   bool
}

// next reports whether the next character is c, and if so skips it.
func (p *parser) next(c byte) bool {
	if len(p.rest) == 0 || p.rest[0] != c {
		return false
	}
	p.rest = p.rest[1:]
	return true
}

func (p *parser) want(c byte) { p.ok = p.next(c) && p.ok }

// null reports whether a null is next, and if so skips it.
func (p *parser) null() bool {
	if len(p.rest) < 4 || string(p.rest[:4]) != "null" {
		return false
	}
	p.rest = p.rest[4:]
	return true
}

// raw reads a text without escapes.
func (p *parser) raw() []byte {
	p.want('"')
	for i, c := range p.rest {
		switch {
		case c == '"':
			text := p.rest[:i]
			p.rest = p.rest[i+1:]
			return text
		case c == '\\' || c < ' ' || c >= utf8.RuneSelf:
			p.ok = false
			return nil
		}
	}
	p.ok = false
	return nil
}

func (p *parser) number() (n uint64) {
	i := 0
	for i < len(p.rest) && '0' <= p.rest[i] && p.rest[i] <= '9' {
		i++
	}
	n, err := strconv.ParseUint(string(p.rest[:i]), 10, 64)
	p.ok = p.ok && err == nil && (i == 1 || p.rest[0] != '0')
	p.rest = p.rest[i:]
	return n
}

// verbs are those of operations: a copy of each text would be one more allocation.
var verbs = []string{"lock", "unlock", "get", "get-or-empty", "get-tree", "check-session", "check-index", "check-not-exists", "delete", "delete-cas", "cas", "set", "delete-tree"}

func verb(text []byte) string {
	for _, v := range verbs {
		if string(text) == v {
			return v
		}
	}
	return string(text)
}

func (p *parser) ops() (ops []txnOp) {
	ops = make([]txnOp, 0, strings.Count(string(p.rest), `"KV"`))
	for p.want('['); p.ok && !p.next(']'); {
		if len(ops) > 0 {
			p.want(',')
		}
		ops = append(ops, p.op())
	}
	if p.next('\n'); len(p.rest) > 0 {
		p.ok = false
	}
	return ops
}

func (p *parser) op() (op txnOp) {
	p.want('{')
	for more := true; more && p.ok; more = p.next(',') {
		name := p.raw()
		p.want(':')
		switch {
		case p.null():
		case string(name) == "KV" && op.KV == nil:
			op.KV = p.kv()
		default:
			p.ok = false
		}
	}
	p.want('}')
	return op
}

func (p *parser) kv() *txnKV {
	kv := &txnKV{}
	p.want('{')
	for more := true; more && p.ok; more = p.next(',') {
		name := p.raw()
		p.want(':')
		if p.null() {
			continue
		}
		switch string(name) {
		case "Verb":
			kv.Verb = verb(p.raw())
		case "Key":
			kv.Key = string(p.raw())
		case "Value":
			text := p.raw()
			value := make([]byte, base64.StdEncoding.DecodedLen(len(text)))
			n, err := base64.StdEncoding.Decode(value, text)
			p.ok = p.ok && err == nil
			kv.Value = value[:n]
		case "Flags":
			kv.Flags = p.number()
		case "Index":
			kv.Index = p.number()
		case "Session":
			kv.Session = string(p.raw())
		default:
			p.ok = false
		}
	}
	p.want('}')
	return kv
}
