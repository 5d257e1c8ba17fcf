package checker

import (
	"maps"
	"strings"
	"testing"
	"time"

	"onejob/internal/testenv/lifecycle"
)

// scheduled adds a schedule of every second from 100 to 104, and what became of its due
// times.
func (s *story) scheduled(p Policy, all ...Occurrence) {
	s.Schedules = append(s.Schedules, Schedule{Name: "p", Every: time.Second, First: at(100), Last: at(104), Policy: &p})
	for i, o := range all {
		o.Schedule, o.Due = "p", at(float64(100+i))
		s.Occurrences = append(s.Occurrences, o)
		if o.Task != 0 && s.Final[o.Task].Status == "" {
			s.Final[o.Task] = Final{Status: succeeded, Schedule: "p"}
		}
	}
}

// task is that of a due time, made at a moment; it begins then, is running from another
// moment on, and ends.
func (s *story) task(id int64, made, begins, ends float64) Occurrence {
	l := &life{s, id, lifecycle.Row{}}
	l.step(made, "a", func(r *lifecycle.Row) {
		*r = lifecycle.Row{Status: pending, Kind: "noop", RunAt: tick(made), CreatedAt: tick(made), MaxAttempts: 5, ScheduleID: 9}
	})
	l.claim(begins, "a").ends(ends, "a", succeeded, "")
	s.Final[id] = Final{Status: succeeded, Schedule: "p"}
	return Occurrence{Task: id, Made: at(made)}
}

func skipped(why string, made float64) Occurrence { return Occurrence{Skipped: why, Made: at(made)} }

