package main

import (
	"bytes"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"time"

	"onejob/internal/mutants"
)

var (
	caught   = regexp.MustCompile(`seed (\d+) fails: (.*)`)
	panicked = regexp.MustCompile(`(?m)^panic: (.*)`) // the process ends, and does not say which seed it was at
)

// runMutants runs each mutant until it is caught. It is an error if one is not, within the time.
func runMutants(only string, duration time.Duration, seed uint64, procs int) error {
	folder, remove, err := temporary()
	if err != nil {
		return err
	}
	defer remove()
	missed := 0
	fmt.Printf("%-26s %8s  %s\n", "mutant", "after", "caught by")
	for _, m := range mutants.All {
		if m.Name != only && (only != "" || !m.Simulated) {
			continue
		}
		binary, err := build(m, folder)
		if err != nil {
			return fmt.Errorf("%s: %w", m.Name, err)
		}
		var out bytes.Buffer
		e := exploration{
			binary: binary, args: []string{"-test.timeout", (2*duration + 5*time.Minute).String()},
			procs: procs, first: max(seed, 1), duration: duration, out: &out,
		}
		began := time.Now()
		err = e.run()
		took := time.Since(began).Round(100 * time.Millisecond)
		found := caught.FindSubmatch(out.Bytes())
		switch exit := (*exec.ExitError)(nil); {
		case found != nil:
			fmt.Printf("%-26s %8v  seed %s: %s\n", m.Name, took, found[1], found[2])
		case panicked.Match(out.Bytes()) && !bytes.Contains(out.Bytes(), []byte("\npanic: test timed out")):
			fmt.Printf("%-26s %8v  %s\n", m.Name, took, panicked.Find(out.Bytes()))
		case errors.As(err, &exit):
			return fmt.Errorf("%s: %w\n%s", m.Name, err, out.Bytes())
		case err != nil:
			return err
		default:
			missed++
			fmt.Printf("%-26s %8v  NOT CAUGHT\n", m.Name, took)
		}
	}
	if missed > 0 {
		return fmt.Errorf("%d mutants were not caught", missed)
	}
	return nil
}
