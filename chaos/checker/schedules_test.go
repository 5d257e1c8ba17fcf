package checker

import (
	"fmt"
	"testing"
	"time"
)

func TestTimetable(t *testing.T) {
	line := func(since float64, cron string) Edit { return Edit{"s", cron, "UTC", true, 0, at(since)} }
	in := func(zone string, d Edit) Edit { d.Zone = zone; return d }
	off := func(d Edit) Edit { d.Enabled = false; return d }
	until := func(end float64, d Edit) Edit { d.Paused = at(end); return d }
	step := func(since, ahead float64) ClockStep {
		return ClockStep{at(since), time.Duration(ahead * float64(time.Second))}
	}
	const twos, threes = "*/2 * * * * *", "*/3 * * * * *"
	for name, c := range map[string]struct {
		lines []Edit
		steps []ClockStep
		// must, may or not, by due time
		want map[float64]string
	}{
		"one line": {
			[]Edit{line(0.5, twos)}, nil,
			map[float64]string{0: "not", 1: "not", 2: "must", 3: "not", 58: "must", 600: "must"},
		},
		"an edit": {
			[]Edit{line(-5, twos), line(10.5, threes)}, nil,
			map[float64]string{8: "must", 9: "not", 10: "must", 12: "must", 14: "not", 15: "must"},
		},
		"edits within a second": {
			[]Edit{line(-5, twos), line(10.3, threes), line(10.6, twos)}, nil,
			map[float64]string{9: "not", 10: "must", 12: "must", 14: "must", 15: "not"},
		},
		"an edit at the due time": {
			[]Edit{line(-5, twos), line(10.1, threes), line(11.9, twos)}, nil,
			map[float64]string{10: "may", 12: "must"},
		},
		"a line that is switched off": {
			[]Edit{line(-5, twos), off(line(10.5, twos)), line(20.5, twos)}, nil,
			map[float64]string{10: "must", 12: "not", 20: "not", 22: "must"},
		},
		"a pause": {
			[]Edit{line(-5, twos), until(14, line(10.5, twos))}, nil,
			map[float64]string{10: "must", 12: "not", 14: "must", 16: "must"},
		},
		"minutes of another zone": { // it is 12:00 in UTC, and 17:45 in Nepal
			[]Edit{line(-5, "*/5 */2 * * * *"), in("Asia/Kathmandu", line(30, "*/5 */2 * * * *")), in("Asia/Kathmandu", line(130, "*/5 1-59/2 * * * *"))}, nil,
			map[float64]string{5: "must", 35: "not", 65: "must", 120: "not", 135: "must", 185: "not"},
		},
		"a clock that is set forward": { // at 20 it shows 80
			[]Edit{line(-5, twos), line(25, threes)},
			[]ClockStep{step(20, 60)},
			map[float64]string{16: "must", 50: "must", 51: "not", 82: "must", 84: "must", 86: "not", 87: "must"},
		},
		"a clock that is set back": { // at 20 it shows 5 again
			[]Edit{line(-5, twos), line(22, threes)},
			[]ClockStep{step(20, -15)},
			map[float64]string{3: "not", 4: "must", 6: "must", 8: "may", 9: "must", 12: "must", 14: "may", 16: "may", 21: "must", 22: "not"},
		},
		"an edit while the clock was ahead": { // it shows 85 then, and 30 at 30
			[]Edit{line(-5, twos), line(25, threes)},
			[]ClockStep{step(20, 60), step(30, 0)},
			map[float64]string{34: "may", 33: "may", 36: "must", 82: "may", 84: "must", 87: "must", 88: "not"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			for due, want := range c.want {
				must, may := timetable{c.lines, c.steps}.owes(at(due))
				got := "not"
				switch {
				case must && !may:
					got = "must and not may"
				case must:
					got = "must"
				case may:
					got = "may"
				}
				if got != want {
					t.Errorf("due at %v: %s, want %s", due, got, want)
				}
			}
		})
	}
}

// edit adds a schedule that is edited, with each due time of which something must
// become.
func (s *story) edit() {
	s.Edits = []Edit{{"e", "*/2 * * * * *", "UTC", true, 0, at(-0.5)}, {"e", "*/3 * * * * *", "UTC", true, 0, at(4.5)}}
	s.Until = at(10)
	for i, second := range []float64{0, 2, 4, 6, 9} {
		id := int64(70 + i)
		s.Occurrences = append(s.Occurrences, Occurrence{Schedule: "e", Due: at(second), Task: id})
		s.Final[id] = Final{Status: succeeded, Schedule: "e"}
	}
}

func TestEditedSchedules(t *testing.T) {
	for name, c := range map[string]struct {
		how  func(s *story)
		want map[string]int
	}{
		"all is there":                  {func(*story) {}, map[string]int{}},
		"a due time of the line before": {func(s *story) { s.lose(74 - 2) }, map[string]int{"occurrences_missing": 1}},
		"a due time of the line after":  {func(s *story) { s.lose(73) }, map[string]int{"occurrences_missing": 1}},
		"one that no line names":        {func(s *story) { s.Occurrences[4].Due = at(3) }, map[string]int{"occurrences_missing": 1, "occurrences_wrong": 1}},
		"an edit later by one due time": {func(s *story) { s.Edits[1].At = at(6.5) }, map[string]int{}},
		"a task for nothing":            {func(s *story) { s.Final[80] = Final{Status: succeeded, Schedule: "e"} }, map[string]int{"occurrences_doubled": 1}},
		"another payload":               {func(s *story) { s.Odd = []Odd{{70, "1", "2"}} }, map[string]int{"occurrences_wrong": 1}},
	} {
		t.Run(name, func(t *testing.T) {
			s := good()
			s.edit()
			c.how(s)
			v := Check(s.Evidence)
			if got := numbers(t, v); fmt.Sprint(got) != fmt.Sprint(c.want) {
				t.Errorf("the checker found %v, want %v: %v", got, c.want, v.Violations)
			}
		})
	}
}

// lose takes the occurrence of a task away, and the task.
func (s *story) lose(task int64) {
	for i, o := range s.Occurrences {
		if o.Task == task {
			s.Occurrences = append(s.Occurrences[:i], s.Occurrences[i+1:]...)
			break
		}
	}
	delete(s.Final, task)
}
