package http

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"unicode/utf8"

	"onejob/internal/pgjson"
	"onejob/tasks"
)

// incoming is what is kept of a response.
type incoming struct {
	status    int
	body      []byte
	truncated bool
}

// read reads r to its end, because a receiver may still be at work until then,
// but no further than maxResponseRead. It keeps limit bytes.
func (in *incoming) read(r io.Reader, limit int, output io.Writer) error {
	r = io.TeeReader(io.LimitReader(r, maxResponseRead), output)
	body, err := io.ReadAll(io.LimitReader(r, int64(limit)))
	if err != nil {
		return err
	}
	rest, err := io.Copy(io.Discard, r)
	in.body, in.truncated = body, rest > 0
	return err
}

// result returns the response as a task's result. If its JSON would be too long for
// a store, it keeps the body as text, and cuts it: the request has succeeded, so the task
// must not fail for what it answered.
func (in *incoming) result() (json.RawMessage, error) {
	result, err := in.encode(in.value())
	if err != nil || pgjson.TooLong(result, tasks.MaxResult) == "" {
		return result, err
	}
	cut := *in
	cut.truncated = true
	empty, err := cut.encode("")
	if err != nil {
		return nil, err
	}
	n := in.fitting(tasks.MaxResult - len(empty))
	if n == len(in.body) { // only the numbers were too long, which nobody writes out in a text
		return in.encode(in.text(n))
	}
	cut.body = in.body[:n]
	return cut.encode(cut.text(n))
}

func (in *incoming) encode(body any) (json.RawMessage, error) {
	return json.Marshal(struct {
		Status    int  `json:"status"`
		Body      any  `json:"body,omitempty"`
		Truncated bool `json:"truncated,omitempty"`
	}{in.status, body, in.truncated})
}

// fitting returns how many bytes of the body, as text in a JSON string, take at most
// room bytes. It stops at the end of a piece, so a part of one more might fit. It asks
// the encoder about each piece, because a byte of the body can take six in JSON: a
// control character does, and a byte that is not UTF-8 takes five.
func (in *incoming) fitting(room int) int {
	const piece = 1 << 10
	n := 0
	for n < len(in.body) {
		next := in.body[n:]
		if len(next) > piece {
			next = whole(next[:piece])
		}
		encoded, err := json.Marshal(tasks.Text(string(next)))
		if room -= len(encoded) - len(`""`); err != nil || room < 0 {
			break
		}
		n += len(next)
	}
	return n
}

// value returns the body as Postgres can keep it: as JSON if it is some, else
// as text. An empty body is nil.
func (in *incoming) value() any {
	if len(in.body) == 0 {
		return nil
	}
	if !in.truncated && json.Valid(in.body) {
		if asItIs(in.body) {
			return in.printable(in.body)
		}
		if values(in.body) > maxValues {
			return in.text(len(in.body))
		}
		d := json.NewDecoder(bytes.NewReader(in.body))
		d.UseNumber()
		var value any
		if d.Decode(&value) == nil {
			if value, ok := storable(value, maxResultDepth); ok {
				if text, err := json.Marshal(value); err == nil {
					return in.printable(text)
				}
			}
		}
	}
	return in.text(len(in.body))
}

// printable returns JSON as it is, or the body as text if Postgres would make far more of it: 1e308 has
// 309 digits when it is read.
func (in *incoming) printable(text []byte) any {
	if pgjson.Printed(text) > max(8*len(text), 64<<10) {
		return in.text(len(in.body))
	}
	return json.RawMessage(text)
}

// maxValues is how many values are decoded at most to replace some of them: an empty one
// of two bytes takes a hundred when it is decoded.
const maxValues = 100_000

// values returns about how many values there are in a JSON text, and not fewer.
func values(text []byte) int {
	return 1 + bytes.Count(text, []byte(",")) + bytes.Count(text, []byte("[")) + bytes.Count(text, []byte("{"))
}

// asItIs reports whether storable would change nothing in a valid JSON text.
func asItIs(text []byte) bool {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	for depth := 1; ; {
		token, err := d.Token()
		if err != nil {
			return errors.Is(err, io.EOF)
		}
		switch token := token.(type) {
		case json.Delim:
			if token == '[' || token == '{' {
				depth++
			} else {
				depth--
			}
			if depth > maxResultDepth {
				return false
			}
		case string: // which may have had a lone surrogate, or bytes that are no UTF-8
			if tasks.Text(token) != token || strings.ContainsRune(token, utf8.RuneError) {
				return false
			}
		case json.Number:
			if !keptNumber(token) {
				return false
			}
		}
	}
}

// text returns the first n bytes of the body, without half a character at the
// end.
func (in *incoming) text(n int) string {
	b := in.body[:min(n, len(in.body))]
	if len(b) < len(in.body) || in.truncated {
		b = whole(b)
	}
	return tasks.Text(string(b))
}

// whole returns b without half a character at the end.
func whole(b []byte) []byte {
	for i := 1; i < utf8.UTFMax && i <= len(b); i++ {
		if start := len(b) - i; utf8.RuneStart(b[start]) {
			if !utf8.FullRune(b[start:]) {
				return b[:start]
			}
			break
		}
	}
	return b
}

// excerpt returns the beginning of the body, to end an error's message with.
func (in *incoming) excerpt() string {
	text := strings.TrimSpace(in.text(maxErrorBody))
	if text == "" {
		return ""
	}
	if in.truncated || len(in.body) > maxErrorBody {
		text += " …"
	}
	return ": " + text
}

// storable returns decoded JSON without what Postgres' jsonb refuses: U+0000
// in a string becomes \x00, a number beyond a float64's range becomes a string.
// (A lone surrogate has become U+FFFD in decoding.) It reports false for what
// is nested deeper than depth.
func storable(value any, depth int) (any, bool) {
	if depth == 0 {
		return nil, false
	}
	switch value := value.(type) {
	case string:
		return tasks.Text(value), true
	case json.Number:
		if !keptNumber(value) {
			return string(value), true
		}
		return value, true
	case []any:
		for i := range value {
			var ok bool
			if value[i], ok = storable(value[i], depth-1); !ok {
				return nil, false
			}
		}
		return value, true
	case map[string]any:
		stored := make(map[string]any, len(value))
		for k, v := range value {
			var ok bool
			if stored[tasks.Text(k)], ok = storable(v, depth-1); !ok {
				return nil, false
			}
		}
		return stored, true
	}
	return value, true // true, false and null
}

// keptNumber reports whether a number is one that Postgres and others can read.
func keptNumber(n json.Number) bool {
	f, err := n.Float64()
	return err == nil && len(n) <= 400 && (f != 0 || isZero(string(n)))
}

// isZero reports whether a JSON number is zero as it is written, and not for being too small. Postgres
// keeps the digits behind the point of a zero too, and refuses 0e-16384.
func isZero(number string) bool {
	mantissa, exponent, _ := strings.Cut(strings.ToLower(number), "e")
	return !strings.ContainsAny(mantissa, "123456789") && len(strings.TrimLeft(exponent, "+-0")) <= 3
}
