// Command run builds the simulation with the runtime that it needs, and runs it.
//
//	go run ./simulate/run -duration 2m
//	go run ./simulate/run -seed 17 -trace
//	go run ./simulate/run -mutants -duration 1m
//	go run ./simulate/run -run 'TestExcusesEnd|TestSameSeedSameSchedule'
package main

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"onejob/internal/mutants"
	"onejob/simulate/overlay"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "simulate:", err)
		os.Exit(1)
	}
}

func run() error {
	duration := flag.Duration("duration", 2*time.Minute, "how long to go through schedules; with -mutants, for each of them at most")
	seed := flag.Uint64("seed", 0, "the first seed; 0 means one that follows from the time")
	n := flag.Int("n", 0, "how many schedules; 0 means as many as fit into the time")
	trace := flag.Bool("trace", false, "write down everything that happens, of one schedule unless -n says how many")
	goOn := flag.Bool("go-on", false, "do not stop at a schedule that fails, nor minimise it")
	broken := flag.Bool("mutants", false, "run builds in which one protection is broken: each must be caught")
	only := flag.String("only", "", "with -mutants, the name of one of them")
	tests := flag.String("run", "TestSchedules", "which tests, as go test takes them")
	procs := flag.Int("procs", 0, "how many processes, each of which uses one processor; 0 means one for each processor")
	profile := flag.String("cpuprofile", "", "write a profile of one process to this file")
	flag.Parse()
	if *procs <= 0 {
		*procs = runtime.NumCPU()
	}

	if *broken {
		return runMutants(*only, *duration, *seed, *procs)
	}
	folder, remove, err := temporary()
	if err != nil {
		return err
	}
	defer remove()
	binary, err := build(mutants.Nothing, folder)
	if err != nil {
		return err
	}
	if *tests == "TestSchedules" && !*trace {
		e := exploration{binary: binary, args: []string{"-test.timeout", "0"}, procs: *procs, first: *seed, n: *n, duration: *duration, out: os.Stdout}
		if e.first == 0 {
			e.first = uint64(time.Now().UnixMilli()) % 1e9 * 1000
		}
		if *goOn {
			e.args = append(e.args, "-sim.goon")
		}
		if *profile != "" {
			e.args, e.procs = append(e.args, "-test.cpuprofile", *profile), 1
		}
		return e.run()
	}
	args := []string{"-test.run", *tests, "-test.timeout", "0", "-sim.duration", duration.String(), "-sim.seed", strconv.FormatUint(*seed, 10), "-sim.n", strconv.Itoa(*n)}
	if *goOn {
		args = append(args, "-sim.goon")
	}
	if *trace {
		args = append(args, "-sim.trace")
	}
	cmd := exec.Command(binary, args...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	return cmd.Run()
}

// temporary makes a folder for what is built. It is removed when somebody ends the run, too.
func temporary() (folder string, remove func(), err error) {
	folder, err = os.MkdirTemp("", "onejob-simulate-")
	if err != nil {
		return "", nil, err
	}
	remove = func() { _ = os.RemoveAll(folder) }
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		<-ended
		remove()
		os.Exit(1)
	}()
	return folder, remove, nil
}

// build builds the simulation, with a part of the product replaced, and returns the path of
// the binary, which is in the folder.
func build(m mutants.Mutant, folder string) (string, error) {
	file, err := overlay.Write(folder, m)
	if err != nil {
		return "", err
	}
	binary := filepath.Join(folder, "simulate.test")
	cmd := exec.Command("go", "test", "-c", "-o", binary, "-tags", "simulate", "-overlay", file, "onejob/simulate")
	cmd.Stderr = os.Stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("go test -c: %w", err)
	}
	return binary, nil
}
