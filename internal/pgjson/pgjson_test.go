package pgjson_test

import (
	"strings"
	"testing"

	"onejob/internal/pgjson"
)

func TestPrinted(t *testing.T) {
	for text, want := range map[string]int{
		``:                           0,
		`null`:                       4,
		`[true, false, 12.5]`:        19,
		`1e308`:                      5 + 308,
		`[-1E+3, 2e-7]`:              13 + 3 + 7,
		`"1e308"`:                    7,
		`{"a\"1e9": "\\", "b": 1e2}`: 26 + 2,
		`"open 1e9`:                  9,
		`[1e99999999999999999999]`:   24 + 131_072,
		strings.Repeat(`9`, 400):     400,
	} {
		if got := pgjson.Printed([]byte(text)); got != want {
			t.Errorf("%.40s: %d, want %d", text, got, want)
		}
	}
}

func BenchmarkPrinted(b *testing.B) {
	text := []byte(`{"rows": [` + strings.Repeat(`{"name": "some text", "n": 17, "x": 2.5e3},`, 1000) + `null]}`)
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		pgjson.Printed(text)
	}
}
