package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"onejob/chaos/checker"
	"onejob/chaos/harness"
	"onejob/chaos/observer"
)

// figures are what is measured of one fault.
type figures struct {
	fault                    *fault
	oldTimeline, newTimeline int
	began, over              time.Time
	first                    accepted // write on a later timeline

	events    int           // postgres_failed_over
	resumed   time.Duration // from the first write until the first task that was claimed from the new primary began
	gap       time.Duration // the longest time in which no task began
	forgotten int           // acknowledged tasks that are not there
}

// resuming is how long onejob may take until it works with the new primary. It only keeps
// a run from passing in which onejob hangs; a busy machine must not fail by it.
const resuming = 30 * time.Second

// report is what is left of a run.
type report struct {
	settings   settings
	build      harness.Build
	began      time.Time
	figures    []*figures
	result     *checker.Report
	violations []string
}

func (r *report) violated() bool { return r.result.Violated() || len(r.violations) > 0 }

func (r *report) violation(format string, a ...any) {
	r.violations = append(r.violations, fmt.Sprintf(format, a...))
}

// event is a line of a replica's log.
type event struct {
	Time       time.Time `json:"time"`
	Event      string    `json:"event"`
	FencesFrom int64     `json:"fences_from"`
}

// failovers returns all that replicas said of failovers, in the order of time, and how
// many writes they were refused.
func (c *cluster) failovers() (list []event, refused int, err error) {
	for _, h := range c.hosts {
		f, err := os.Open(h.log("onejob"))
		if err != nil {
			return nil, 0, err
		}
		defer f.Close()
		lines := bufio.NewScanner(f)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			var e event
			if json.Unmarshal(lines.Bytes(), &e) != nil {
				continue // a crash may print anything
			}
			switch e.Event {
			case "postgres_failed_over":
				list = append(list, e)
			case "completion_refused":
				refused++
			}
		}
		if err := lines.Err(); err != nil {
			return nil, 0, err
		}
	}
	slices.SortFunc(list, func(a, b event) int { return a.Time.Compare(b.Time) })
	return list, refused, nil
}

// checkAll fills in the report. There are the tasks with the given unique keys.
func (c *cluster) checkAll(r *report, e checker.Evidence, there map[string]bool) error {
	events, refused, err := c.failovers()
	if err != nil {
		return err
	}
	e.Refused = refused
	r.result = checker.Check(e)
	if e.Forgetful {
		// The table and the notes in it were forgotten together. So what the notes say of
		// writes that are left is as good as ever: only tasks may be gone.
		e.Forgetful = false
		all := checker.Check(e)
		r.result.DoubleSuccess, r.result.DoubleEffect = all.DoubleSuccess, all.DoubleEffect
		r.result.DoubleRunning, r.result.StaleAccepted = all.DoubleRunning, all.StaleAccepted
		for _, v := range all.Violations {
			if !slices.Contains(r.result.Violations, v) && !strings.HasPrefix(v, "lost:") {
				r.result.Violations = append(r.result.Violations, v)
			}
		}
	}
	begins := make([]observer.Stay, len(e.Stays))
	copy(begins, e.Stays)
	slices.SortFunc(begins, func(a, b observer.Stay) int { return int(a.Begin - b.Begin) })
	for i, f := range r.figures {
		until := time.Now()
		if i+1 < len(r.figures) {
			until = r.figures[i+1].began
		}
		f.measure(begins, events, c.writers.accepted, there, until)
		if rise := f.newTimeline - f.oldTimeline; f.events < 1 || f.events > rise {
			r.violation("%s: %d times postgres_failed_over, and the timeline rose by %d", f.fault.name, f.events, rise)
		}
		if r.settings.standby == synchronous && f.forgotten > 0 {
			r.violation("%s: %d acknowledged tasks are not there, although a standby was synchronous", f.fault.name, f.forgotten)
		}
		if f.resumed > resuming {
			r.violation("%s: no task that was claimed from the new primary began within %v of its first write", f.fault.name, resuming)
		}
	}
	return nil
}

// measure fills in the figures from what the observer saw, what replicas said, and what
// was acknowledged until the next fault began.
func (f *figures) measure(begins []observer.Stay, events []event, all []accepted, there map[string]bool, until time.Time) {
	from := int64(-1)
	for _, e := range events {
		if e.Time.After(f.began) && e.Time.Before(until) {
			if f.events++; from < 0 {
				from = e.FencesFrom
			}
		}
	}
	f.resumed = time.Hour
	previous := observer.At(f.began)
	for _, s := range begins {
		if s.Begin < previous || s.Begin > observer.At(f.over) {
			continue
		}
		f.gap = max(f.gap, s.Begin.Sub(previous))
		previous = s.Begin
	}
	for _, s := range begins {
		if from >= 0 && s.Fence > from {
			f.resumed = max(0, s.Begin.Sub(observer.At(f.first.at)))
			break
		}
	}
	for _, a := range all {
		if !there[a.token] && a.at.After(f.began) && a.at.Before(until) {
			f.forgotten++
		}
	}
}

