// Command ha runs Patroni on Consul, with replicas of onejob, on three hosts that are
// network namespaces of one machine, and makes the primary of Postgres fail over in
// every way that Patroni is there for. "make ha-test" runs it; scripts/ha-test.sh makes
// the namespaces and removes them.
//
// What tasks do is seen by the observer of package observer, which all hosts reach by a
// link that no fault cuts, and checked by package checker. What is measured is how long
// Postgres takes to accept writes again after a fault, and how long onejob takes from
// then until the first task begins.
//
// It exits with 0 if nothing happened that must not, with 1 if something did, and with 2
// if the run itself did not work.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"onejob/chaos/observer"
)

// The program is started again in these parts, by its first argument.
const (
	partObserver = "observer" // FILE
	partTask     = "task"     // what exec tasks run
)

// Standbys follow in one of these ways.
const (
	async       = "async"
	synchronous = "sync"
)

func main() {
	if len(os.Args) < 2 {
		exit(errors.New("run it with scripts/ha-test.sh"))
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	switch os.Args[1] {
	case partObserver:
		signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
		exit(observer.Serve(os.Stdin, os.Stdout, wire(0), os.Args[2]))
	case partTask:
		exit(beTask(ctx))
	}
	s, err := readSettings()
	if err != nil {
		exit(err)
	}
	r, err := run(ctx, s)
	if err != nil {
		exit(err)
	}
	fmt.Print(r)
	if path := os.Getenv("REPORT"); path != "" {
		if err := r.write(path); err != nil {
			exit(err)
		}
	}
	if r.violated() {
		os.Exit(1)
	}
}

func exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "ha-test:", err)
		os.Exit(2)
	}
	os.Exit(0)
}

// settings are what scripts/ha-test.sh and the environment ask for.
type settings struct {
	space    string // the client's namespace; those of hosts have their numbers behind it
	dir      string // everything that is written; onejob's binary is there
	consul   string // binary
	postgres string // folder of binaries
	standby  string
	faults   []*fault
}

func readSettings() (s settings, err error) {
	if len(os.Args) != 5 {
		return s, errors.New("run it with scripts/ha-test.sh")
	}
	s = settings{space: os.Args[1], dir: os.Args[2], consul: os.Args[3], postgres: os.Args[4], standby: async, faults: faults}
	switch how := os.Getenv("STANDBY"); how {
	case "", async:
	case synchronous:
		s.standby = how
	default:
		return s, fmt.Errorf("STANDBY=%s is neither %s nor %s", how, async, synchronous)
	}
	if names := os.Getenv("FAULTS"); names != "" {
		s.faults = nil
		for name := range strings.SplitSeq(names, ",") {
			i := slices.IndexFunc(faults, func(f *fault) bool { return f.name == name })
			if i < 0 {
				return s, fmt.Errorf("FAULTS: there is no fault %q", name)
			}
			s.faults = append(s.faults, faults[i])
		}
	}
	return s, nil
}
