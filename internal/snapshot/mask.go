package snapshot

import (
	"regexp"
	"strings"
)

var (
	uuidPattern   = regexp.MustCompile(`\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b`)
	hexPattern    = regexp.MustCompile(`\b(?:0[xX][0-9a-fA-F]+|[0-9a-fA-F]{8,})\b`)
	numberPattern = regexp.MustCompile(`[0-9]+(?:[.,:][0-9]+)*`)
)

// Mask returns an error without what differs from one task to the next: a UUID becomes UUID, a
// hexadecimal number HEX, any other number N. So errors with one cause look the same.
func Mask(text string) string {
	text = uuidPattern.ReplaceAllString(text, "UUID")
	text = hexPattern.ReplaceAllStringFunc(text, func(found string) string {
		if !strings.ContainsAny(found, "0123456789") {
			return found // a word, such as "defaced"
		}
		if strings.Trim(found, "0123456789") == "" {
			return "N"
		}
		return "HEX"
	})
	return numberPattern.ReplaceAllString(text, "N")
}
