// Command chaos breaks everything that onejob stands on while tasks run, and
// lets an outside observer check. "make chaos" runs it.
//
//	DURATION=5m    how long tasks are enqueued and things are broken
//	SEED=          of the choices; a run with the same seed makes them again
//	FAULTS=        which kinds of faults, separated by commas; "none" for none
//	RATE=30        tasks a second
//	LIMITS=consul  where limits are kept: consul or rabbitmq
//	LIVENESS=check how Consul sees that replicas live: check or ttl
//	STANDBY=       of Postgres: async or sync, how its standby follows; none if empty
//	OLD=           a commit of another version, which half of the daemons are of at
//	               first, or all if its schema is older; none if empty
//	DRAIN=5m       how long everything may take to come to an end when nothing is
//	               broken any more; what has not by then is lost
//	SUBJECTS=      who is put to the test, one after the other: onejob, naive,
//	               apilock, separated by commas; onejob if it is empty
//	REPORT=        where the report goes; chaos/report.json if it is empty
//	KEEP=          1 keeps the folder with logs and evidence, 0 does not; else it
//	               is kept when something went wrong
//
// The subjects besides onejob are two other ways of doing its tasks: a session of
// Consul for each task, as in the post about mutually exclusive workers, and the
// lock of Consul's own Go client. Each gets servers of its own, six replicas and
// the same seed, and is checked by the same checker. Two replicas share a host: a
// client agent of the three Consul servers. Each replica has a token of its own. The two
// others have neither limits nor schedules, so their rows have none; what cannot hit them
// counts as missed.
//
// Beside the tasks of onejob there are outsiders: commands under "onejob lock", on lock keys
// that tasks have as well.
//
// It exits with 0 if nothing happened that must not, with 1 if onejob did something,
// with 2 if the run itself did not work, and with 3 if it is inconclusive: it met too
// little for its zeros to mean something (thin.go). Everything that it starts ends with
// it, whatever its end.
//
// "go run ./chaos judge FILE" lets the checker of today look at the evidence.json of a run
// that was kept, and prints what it finds. It exits with 1 if that is a violation.
//
// run.go is the plot. The harness is honest about what it knows: the checker, in
// the package beside it, gets what the observer saw and what the database itself
// noted. Of onejob's own words it gets two: refused writes and crashed working processes.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"onejob/chaos/checker"
	"onejob/chaos/observer"
)

// The program is started again in these parts, by its first argument.
const (
	partObserver = "observer" // FILE
	partTask     = "task"     // what exec tasks run
	partReplica  = "replica"  // a replica with Go handlers

	partJudge = "judge" // FILE: for people
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	part := ""
	if len(os.Args) > 1 {
		part = os.Args[1]
	}
	switch part {
	case partObserver:
		// Ctrl-C is for the harness, which closes stdin when it needs nobody to
		// look any more.
		signal.Ignore(syscall.SIGINT, syscall.SIGTERM)
		exit(observer.Serve(os.Stdin, os.Stdout, "127.0.0.1", os.Args[2]))
	case partTask:
		os.Exit(beTask(ctx))
	case partReplica:
		code, err := beReplica()
		if err != nil {
			exit(err)
		}
		os.Exit(code)
	case partJudge:
		os.Exit(judge(os.Args[2:]))
	case "":
		os.Exit(chaos(ctx))
	default:
		fmt.Fprintln(os.Stderr, "chaos: it takes no arguments but judge FILE, only variables: DURATION, SEED, FAULTS, RATE, LIMITS, LIVENESS, STANDBY, OLD, DRAIN, SUBJECTS, REPORT, KEEP")
		os.Exit(2)
	}
}

func exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "chaos:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// judge judges the evidence of a run once more.
func judge(files []string) int {
	if len(files) != 1 {
		fmt.Fprintln(os.Stderr, "chaos: judge takes one file, evidence.json of a folder that was kept")
		return 2
	}
	var e checker.Evidence
	text, err := os.ReadFile(files[0])
	if err == nil {
		err = json.Unmarshal(text, &e)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "chaos:", err)
		return 2
	}
	v := checker.Check(e)
	if text, err = json.MarshalIndent(v, "", "  "); err != nil {
		fmt.Fprintln(os.Stderr, "chaos:", err)
		return 2
	}
	fmt.Println(string(text))
	for _, line := range v.Violations {
		fmt.Println(line)
	}
	if v.Violated() {
		return 1
	}
	return 0
}

