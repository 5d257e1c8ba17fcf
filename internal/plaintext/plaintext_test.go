package plaintext_test

import (
	"bytes"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"onejob/internal/plaintext"
)

func TestPrintable(t *testing.T) {
	t.Parallel()
	for s, want := range map[string]string{
		"":                             "",
		"Zoë 日本　語 e\u0301 ✅ \\n":       "Zoë 日本　語 e\u0301 ✅ \\n", // ordinary text
		"a\x1b[31mb\x07\x00\x7f":       `a\x1b[31mb\x07\x00\x7f`,
		"a\nb\r\tc\v":                  `a\nb\r\tc\x0b`,
		"\u009b31m":                    `\u009b31m`, // a C1 control: CSI in one character
		"\u202eevil\u2066\u200f\ufeff": `\u202eevil\u2066\u200f\ufeff`,
		"\u2028\u2029\u200b":           `\u2028\u2029\u200b`,
		"\U000e0041":                   `\U000e0041`, // a tag, which nobody sees
		"\xff\x9b\xc3":                 `\xff\x9b\xc3`,
		"\ufffd":                       "\ufffd",
	} {
		if got := plaintext.Printable(s); got != want {
			t.Errorf("Printable(%q) = %s, want %s", s, got, want)
		}
	}
	if got, want := plaintext.Lines("a\tb\r\n\x1b[2J\rc\n"), "a    b\n"+`\x1b[2J\rc`+"\n"; got != want {
		t.Errorf("Lines: %q, want %q", got, want)
	}
}

// A shell takes what is copied into it for one word, and that is the name.
func TestWords(t *testing.T) {
	t.Parallel()
	names := []string{"calls", "a/b:c.d-e_f@1%+,", "", " ", "a b", "x; touch owned #", "$HOME", "`id`", "$(id)", "it's", "''", `a\b`, `"`, "*", "~", "a=b", "Zoë", "{a,b}", "!!", "a\nb", "-x", "--force"}
	for _, shell := range []string{"sh", "bash"} {
		for _, name := range names {
			out, err := exec.Command(shell, "-c", "printf '%s\\0' "+plaintext.Word(name)+" "+plaintext.Quoted(name)+" "+plaintext.Argument(name)).Output()
			if err != nil {
				t.Fatal(err)
			}
			want := []string{name, name, name, ""}
			if strings.HasPrefix(name, "-") {
				want = []string{name, name, "--", name, ""}
			}
			if got := bytes.Split(out, []byte{0}); !slices.EqualFunc(got, want, func(a []byte, b string) bool { return string(a) == b }) {
				t.Errorf("%s reads %q as %q", shell, name, got)
			}
		}
	}
	if got := plaintext.Word("reports"); got != "reports" {
		t.Errorf("an ordinary name is written as %s", got)
	}
}

func TestColumnsAlignWideCharacters(t *testing.T) {
	t.Parallel()
	rows := [][]string{{"KIND", "ERROR"}, {"発送", "none"}, {"e\u0301te\u0301", "none of them"}, {"", "日本語日本語"}}
	for width, want := range map[int]string{
		0:  "KIND  ERROR\n発送  none\ne\u0301te\u0301   none of them\n      日本語日本語",
		14: "KIND  ERROR\n発送  none\ne\u0301te\u0301   none of…\n      日本語…",
	} {
		if got := strings.Join(plaintext.Columns(rows, []bool{false, true}, width), "\n"); got != want {
			t.Errorf("in %d columns: %q, want %q", width, got, want)
		}
	}
}

// One long cell, such as a payload, is written whole and does not make the other lines as long.
func TestALongCellPadsNoOtherLine(t *testing.T) {
	t.Parallel()
	long, wide := strings.Repeat("x", 100_000), strings.Repeat("y", 200)
	got := plaintext.Columns([][]string{{long, "a", "b"}, {"c", wide, "d"}, {"e", "f", "g"}}, []bool{true, true, false}, 0)
	pad := func(n int) string { return strings.Repeat(" ", n) }
	want := []string{long + "  a" + pad(199) + "  b", "c" + pad(199) + "  " + wide + "  d", "e" + pad(199) + "  f" + pad(199) + "  g"}
	if !slices.Equal(got, want) {
		t.Errorf("the lines have lengths %d, %d and %d, want %d, %d and %d", len(got[0]), len(got[1]), len(got[2]), len(want[0]), len(want[1]), len(want[2]))
	}
}

func TestTheWidestColumnsGetNarrower(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		widths []int
		cut    []bool
		total  int
		want   []int
	}{
		{[]int{5, 30, 40}, []bool{false, true, true}, 100, []int{5, 30, 40}},
		{[]int{5, 30, 40}, []bool{false, true, true}, 70, []int{5, 30, 31}},
		{[]int{5, 30, 40}, []bool{false, true, true}, 49, []int{5, 20, 20}},
		{[]int{30, 30, 10}, []bool{false, true, true}, 10, []int{30, 8, 8}},
		{[]int{30, 4}, []bool{false, true}, 10, []int{30, 4}},
	} {
		got := slices.Clone(test.widths)
		if plaintext.Narrow(got, test.cut, test.total); !slices.Equal(got, test.want) {
			t.Errorf("%v in %d columns: %v, want %v", test.widths, test.total, got, test.want)
		}
	}
}
