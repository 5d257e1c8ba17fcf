package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"onejob/internal/mutants"
)

// markdown writes the table for people: a line for each mutant that somebody has looked at,
// and who caught it.
func (t *table) markdown(out io.Writer) {
	fmt.Fprintf(out, "| mutant | what is broken | tests | simulation | chaos |\n|---|---|---|---|---|\n")
	for _, m := range mutants.All {
		if !slices.ContainsFunc(t.Results, func(r result) bool { return r.Mutant == m.Name }) {
			continue
		}
		line := []string{"`" + m.Name + "`", m.What}
		for _, by := range []string{byTests, bySimulation, byChaos} {
			line = append(line, t.summary(m.Name, by))
		}
		fmt.Fprintf(out, "| %s |\n", strings.Join(line, " | "))
	}
}

// summary says how often a method caught a mutant, and by what the first time, and after
// how long in the median, with the build.
func (t *table) summary(mutant, by string) string {
	var caught []result
	looks := 0
	for _, r := range t.Results {
		if r.Mutant == mutant && r.By == by {
			looks++
			if r.Caught {
				caught = append(caught, r)
			}
		}
	}
	switch {
	case looks == 0:
		return "—"
	case len(caught) == 0:
		return "not caught"
	}
	often := ""
	if looks > 1 {
		often = fmt.Sprintf("%d of %d: ", len(caught), looks)
	}
	how := rule(caught[0])
	slices.SortFunc(caught, func(a, b result) int { return cmp.Compare(a.Seconds, b.Seconds) })
	return fmt.Sprintf("%s%s, %.0f s", often, how, caught[len(caught)/2].Seconds)
}

// rule is what a result was caught by, without what was seen.
func rule(r result) string {
	switch r.By {
	case bySimulation: // "seed 7: margin at 18.983s: ..."
		_, how, _ := strings.Cut(r.How, ": ")
		how, _, _ = strings.Cut(how, " at ")
		return "`" + how + "`"
	case byChaos: // "overlaps: ..."
		how, _, _ := strings.Cut(r.How, ":")
		return "`" + how + "`"
	}
	return "`" + r.How + "`"
}
