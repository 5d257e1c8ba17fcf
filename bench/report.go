package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
)

// report is what is written to the file of results: the main figures by name,
// and below "spread" what the rounds said. A figure is the median of the rounds. But pick-up
// in ms is of all rounds together, and what a task costs is summed up over processes, of each
// the median.
type report map[string]any

// compared are the ratios of throughput: each the first case against the second.
var compared = []struct{ key, numerator, denominator string }{
	{"river_ratio", "onejob", "river"},
	{"river_advisory_ratio", "onejob", "river-advisory"},
	{"river_consul_lock_ratio", "onejob", "river-consul"},
	{"held_row_ratio", "onejob", "held-row"},
	{"naive_ratio", "onejob", "naive"},
	{"floor_ratio", "onejob", "floor"},
	{"backlog_ratio", "deep", "shallow"},
	{"backlog10m_ratio", "vast", "shallow"},
	{"finished_ratio", "finished", "onejob"},
	{"replicas3_ratio", "replicas3", "onejob"},
	{"replicas8_ratio", "replicas8", "onejob"},
}

// report makes the figures of what was measured.
func (m *measured) report() report {
	r, spreads := report{}, map[string]spread{}
	put := func(key string, rounds []float64) {
		if len(rounds) > 0 {
			spreads[key] = spreadOf(rounds)
			r[key] = spreads[key].Median
		}
	}
	calm := map[string]spread{}
	// compare puts the ratio of two figures, made within each round.
	compare := func(key string, numerators, denominators []figure) {
		put(key, ratios(values(numerators), values(denominators)))
		if rounds := ratios(calmRounds(numerators, denominators)); len(rounds) > 0 {
			calm[key] = spreadOf(rounds)
		}
	}
	for _, c := range compared {
		compare(c.key, m.rates(c.numerator), m.rates(c.denominator))
	}
	compare("river_cpu_ratio", m.figures("onejob", outcome.cost), m.figures("river", outcome.cost))
	compare("river_cpu_ratio_without_consul", m.figures("onejob", outcome.costWithoutConsul), m.figures("river", outcome.cost))
	r["calm"] = calm
	rates := map[string]spread{}
	others := map[string]spread{}
	for name, rounds := range m.benchCases {
		rates[name] = spreadOf(values(m.rates(name)))
		others[name] = spreadOf(each(rounds, func(o outcome) float64 { return o.Others }))
	}
	r["others_share"] = others
	r["tasks_per_second"], r["spread"], r["rounds"] = rates, spreads, m.benchCases

	var claimed []float64
	for _, p := range pickups {
		prefix := map[string]string{"onejob": "", "river": "river_", "river-default": "river_default_"}[p.name]
		put(prefix+"pickup_p50_ms", values(m.pickUps(p.name, 50)))
		put(prefix+"pickup_p99_ms", values(m.pickUps(p.name, 99)))
		// A percentile of all rounds together rests on more values than the
		// median of one for each round.
		var all, shares []float64
		for _, round := range m.pickups[p.name] {
			all, claimed, shares = append(all, round.delays...), append(claimed, round.claimed...), append(shares, round.others)
		}
		if len(all) > 0 {
			r[prefix+"pickup_p50_ms"], r[prefix+"pickup_p99_ms"] = percentile(all, 50), percentile(all, 99)
			others[prefix+"pickup"] = spreadOf(shares)
		}
	}
	if len(claimed) > 0 {
		r["pickup_claimed_p50_ms"] = percentile(claimed, 50)
	}
	compare("pickup_p50_ratio", m.pickUps("onejob", 50), m.pickUps("river", 50))
	compare("pickup_p99_ratio", m.pickUps("onejob", 99), m.pickUps("river", 99))
	compare("herd_ratio", herdCosts(m.many), herdCosts(m.few))
	if len(m.many) > 0 {
		r["herd"] = append(m.few[:len(m.few):len(m.few)], m.many...)
	}
	m.costs(r, put)
	if put("enqueue_rows_per_s", values(m.enqueue)); len(m.enqueue) > 0 {
		others["enqueue"] = spreadOf(each(m.enqueue, func(f figure) float64 { return f.others }))
	}
	if m.idle != nil {
		others["idle"] = spreadOf([]float64{m.idle.Others})
		r["idle_cpu_percent"], r["idle_consul_requests_per_s"], r["rss_mb_idle"] = m.idle.CPUPercent, m.idle.RequestsPerS, m.idle.RSS
		r["idle_postgres_cpu_percent"], r["idle_consul_cpu_percent"] = m.idle.PostgresPercent, m.idle.ConsulPercent
	}
	if len(m.locks) > 0 {
		var all lockCount
		for _, l := range m.locks {
			all.Attempts += l.Attempts
			all.Refused += l.Refused
			all.Vain += l.Vain
		}
		r["wasted_lock_ratio"] = float64(all.Refused) / float64(max(1, all.Attempts))
		r["vain_lock_ratio"] = float64(all.Vain) / float64(max(1, all.Attempts))
		r["locks"] = m.locks
	}
	return r
}

