package snapshot

import (
	"regexp"
	"strings"
	"unicode"
)

var (
	uuidPattern   = regexp.MustCompile(`\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b`)
	hexPattern    = regexp.MustCompile(`\b(?:0[xX][0-9a-fA-F]+|[0-9a-fA-F]{8,})\b`)
	numberPattern = regexp.MustCompile(`[0-9]+(?:[.,:][0-9]+)*`)
)

// Mask returns an error without what differs from one task to the next: a UUID becomes UUID, a
// hexadecimal number HEX, any other number N. So errors with one cause look the same.
func Mask(text string) string { return mask(text, "UUID", "HEX", "N") }

// Pattern returns the LIKE pattern of the errors that Mask makes the same: % stands for each
// masked place. It also stands for line feeds and other characters that nobody sees, so
// that a form carries the pattern as it is.
func Pattern(text string) string {
	// Zero bytes mark the places: no error has them, because no text in Postgres does.
	marked := mask(strings.ReplaceAll(text, "\x00", " "), "\x00", "\x00", "\x00")
	var b strings.Builder
	open := false // the pattern ends in %
	for _, r := range marked {
		switch {
		case !unicode.IsGraphic(r), r == '\ufffd':
			if !open {
				b.WriteByte('%')
			}
			open = true
			continue
		case r == '\\' || r == '%' || r == '_':
			b.WriteByte('\\')
		}
		open = false
		b.WriteRune(r)
	}
	return b.String()
}

// mask replaces UUIDs, hexadecimal numbers and other numbers.
func mask(text, uuid, hex, number string) string {
	text = uuidPattern.ReplaceAllString(text, uuid)
	text = hexPattern.ReplaceAllStringFunc(text, func(found string) string {
		if !strings.ContainsAny(found, "0123456789") {
			return found // a word, such as "defaced"
		}
		if strings.Trim(found, "0123456789") == "" {
			return number
		}
		return hex
	})
	return numberPattern.ReplaceAllString(text, number)
}
