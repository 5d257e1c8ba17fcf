package main

import (
	"fmt"
	"slices"
	"strings"
)

// column is one subject's share of a comparison. What is nil cannot be known of
// a subject: it keeps no row running, or has no fence that could refuse.
type column struct {
	Subject      string  `json:"subject"`
	Faults       int     `json:"faults"`
	FaultKinds   int     `json:"fault_kinds"`
	FaultsMissed int     `json:"faults_missed"`
	Tasks        int     `json:"tasks"`
	Stays        int     `json:"stays"`
	Overlaps     int     `json:"overlaps"`
	Lost         int     `json:"lost"`
	DoubleSucc   int     `json:"double_success"`
	DoubleEffect int     `json:"double_effect"`
	Stale        int     `json:"stale_accepted"`
	Repeated     int     `json:"repeated"`
	Refused      *int    `json:"refused,omitempty"`
	TakeOvers    int     `json:"takeovers"`
	TakeOverP50  float64 `json:"takeover_p50_s"`
	TakeOverMax  float64 `json:"takeover_max_s"`

	Violations []string `json:"violations,omitempty"` // the first ones; onejob's are in its own report
}

func newColumn(subject string, r *report) column {
	c := column{
		Subject: subject, Faults: r.Faults, FaultKinds: len(r.FaultKinds), FaultsMissed: r.FaultsMissed, Tasks: r.Tasks, Stays: r.Stays,
		Overlaps: r.Overlaps, Lost: r.Lost, DoubleSucc: r.DoubleSuccess, DoubleEffect: r.DoubleEffect, Stale: r.StaleAccepted, Repeated: r.Repeated,
		TakeOvers: r.TakeOvers, TakeOverP50: r.TakeOverP50, TakeOverMax: r.TakeOverMax,
	}
	if subject == onejobName {
		c.Refused = &r.Refused
	} else {
		c.Violations = r.Violations
	}
	return c
}

// outcome is what is written to the file: onejob's report, if it was among the
// subjects, and the comparison.
type outcome struct {
	*report
	Comparison []column `json:"comparison"`
}

// table returns the comparison as a table with a column for each subject.
func (o outcome) table() string {
	var b strings.Builder
	line := func(name string, value func(column) any) {
		fmt.Fprintf(&b, "  %-18s", name)
		for _, c := range o.Comparison {
			fmt.Fprintf(&b, " %10v", value(c))
		}
		fmt.Fprintln(&b)
	}
	fmt.Fprintf(&b, "\nthe same seed and the same plan of faults:\n\n")
	line("", func(c column) any { return c.Subject })
	line("faults", func(c column) any { return c.Faults })
	line("fault_kinds", func(c column) any { return c.FaultKinds })
	line("faults_missed", func(c column) any { return c.FaultsMissed })
	line("tasks", func(c column) any { return c.Tasks })
	line("attempts seen", func(c column) any { return c.Stays })
	line("overlaps", func(c column) any { return c.Overlaps })
	line("lost", func(c column) any { return c.Lost })
	line("double_success", func(c column) any { return c.DoubleSucc })
	line("double_effect", func(c column) any { return c.DoubleEffect })
	line("stale_accepted", func(c column) any { return c.Stale })
	line("repeated", func(c column) any { return c.Repeated })
	line("refused", func(c column) any {
		if c.Refused == nil {
			return "-"
		}
		return *c.Refused
	})
	line("takeovers", func(c column) any { return c.TakeOvers })
	line("takeover_p50_s", func(c column) any { return c.TakeOverP50 })
	line("takeover_max_s", func(c column) any { return c.TakeOverMax })
	for _, c := range o.Comparison {
		if c.Subject == onejobName || len(c.Violations) == 0 {
			continue
		}
		fmt.Fprintf(&b, "\nsome of what %s did:\n", c.Subject)
		// One sort of violation may fill the list.
		shown := map[string]int{}
		for _, v := range c.Violations {
			sort, _, _ := strings.Cut(v, ":")
			if shown[sort]++; shown[sort] <= 3 {
				fmt.Fprintln(&b, " ", v)
			}
		}
	}
	return b.String()
}

// violated reports whether onejob is: what the others do is there to compare.
func (o outcome) violated() bool { return o.report != nil && o.report.Violated() }

// compares reports whether there is anything to compare onejob with.
func compares(subjects []string) bool {
	return slices.ContainsFunc(subjects, func(s string) bool { return s != onejobName })
}
