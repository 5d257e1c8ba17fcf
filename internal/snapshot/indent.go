package snapshot

import (
	"bytes"
	"encoding/json"
)

// freelyIndented is up to which length, in bytes, indents cost nothing that matters.
const freelyIndented = 256 << 10

// Indent returns JSON with indents. Text that is no JSON stays as it is, and so does JSON of
// which indents would make more than four times as much and more than 256 KB: each element
// of a list that is 300 deep gets 600 spaces, and anyone who enqueues can write such a list.
func Indent(text []byte) []byte {
	var b bytes.Buffer
	if n := indentedLength(text); n > 4*len(text) && n > freelyIndented || json.Indent(&b, text, "", "  ") != nil {
		return text
	}
	return b.Bytes()
}

// indentedLength returns how long JSON gets by indents, or a bit more.
func indentedLength(text []byte) int {
	n, depth := len(text), 0
	line := func() { n += 1 + 2*depth }
	for i := 0; i < len(text); i++ {
		switch text[i] {
		case '"': // what is in a string stays
			for i++; i < len(text) && text[i] != '"'; i++ {
				if text[i] == '\\' {
					i++
				}
			}
		case '{', '[':
			depth++
			line()
		case '}', ']':
			depth = max(0, depth-1)
			line()
		case ',':
			line()
		case ':':
			n++
		case ' ', '\n', '\r', '\t':
			n--
		}
	}
	return n
}
