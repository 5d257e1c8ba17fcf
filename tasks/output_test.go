package tasks_test

import (
	"bytes"
	"math"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"onejob/tasks"
)

func TestOutputKeepsHeadAndTail(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		limit  int
		writes []string
		want   string
	}{
		"nothing":               {8, nil, ""},
		"less than the limit":   {8, []string{"abc", "def"}, "abcdef"},
		"just the limit":        {8, []string{"abcdefgh"}, "abcdefgh"},
		"one byte more":         {8, []string{"abcdefghi"}, "abcd\n... 1 bytes left out ...\nfghi"},
		"much more at once":     {4, []string{"ab" + strings.Repeat("-", 1000) + "yz"}, "ab\n... 1000 bytes left out ...\nyz"},
		"more in small writes":  {4, strings.Split("abcdefghijk", ""), "ab\n... 7 bytes left out ...\njk"},
		"around the ring":       {8, []string{"abcd", "efg", "hij", "k"}, "abcd\n... 3 bytes left out ...\nhijk"},
		"odd limits are halved": {3, []string{"abcde"}, "ab\n... 1 bytes left out ...\nde"},
		"NUL":                   {16, []string{"a\x00b"}, `a\x00b`},
		"not UTF-8":             {16, []string{"a\xffb\xc3"}, `a\xffb\xc3`},
		"a rune in two writes":  {16, []string{"\xc3", "\xa4"}, "ä"},
		"a rune cut in two":     {4, []string{"aä---äz"}, "a\\xc3\n... 5 bytes left out ...\n\\xa4z"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := tasks.NewOutput(test.limit)
			for _, w := range test.writes {
				if n, err := o.Write([]byte(w)); n != len(w) || err != nil {
					t.Fatalf("Write returned %d, %v", n, err)
				}
			}
			if got := o.String(); got != test.want {
				t.Errorf("%q, want %q", got, test.want)
			}
		})
	}
}

// Whatever is written in whatever pieces, what is kept is its head and tail.
func FuzzOutput(f *testing.F) {
	f.Add([]byte("hello, world"), 3, 4)
	f.Add([]byte("\x00\xff\xc3\xa4"), 1, 2)
	f.Fuzz(func(t *testing.T, data []byte, piece, limit int) {
		if piece < 1 || limit < 1 || limit > 1<<20 {
			t.Skip()
		}
		o := tasks.NewOutput(limit)
		for rest := data; len(rest) > 0; {
			n := min(piece, len(rest))
			_, _ = o.Write(rest[:n])
			rest = rest[n:]
		}
		got := o.String()
		if !utf8.ValidString(got) || strings.Contains(got, "\x00") {
			t.Errorf("Postgres would refuse %q", got)
		}
		half := (limit + 1) / 2
		if len(data) <= 2*half {
			if want := tasks.Text(string(data)); got != want {
				t.Errorf("%q, want %q", got, want)
			}
			return
		}
		head, tail := tasks.Text(string(data[:half])), tasks.Text(string(data[len(data)-half:]))
		if !strings.HasPrefix(got, head) || !strings.HasSuffix(got, tail) {
			t.Errorf("%q, want %q ... %q", got, head, tail)
		}
	})
}

func TestOutputLimit(t *testing.T) {
	t.Parallel()
	o := tasks.NewOutput(0)
	o.Limit(4)
	o.Limit(0) // means no change
	_, _ = o.Write([]byte("abcdef"))
	o.Limit(100) // too late
	if want := "ab\n... 2 bytes left out ...\nef"; o.String() != want {
		t.Errorf("%q, want %q", o.String(), want)
	}
	for _, o := range []*tasks.Output{tasks.NewOutput(math.MaxInt), tasks.NewOutput(0)} {
		o.Limit(math.MaxInt)
		_, _ = o.Write(bytes.Repeat([]byte("x"), tasks.MaxKept+10))
		if text := o.String(); len(text) > tasks.MaxKept+100 || !strings.Contains(text, "... 10 bytes left out ...") {
			t.Errorf("without a limit %d bytes are kept", len(text))
		}
	}
	o = tasks.NewOutput(0)
	_, _ = o.Write(make([]byte, tasks.DefaultOutputLimit))
	if strings.Contains(o.String(), "left out") {
		t.Error("less than the default is kept")
	}
}

func TestOutputLastLine(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("ä", 200)
	for name, test := range map[string]struct{ output, want string }{
		"nothing":                     {"", ""},
		"blank lines alone":           {"\n \n\t\r\n", ""},
		"one line":                    {"no space left", "no space left"},
		"blank lines after it":        {"begin\n  no space left \r\n\n \n", "no space left"},
		"what a progress bar ends on": {"10%\r20%\rbroken pipe\n", "broken pipe"},
		"the end of a long line":      {"begin\n" + long, "... " + long[100:]},
		"a rune is not cut in two":    {"begin\nx" + long + "y", "... " + long[102:] + "y"},
		"bytes that are not text":     {"a\n\xff\x00b\n", `\xff\x00b`},
		"of what was kept":            {"first\n" + strings.Repeat("-", 3000) + "\nlast\n", "last"},
		"partly in head, partly tail": {strings.Repeat("-", 490) + "\n" + strings.Repeat("+", 20), strings.Repeat("+", 20)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := tasks.NewOutput(1000)
			_, _ = o.Write([]byte(test.output))
			if got := o.LastLine(); got != test.want {
				t.Errorf("%q, want %q", got, test.want)
			}
		})
	}
}

func TestOutputMayBeWrittenByMany(t *testing.T) {
	t.Parallel()
	o := tasks.NewOutput(100)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range 100 {
				_, _ = o.Write([]byte("0123456789"))
				_ = o.String()
			}
		})
	}
	all.Wait()
	if !strings.Contains(o.String(), "... 3900 bytes left out ...") {
		t.Errorf("%q", o.String())
	}
}