// costs adds what a task costs, by process, and for the others what it costs them.
func (m *measured) costs(r report, put func(string, []float64)) {
	bySubject := map[string]map[string]float64{}
	for name, rounds := range m.benchCases {
		bySubject[name] = map[string]float64{}
		for process := range rounds[0].CPU {
			used := median(each(rounds, func(o outcome) float64 { return o.CPU[process] }))
			bySubject[name][process] = used
			bySubject[name]["all"] += used
		}
	}
	r["cpu_us_per_task_by_contest"] = bySubject
	if own := m.benchCases["onejob"]; len(own) > 0 {
		cpu := bySubject["onejob"]
		r["cpu_us_per_task"] = map[string]float64{"onejob": cpu["subject"], "postgres": cpu["postgres"], "consul": cpu["consul"]}
		put("consul_writes_per_task", each(own, func(o outcome) float64 { return o.ConsulWrites }))
		put("rss_mb_busy", each(own, func(o outcome) float64 { return o.PeakMB }))
	}
	for _, name := range []string{"replicas3", "replicas8"} {
		if rounds := m.benchCases[name]; len(rounds) > 0 {
			put(name+"_given_back_ratio", each(rounds, func(o outcome) float64 { return o.GivenBack }))
		}
	}
}

// A figure is what one round gave, and which share of the machine others used meanwhile.
type figure struct{ value, others float64 }

func values(rounds []figure) []float64 {
	return each(rounds, func(f figure) float64 { return f.value })
}

// figures returns a figure of a case, by round.
func (m *measured) figures(benchCase string, of func(outcome) float64) (rounds []figure) {
	for _, o := range m.benchCases[benchCase] {
		rounds = append(rounds, figure{of(o), o.Others})
	}
	return rounds
}

func (m *measured) rates(benchCase string) []figure {
	return m.figures(benchCase, func(o outcome) float64 { return o.Rate })
}

// herdCosts returns what a task cost Postgres, by round.
func herdCosts(herds []herdRound) (rounds []figure) {
	for _, h := range herds {
		rounds = append(rounds, figure{h.PostgresUS, h.Others})
	}
	return rounds
}

// pickUps returns a percentile of a subject's pick-up, by round.
func (m *measured) pickUps(subject string, p float64) (rounds []figure) {
	for _, round := range m.pickups[subject] {
		rounds = append(rounds, figure{percentile(round.delays, p), round.others})
	}
	return rounds
}

// calmRounds returns the values of two figures in those rounds in which others left the
// machine to both, and about as much of it.
func calmRounds(a, b []figure) (as, bs []float64) {
	for i := range min(len(a), len(b)) {
		if max(a[i].others, b[i].others) < calmShare && math.Abs(a[i].others-b[i].others) <= calmDifference {
			as, bs = append(as, a[i].value), append(bs, b[i].value)
		}
	}
	return as, bs
}

func each[T any](list []T, f func(T) float64) []float64 {
	var out []float64
	for _, item := range list {
		out = append(out, f(item))
	}
	return out
}

// writeJSON writes a file for machines and people: what fits stands on one line, and an
// element of a list always does.
func writeJSON(path string, value any) error {
	compact, err := json.Marshal(value)
	if err != nil {
		return err
	}
	var text bytes.Buffer
	if err := layOut(&text, compact, "", 100); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, append(text.Bytes(), '\n'), 0o644)
}

// layOut writes compact JSON with a line for each member of an object or a list that is
// longer than width.
func layOut(out *bytes.Buffer, compact json.RawMessage, indent string, width int) error {
	open := compact[0]
	if len(compact) <= width || open != '{' && open != '[' {
		out.Write(compact)
		return nil
	}
	if open == '[' {
		width = math.MaxInt
	}
	in := json.NewDecoder(bytes.NewReader(compact))
	if _, err := in.Token(); err != nil {
		return err
	}
	out.WriteByte(open)
	for first := true; in.More(); first = false {
		if !first {
			out.WriteByte(',')
		}
		out.WriteString("\n" + indent + "  ")
		if open == '{' {
			key, err := in.Token()
			if err != nil {
				return err
			}
			fmt.Fprintf(out, "%q: ", key)
		}
		var member json.RawMessage
		if err := in.Decode(&member); err != nil {
			return err
		}
		if err := layOut(out, member, indent+"  ", width); err != nil {
			return err
		}
	}
	out.WriteString("\n" + indent + string(open+2)) // in ASCII the closing bracket is the next but one
	return nil
}