func chaos(ctx context.Context) int {
	s, err := readSettings()
	if err != nil {
		fmt.Fprintln(os.Stderr, "chaos:", err)
		return 2
	}
	var all outcome
	for _, name := range s.Subjects {
		r, err := run(ctx, s, name)
		if err != nil {
			fmt.Fprintf(os.Stderr, "chaos: the run of %s did not work: %v\n", name, err)
			return 2
		}
		all.Comparison = append(all.Comparison, newColumn(name, r))
		if name == onejobName {
			all.report = r
			fmt.Print(r.summary())
		}
		if err := writeJSON(s.Report, all); err != nil {
			fmt.Fprintln(os.Stderr, "chaos:", err)
			return 2
		}
	}
	if compares(s.Subjects) {
		fmt.Print(all.table())
	}
	switch {
	case all.violated():
		return 1
	case all.report != nil && len(all.report.Thin) > 0:
		return 3
	}
	return 0
}

// settings are what the environment asks for.
type settings struct {
	Duration time.Duration
	Seed     uint64
	Kinds    []*kind // of faults
	All      bool    // those are all that there are with these settings
	Subjects []string
	Rate     int // tasks a second
	Drain    time.Duration
	RabbitMQ bool           // limits are kept there
	Standby  string         // of Postgres: none if empty, or how it follows
	Liveness string         // consul.liveness; empty for its default
	Unable   map[need]error // why what some faults need cannot be had
	Old      string         // a commit, which half of the daemons are of at first; none if empty
	Report   string
	Keep     string
}

func readSettings() (settings, error) {
	s := settings{Report: os.Getenv("REPORT"), Keep: os.Getenv("KEEP"), Old: os.Getenv("OLD"), Unable: unable()}
	var errs []error
	read := func(name, otherwise string, parse func(string) error) {
		text := os.Getenv(name)
		if text == "" {
			text = otherwise
		}
		if err := parse(text); err != nil {
			errs = append(errs, fmt.Errorf("%s=%s: %w", name, text, err))
		}
	}
	duration := func(d *time.Duration) func(string) error {
		return func(text string) (err error) {
			if *d, err = time.ParseDuration(text); err == nil && *d < time.Second {
				err = errors.New("it is below 1s")
			}
			return err
		}
	}
	read("DURATION", "5m", duration(&s.Duration))
	read("DRAIN", "5m", duration(&s.Drain))
	read("SEED", strconv.FormatInt(time.Now().UnixNano()%1_000_000, 10), func(text string) (err error) {
		s.Seed, err = strconv.ParseUint(text, 10, 64)
		return err
	})
	read("RATE", "30", func(text string) (err error) {
		if s.Rate, err = strconv.Atoi(text); err == nil && (s.Rate < 1 || s.Rate > 10000) {
			err = errors.New("it is not between 1 and 10000")
		}
		return err
	})
	read("LIMITS", "consul", func(text string) error {
		s.RabbitMQ = text == "rabbitmq"
		if !s.RabbitMQ && text != "consul" {
			return errors.New("it is neither consul nor rabbitmq")
		}
		return nil
	})
	read("LIVENESS", "check", func(text string) error {
		s.Liveness = text
		if text != "check" && text != "ttl" {
			return errors.New("it is neither check nor ttl")
		}
		return nil
	})
	read("STANDBY", "", func(text string) error {
		s.Standby = text
		if text != "" && text != async && text != synchronous {
			return errors.New("it is neither async nor sync")
		}
		return nil
	})
	read("FAULTS", "all", func(text string) (err error) {
		s.All = text == "all"
		s.Kinds, err = chooseKinds(strings.Split(text, ","), s)
		return err
	})
	read("SUBJECTS", onejobName, func(text string) (err error) {
		s.Subjects, err = chooseSubjects(text)
		return err
	})
	if s.Report == "" {
		s.Report = filepath.Join("chaos", "report.json")
		if _, err := os.Stat("chaos"); err != nil {
			s.Report = "report.json"
		}
	}
	return s, errors.Join(errs...)
}

// variables are the settings that say what was run, besides the seed.
func (s settings) variables() map[string]string {
	limits, faults := "consul", "all"
	if s.RabbitMQ {
		limits = "rabbitmq"
	}
	if !s.All {
		var names []string
		for _, k := range s.Kinds {
			names = append(names, k.name)
		}
		faults = cmp.Or(strings.Join(names, ","), "none")
	}
	return map[string]string{"DURATION": s.Duration.String(), "DRAIN": s.Drain.String(), "RATE": strconv.Itoa(s.Rate), "FAULTS": faults,
		"LIMITS": limits, "STANDBY": s.Standby, "LIVENESS": s.Liveness, "OLD": s.Old}
}
