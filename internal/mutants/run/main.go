// Command run builds mutants, and looks who catches them: the tests, the simulation, or a run
// of chaos.
//
//	go run ./internal/mutants/run                    each by those who must catch it ("make mutants")
//	go run ./internal/mutants/run -all -out FILE     each by all three, with three seeds: a table; hours
//	go run ./internal/mutants/run -only fence,index
//	go run ./internal/mutants/run -show -out FILE    what FILE has, in Markdown
//
// What FILE has already is not done again, so that a table can be made in parts. With -all
// nobody must catch anything.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"onejob/internal/mutants"
)

// How a mutant may be caught.
const (
	byTests      = "tests"
	bySimulation = "simulation"
	byChaos      = "chaos"
)

// result is what one method says of one mutant.
type result struct {
	Mutant  string  `json:"mutant"`
	By      string  `json:"by"`
	Seed    int     `json:"seed,omitempty"` // of a simulation, or of chaos
	Caught  bool    `json:"caught"`
	How     string  `json:"how,omitempty"` // the test, or what was found
	Seconds float64 `json:"seconds"`       // builds included
	Commit  string  `json:"commit"`
}

// table is what is kept.
type table struct {
	Results []result `json:"results"`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	all := flag.Bool("all", false, "look who catches each mutant, not only whether those do that must")
	by := flag.String("by", "tests,simulation,chaos", "with -all, these methods")
	seeds := flag.Int("seeds", 3, "with -all, how many seeds for the simulation and for chaos")
	only := flag.String("only", "", "names of mutants, separated by commas")
	out := flag.String("out", "", "file for the results; what it has already is not done again")
	show := flag.Bool("show", false, "print what the file has, as a table in Markdown, and do nothing")
	flag.Parse()
	t, err := load(*out)
	switch {
	case err != nil:
	case *show && len(t.Results) == 0:
		err = fmt.Errorf("there are no results in %q: make some with -all -out FILE", *out)
	case *show:
		t.markdown(os.Stdout)
	default:
		if err = adopt(); err != nil {
			break
		}
		err = t.fill(ctx, choose(*only), plan{*all, strings.Split(*by, ","), *seeds}, *out)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

// choose returns the mutants of these names; all if there are none.
func choose(names string) (chosen []string) {
	for _, m := range mutants.All {
		chosen = append(chosen, m.Name)
	}
	if names != "" {
		chosen = strings.Split(names, ",")
	}
	return chosen
}

// plan says what is done with each mutant.
type plan struct {
	all   bool
	by    []string
	seeds int
}

// steps are what a plan asks for.
func (p plan) steps(m mutants.Mutant) (steps []result) {
	add := func(by string, seeds int) {
		for seed := range seeds {
			s := result{Mutant: m.Name, By: by}
			if by != byTests {
				s.Seed = seed + 1
			}
			steps = append(steps, s)
		}
	}
	if !p.all {
		if m.Test != "" {
			add(byTests, 1)
		}
		if m.Simulated {
			add(bySimulation, 1)
		}
		if m.Faults != "" {
			add(byChaos, 1)
		}
		return steps
	}
	for _, by := range p.by {
		switch {
		case by == byTests:
			add(by, 1)
		case by == bySimulation && !m.InSimulation():
		default:
			add(by, p.seeds)
		}
	}
	return steps
}

func load(path string) (t table, err error) {
	text, err := os.ReadFile(path)
	if path == "" || errors.Is(err, os.ErrNotExist) {
		return t, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &t)
	}
	return t, err
}

func (t *table) fill(ctx context.Context, names []string, p plan, path string) error {
	commit, err := exec.CommandContext(ctx, "git", "describe", "--always", "--dirty", "--abbrev=12").Output()
	if err != nil {
		return fmt.Errorf("git describe: %w", err)
	}
	fmt.Printf("%-22s %-10s %4s %7s  %s\n", "mutant", "by", "seed", "after", "caught by")
	var missed []string
	for _, name := range names {
		m, err := mutants.Named(name)
		if err != nil {
			return err
		}
		for _, s := range p.steps(m) {
			if slices.ContainsFunc(t.Results, func(r result) bool { return r.Mutant == s.Mutant && r.By == s.By && r.Seed == s.Seed }) {
				continue
			}
			s.Commit = strings.TrimSpace(string(commit))
			if err := s.look(ctx, m, p.all); err != nil {
				return fmt.Errorf("%s, by %s: %w", m.Name, s.By, err)
			}
			how := s.How
			if !s.Caught {
				how = "NOT CAUGHT " + how
				missed = append(missed, m.Name+" by "+s.By)
			}
			fmt.Printf("%-22s %-10s %4d %5.0f s  %.140s\n", s.Mutant, s.By, s.Seed, s.Seconds, how)
			t.Results = append(t.Results, s)
			if err := t.save(path); err != nil {
				return err
			}
		}
	}
	if len(missed) > 0 && !p.all {
		return fmt.Errorf("not caught: %s", strings.Join(missed, ", "))
	}
	return nil
}

func (t *table) save(path string) error {
	if path == "" {
		return nil
	}
	// One line each, so that two tables can be compared.
	text := "{\"results\": ["
	for i, r := range t.Results {
		line, err := json.Marshal(r)
		if err != nil {
			return err
		}
		if i > 0 {
			text += ","
		}
		text += "\n" + string(line)
	}
	return os.WriteFile(path, []byte(text+"\n]}\n"), 0o644)
}

// look lets a method look at a mutant.
func (s *result) look(ctx context.Context, m mutants.Mutant, whole bool) error {
	folder, err := os.MkdirTemp("", "onejob-mutant-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	overlay, err := m.Write(folder)
	if err != nil {
		return err
	}
	defer killLeftovers()
	began := time.Now()
	switch s.By {
	case byTests:
		err = s.test(ctx, m, overlay, whole)
	case bySimulation:
		err = s.simulate(ctx)
	case byChaos:
		err = s.chaos(ctx, m, overlay, folder)
	default:
		err = fmt.Errorf("there is no such method: there are tests, simulation, chaos")
	}
	s.Seconds = float64(int(time.Since(began).Seconds()*10)) / 10
	return err
}

// command is one of the go command, or of what it builds, with an overlay for all that is
// built below it. Ctrl-C ends it and what it has started.
func command(ctx context.Context, overlay, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
	cmd.WaitDelay = time.Minute
	cmd.Env = os.Environ()
	if overlay != "" {
		cmd.Env = append(cmd.Env, "GOFLAGS=-overlay="+overlay)
	}
	return cmd
}