func TestPolicies(t *testing.T) {
	policy := func(onMissed string, cap int) Policy { return Policy{onMissed, cap, "allow", 100} }
	skips, queues := Policy{"all", 100, "skip", 100}, Policy{"all", 100, "queue", 1}
	// Each is made in time, or the first four are made together with the last one.
	made := func(moments ...float64) (all []Occurrence) {
		for i, m := range moments {
			all = append(all, Occurrence{Task: int64(200 + i), Made: at(m)})
		}
		return all
	}
	wrong := map[string]int{"occurrences_wrong": 1}
	for name, c := range map[string]struct {
		how  func(s *story)
		want map[string]int
	}{
		"in time":          {func(s *story) { s.scheduled(policy("skip", 9), made(100, 101, 102, 103, 104)...) }, nil},
		"one is not there": {func(s *story) { s.scheduled(policy("skip", 9), made(100, 101, 102, 103)...) }, map[string]int{"occurrences_missing": 1}},
		"one is skipped and in time": {func(s *story) {
			s.scheduled(policy("skip", 9), append(made(100, 101, 102, 103), skipped(missed, 104))...)
		}, wrong},
		"missed ones are skipped": {func(s *story) {
			s.scheduled(policy("skip", 9), skipped(missed, 104.5), skipped(missed, 104.5), skipped(missed, 104.5), skipped(missed, 104.5), Occurrence{Task: 200, Made: at(104.5)})
		}, nil},
		"the last one of those dealt with together is after the end": {func(s *story) {
			m := skipped(missed, 106.5)
			s.scheduled(policy("skip", 9), m, m, m, m, m, m, Occurrence{Task: 200, Made: at(106.5)})
		}, nil},
		"a missed one is made": {func(s *story) {
			s.scheduled(policy("skip", 9), skipped(missed, 104.5), skipped(missed, 104.5), Occurrence{Task: 201, Made: at(104.5)}, skipped(missed, 104.5), Occurrence{Task: 200, Made: at(104.5)})
		}, wrong},
		"all of old are skipped": {func(s *story) {
			s.scheduled(policy("skip", 9), skipped(missed, 200), skipped(missed, 200), skipped(missed, 200), skipped(missed, 200), skipped(missed, 200))
		}, nil},
		"one for all of old": {func(s *story) {
			s.scheduled(policy("one", 9), skipped(missed, 200), skipped(missed, 200), skipped(missed, 200), skipped(missed, 200), Occurrence{Task: 200, Made: at(200)})
		}, nil},
		"none for all of old": {func(s *story) {
			s.scheduled(policy("one", 9), skipped(missed, 200), skipped(missed, 200), skipped(missed, 200), skipped(missed, 200), skipped(missed, 200))
		}, wrong},
		"all of old": {func(s *story) { s.scheduled(policy("all", 9), made(200, 200, 200, 200, 200)...) }, nil},
		"a missed one is not made": {func(s *story) {
			s.scheduled(policy("all", 9), append(made(104.5, 104.5), skipped(missed, 104.5), Occurrence{Task: 203, Made: at(104.5)}, Occurrence{Task: 204, Made: at(104.5)})...)
		}, wrong},
		"as many as may be": {func(s *story) {
			s.scheduled(policy("all", 2), append(made(104.5, 104.5), skipped(capped, 104.5), skipped(capped, 104.5), Occurrence{Task: 204, Made: at(104.5)})...)
		}, nil},
		"more than may be": {func(s *story) {
			s.scheduled(policy("all", 2), append(made(104.5, 104.5, 104.5), skipped(capped, 104.5), Occurrence{Task: 204, Made: at(104.5)})...)
		}, wrong},
		"a reason that does not hold": {func(s *story) {
			s.scheduled(policy("all", 9), append(made(100, 101, 102, 103), skipped(overlap, 104))...)
		}, wrong},
		"the clock was set": {func(s *story) {
			s.ClockSteps = []ClockStep{{at(99), time.Minute}}
			s.scheduled(policy("skip", 9), append(made(100, 101, 102, 103), skipped(missed, 104))...)
		}, nil},
		"the clock was set, and was right again long before": {func(s *story) {
			s.ClockSteps = []ClockStep{{at(5), time.Minute}, {at(10), 0}}
			s.scheduled(policy("skip", 9), append(made(100, 101, 102, 103), skipped(missed, 104))...)
		}, wrong},
		"the clock was set ahead, and showed what is shown again now": {func(s *story) {
			s.ClockSteps = []ClockStep{{at(-16), 2 * time.Minute}, {at(-14), 0}}
			s.scheduled(policy("skip", 9), append(made(100, 101, 102, 103), skipped(missed, 104))...)
		}, nil},

		"others are skipped while one runs": {func(s *story) {
			s.scheduled(skips, s.task(200, 100, 100.1, 103.5), skipped(overlap, 101), skipped(overlap, 102), skipped(overlap, 103), s.task(204, 104, 104.1, 105))
		}, nil},
		"one is made while one runs": {func(s *story) {
			s.scheduled(skips, s.task(200, 100, 100.1, 108), skipped(overlap, 101), skipped(overlap, 102), skipped(overlap, 103), s.task(204, 104, 104.1, 105))
		}, wrong},
		"one is skipped and nothing runs": {func(s *story) {
			s.scheduled(skips, s.task(200, 60, 60.1, 70), skipped(overlap, 101), s.task(202, 102, 102.1, 102.9), s.task(203, 103, 103.1, 103.9), s.task(204, 104, 104.1, 105))
		}, wrong},
		"one is skipped, and that is written long after the leader looked": {func(s *story) {
			s.scheduled(skips, s.task(200, 100, 100.1, 101.5), skipped(overlap, 140), s.task(202, 141, 141.1, 142), skipped(overlap, 141), skipped(overlap, 141))
		}, nil},
		"one is skipped and nothing runs when all are due": {func(s *story) {
			s.scheduled(skips, s.task(200, 100, 100.1, 101.5), skipped(overlap, 141), s.task(202, 141, 141.1, 142), skipped(overlap, 141), skipped(overlap, 141))
		}, wrong},
		"one waits and another one is skipped": {func(s *story) {
			s.scheduled(queues, s.task(200, 100, 100.1, 102.5), s.task(201, 101, 102.6, 104.5), skipped(overlap, 102), s.task(203, 103, 104.6, 105), skipped(overlap, 104))
		}, nil},
		"one waits and another one is made": {func(s *story) {
			s.scheduled(queues, s.task(200, 100, 100.1, 108), s.task(201, 101, 108, 109), skipped(overlap, 102), skipped(overlap, 103), s.task(204, 104.5, 109, 110))
		}, wrong},
		"none waits and one is skipped": {func(s *story) {
			s.scheduled(queues, s.task(200, 60, 60, 70), skipped(overlap, 101), s.task(202, 102, 102, 102.1), s.task(203, 103, 103, 103.1), s.task(204, 104, 104, 105))
		}, wrong},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStory()
			c.how(s)
			v := Check(s.Evidence)
			if got := numbers(t, v); !maps.Equal(got, c.want) {
				t.Errorf("the checker found %v, want %v; it says\n\t%s", got, c.want, strings.Join(v.Violations, "\n\t"))
			}
		})
	}
}
