package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime/pprof"
)

// profilePlan is what to profile.
type profilePlan struct {
	Dir, Out string
	Tasks    int
}

func (p *profilePlan) flags(flags *flag.FlagSet) {
	flags.StringVar(&p.Dir, "dir", "/var/tmp", "folder on a disk for the servers' data")
	flags.StringVar(&p.Out, "out", "results/onejob.pprof", "file for the profile; go tool pprof reads it")
	flags.IntVar(&p.Tasks, "tasks", 100_000, "tasks that are done meanwhile")
}

// runProfile lets a replica of onejob, built from its packages and not from its
// command, do tasks, and keeps a profile of where its processor time goes.
func runProfile(ctx context.Context, p profilePlan) (err error) {
	out, err := filepath.Abs(p.Out)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
		return err
	}
	g, err := prepareGround(ctx, p.Dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.close()) }()
	if err := g.template(ctx, onejobTable.template, migrateOnejob); err != nil {
		return err
	}
	profiled := subject{"profiled", onejobTable, true, func(at place) (*process, error) {
		return startProcess("profiled", at.file("profiled.log"), g.self, "stamp", "-subject", "onejob",
			"-dsn", at.dsn, "-consul", at.consul, "-out", at.file("stamps.json"), "-profile", out)
	}}
	o, err := g.measure(ctx, contest{name: "profiled", subject: profiled, replicas: 1, warm: 2_000, tasks: p.Tasks}, nil)
	if err != nil {
		return err
	}
	fmt.Printf("%.0f tasks/s; us of CPU per task: onejob %.0f, Postgres %.0f, Consul %.0f; others used %.0f %% of the machine\n",
		o.Rate, o.CPU["subject"], o.CPU["postgres"], o.CPU["consul"], 100*o.Others)
	fmt.Println("go tool pprof -top", out)
	return nil
}

// profiling writes a profile of this program to a file until stop is called. No
// file, no profile.
func profiling(path string) (stop func() error, err error) {
	if path == "" {
		return func() error { return nil }, nil
	}
	file, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	if err := pprof.StartCPUProfile(file); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return func() error { pprof.StopCPUProfile(); return file.Close() }, nil
}