// count is one number of a report.
type count struct {
	name string
	n    int
	note string
}

// zeros are the numbers that must be 0.
func (r *report) zeros() []count {
	v := r.result
	return []count{
		{"overlaps", v.Overlaps, "two attempts of one lock key at once, or a fence below an earlier one"},
		{"fences_repeated", v.FencesRepeated, "fences that two attempts had"},
		{"lost", v.Lost, "tasks that are there and did not finish"},
		{"spoiled", v.Spoiled, "tasks that failed"},
		{"double_success", v.DoubleSuccess, "tasks accepted as succeeded twice"},
		{"double_effect", v.DoubleEffect, "sql tasks that took effect twice"},
		{"double_running", v.DoubleRunning, "two rows of one lock key running at once"},
		{"stale_accepted", v.StaleAccepted, "accepted writes that were not the holder's"},
		{"unlocked", v.Unlocked, "attempts that began without a quorum of Consul"},
	}
}

func (r *report) others() []count {
	return []count{
		{"refused", r.result.Refused, "writes that the fence kept out"},
		{"repeated", r.result.Repeated, "tasks that did their work more than once"},
	}
}

func (r *report) allViolations() []string {
	return append(slices.Clone(r.violations), r.result.Violations...)
}

func (r *report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "\n%s; standbys follow: %s\n\n", r.build, r.settings.standby)
	fmt.Fprintf(&b, "  %-14s %22s %24s %24s %10s %9s\n", "fault", "first write accepted", "first task after that", "longest time without", "forgotten", "events")
	fmt.Fprintf(&b, "  %-14s %22s %24s %24s %10s %9s\n", "", "after", "begins after", "a task that begins", "tasks", "")
	for _, f := range r.figures {
		fmt.Fprintf(&b, "  %-14s %20.1f s %22.1f s %22.1f s %10d %9d\n", f.fault.name, f.first.at.Sub(f.began).Seconds(), f.resumed.Seconds(), f.gap.Seconds(), f.forgotten, f.events)
	}
	fmt.Fprintf(&b, "\n%d attempts seen by the observer\n", r.result.Stays)
	list := func(title string, counts []count) {
		fmt.Fprintf(&b, "\n%s:\n", title)
		for _, c := range counts {
			fmt.Fprintf(&b, "  %-16s %6d  %s\n", c.name, c.n, c.note)
		}
	}
	list("must be zero", r.zeros())
	list("to know", r.others())
	if all := r.allViolations(); len(all) > 0 {
		fmt.Fprintln(&b, "\nviolations:")
		for _, v := range all[:min(30, len(all))] {
			fmt.Fprintln(&b, " ", v)
		}
	}
	return b.String()
}

// written is a report as REPORT keeps it. Times are in seconds.
type written struct {
	Started    time.Time         `json:"started"`
	Settings   map[string]string `json:"settings"`
	Build      harness.Build     `json:"build"`
	CPUs       int               `json:"cpus"`
	Attempts   int               `json:"attempts"` // that the observer saw
	Faults     []writtenFault    `json:"faults"`
	Zeros      map[string]int    `json:"must_be_zero"`
	Others     map[string]int    `json:"to_know"`
	Violations []string          `json:"violations"`
}

type writtenFault struct {
	Name       string  `json:"name"`
	FirstWrite float64 `json:"first_write_s"` // accepted, since the fault began
	FirstTask  float64 `json:"first_task_s"`  // that was claimed from the new primary and began, since the first write
	Gap        float64 `json:"gap_s"`         // the longest time in which no task began
	Forgotten  int     `json:"forgotten"`     // acknowledged tasks
	Events     int     `json:"events"`        // postgres_failed_over
}

func (r *report) write(path string) error {
	inTenths := func(d time.Duration) float64 { return float64(d.Round(100*time.Millisecond)) / float64(time.Second) }
	w := written{Started: r.began, Settings: map[string]string{"STANDBY": r.settings.standby, "FAULTS": os.Getenv("FAULTS")}, Build: r.build, CPUs: runtime.NumCPU(),
		Attempts: r.result.Stays, Zeros: map[string]int{}, Others: map[string]int{}, Violations: r.allViolations()}
	for _, f := range r.figures {
		w.Faults = append(w.Faults, writtenFault{f.fault.name, inTenths(f.first.at.Sub(f.began)), inTenths(f.resumed), inTenths(f.gap), f.forgotten, f.events})
	}
	for _, c := range r.zeros() {
		w.Zeros[c.name] = c.n
	}
	for _, c := range r.others() {
		w.Others[c.name] = c.n
	}
	text, err := json.MarshalIndent(w, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o644)
}
