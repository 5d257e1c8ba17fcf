package exec

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestParseProgress(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]string{
		"40%":                      "40 ",
		"40% of it":                "40 of it",
		"400/1000 rows":            "40 400/1000 rows",
		"1/3":                      "33.333333333333336 1/3",
		"3/2":                      "150 3/2", // Attempt.Report makes 100 of it
		"waits for the mirror\r":   "-1 waits for the mirror",
		"40":                       "-1 40",
		"-40%":                     "-1 -40%",
		"NaN% x":                   "-1 NaN% x",
		"Inf%":                     "-1 Inf%",
		"1e999/1e999 x":            "-1 1e999/1e999 x",
		"5/0 of nothing":           "-1 5/0 of nothing",
		"a/b is a path":            "-1 a/b is a path",
		"http://example.org/100%":  "-1 http://example.org/100%",
		"  7%   with  much space ": "7 with  much space",
		"":                         "-1 ",
	} {
		if percent, text := parseProgress(line); fmt.Sprintf("%v %s", percent, text) != want {
			t.Errorf("%q is %v, %q, want %q", line, percent, text, want)
		}
	}
}

// Whatever a command writes, in whichever portions: what is kept is what it wrote without the
// lines that are reports, and each of those is reported once.
func TestProgressFilterLosesNothing(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		lines := rapid.SliceOfN(rapid.SampledFrom([]string{
			"", "plain", ":", "::", "::progress", "::progress ", "::progressive", " ::progress 1%", "::progress 40% x", "::progress 2/4",
			"::progress text\r", ":::progress 5%", "::progress " + strings.Repeat("y", 2*maxProgressLine), strings.Repeat("z", 100), "::proGress 3%", "a::progress 1%",
		}), 0, 12).Draw(t, "lines")
		text := strings.Join(lines, "\n")
		var kept, reports []string
		for _, line := range lines {
			if rest, is := strings.CutPrefix(line, progressPrefix); is {
				rest = rest[:min(len(rest), maxProgressLine-len(progressPrefix))]
				percent, text := parseProgress(rest)
				reports = append(reports, fmt.Sprint(percent, text))
			} else {
				kept = append(kept, line)
			}
		}
		want := strings.Join(kept, "\n")
		if n := len(lines); n > len(kept) && len(kept) > 0 && strings.HasPrefix(lines[n-1], progressPrefix) {
			want += "\n" // it ended the line before
		}

		var out bytes.Buffer
		var told []string
		f := progressFilter{to: &out, report: func(percent float64, text string) { told = append(told, fmt.Sprint(percent, text)) }}
		for rest := []byte(text); len(rest) > 0; {
			n := rapid.IntRange(1, min(len(rest), 40)).Draw(t, "n")
			if wrote, err := f.Write(rest[:n]); wrote != n || err != nil {
				t.Fatalf("wrote %d of %d: %v", wrote, n, err)
			}
			rest = rest[n:]
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		if got := out.String(); got != want {
			t.Fatalf("of %q is kept %q, want %q", text, got, want)
		}
		if !slices.Equal(told, reports) {
			t.Fatalf("of %q is reported %q, want %q", text, told, reports)
		}
		if cap(f.held) > 2*maxProgressLine {
			t.Fatalf("%d bytes are held", cap(f.held))
		}
	})
}

// What comes before and after a report is kept with its own line ends.
func TestProgressFilterKeepsLines(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	f := progressFilter{to: &out, report: func(float64, string) {}}
	fmt.Fprint(&f, "one\n::progress 10%\ntwo\n::progress 20%\n")
	fmt.Fprint(&f, "::prog")
	if err := f.Close(); err != nil || out.String() != "one\ntwo\n::prog" {
		t.Errorf("kept is %q, %v", out.String(), err)
	}
}

type broken struct{}

func (broken) Write([]byte) (int, error) { return 0, errors.New("full") }

func TestProgressFilterTellsErrors(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"x", ":x", "a\n:"} {
		f := progressFilter{to: broken{}, report: func(float64, string) {}}
		if _, err := f.Write([]byte(text)); err == nil {
			t.Errorf("%q was written", text)
		}
	}
}
