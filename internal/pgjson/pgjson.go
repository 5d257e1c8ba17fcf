// Package pgjson tells how long JSON is when Postgres prints it.
package pgjson

import (
	"bytes"
	"fmt"
)

// mostDigits is how many digits before or after the point Postgres keeps of a number, about.
const mostDigits = 131_072

// Printed returns about how many bytes the text has that Postgres makes of valid JSON when it has kept it
// as jsonb. It writes numbers out: of 1e308 it makes 309 digits.
func Printed(text []byte) (size int) {
	size = len(text)
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c == '"':
			i += stringEnd(text[i+1:]) + 1
		case (c == 'e' || c == 'E') && i > 0 && text[i-1] >= '0' && text[i-1] <= '9': // not that of true or false
			exponent := 0
			for i++; i < len(text) && bytes.IndexByte([]byte("+-0123456789"), text[i]) >= 0; i++ {
				if text[i] >= '0' {
					exponent = min(10*exponent+int(text[i]-'0'), mostDigits)
				}
			}
			i--
			size += exponent
		}
	}
	return size
}

// TooLong says how long JSON is for which there are so many bytes, or nothing if it is not too long.
func TooLong(text []byte, most int) string {
	switch n := Printed(text); {
	case len(text) > most:
		return fmt.Sprintf("it has %d bytes, of at most %d", len(text), most)
	case n > most:
		return fmt.Sprintf("it has %d bytes when its numbers are written out, of at most %d", n, most)
	}
	return ""
}

// stringEnd returns where the quotation mark is that ends a string whose rest this is.
func stringEnd(rest []byte) int {
	for i := 0; i < len(rest); i++ {
		switch rest[i] {
		case '\\':
			i++
		case '"':
			return i
		}
	}
	return len(rest)
}
