package tasks_test

import (
	"math"
	"strings"
	"sync"
	"testing"

	"onejob/tasks"
)

func TestReport(t *testing.T) {
	t.Parallel()
	var silent tasks.Attempt
	if p, said := silent.Progress(); said {
		t.Errorf("a handler that said nothing is at %+v", p)
	}
	long := strings.Repeat("ä", 150)
	for _, c := range []struct {
		percent float64
		text    string
		want    tasks.Progress
	}{
		{40, "rows", tasks.Progress{Percent: 40, Text: "rows"}},
		{0, "", tasks.Progress{}},
		{33.333, "", tasks.Progress{Percent: 33.3}},
		{1e300, "all", tasks.Progress{Percent: 100, Text: "all"}},
		{math.Inf(1), "", tasks.Progress{Percent: 100}},
		{-1, "waits", tasks.Progress{Percent: -1, Text: "waits"}},
		{math.NaN(), "waits", tasks.Progress{Percent: -1, Text: "waits"}},
		{math.Inf(-1), "", tasks.Progress{Percent: -1}},
		{5, " a\x00b\r\nc\x1b[31m \xff ", tasks.Progress{Percent: 5, Text: "a b  c [31m \uFFFD"}},
		{5, "x" + long, tasks.Progress{Percent: 5, Text: "x" + long[:198]}},
		{5, long, tasks.Progress{Percent: 5, Text: long[:200]}},
		{5, strings.Repeat("\xffx", 100), tasks.Progress{Percent: 5, Text: strings.Repeat("\uFFFDx", 50)}},
	} {
		var a tasks.Attempt
		a.Report(c.percent, c.text)
		got, said := a.Progress()
		if c.want.At = got.At; !said || got != c.want || got.At == 0 {
			t.Errorf("%v, %.40q is %+v, want %+v", c.percent, c.text, got, c.want)
		}
	}
}

func TestReportFromManyGoroutines(t *testing.T) {
	t.Parallel()
	var a tasks.Attempt
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 100 {
				a.Report(float64(i), "x")
				if p, said := a.Progress(); !said || p.Text != "x" {
					t.Errorf("read %+v", p)
				}
			}
		})
	}
	wg.Wait()
}
