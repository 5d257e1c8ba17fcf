package main

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"onejob/chaos/harness"
	"onejob/chaos/observer"
	"onejob/store"
)

// What SUBJECTS may name: onejob, and other ways of doing its tasks, to compare
// it with. Those run in bench/competitor.
const onejobName = "onejob"

var subjectNames = []string{onejobName, "naive", "apilock"}

// chooseSubjects returns the names in a list with commas.
func chooseSubjects(text string) (chosen []string, err error) {
	for name := range strings.SplitSeq(text, ",") {
		name = strings.TrimSpace(name)
		if !slices.Contains(subjectNames, name) {
			return nil, fmt.Errorf("there is no subject %q; there are: %s", name, strings.Join(subjectNames, ", "))
		}
		if slices.Contains(chosen, name) {
			return nil, fmt.Errorf("%s is there twice", name)
		}
		chosen = append(chosen, name)
	}
	return chosen, nil
}

// competitor is another way than onejob, by its name. It knows neither limits nor
// schedules, and has no sessions of its own to be recognised by.
type competitor struct {
	name   string
	binary string
	self   string
	where  observer.Where
}

func (r *competitor) kinds() []string { return []string{"exec", "go", "http", "sql", "noop"} }

// prepare builds the binary and brings the schema up to date.
func (r *competitor) prepare(ctx context.Context, c *cluster) error {
	r.binary, r.self, r.where = filepath.Join(c.dir, "competitor"), c.self, c.observer.Where
	root, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", "onejob").Output()
	if err != nil {
		return fmt.Errorf("find the folder of bench/competitor: %w", err)
	}
	bench := filepath.Join(string(bytes.TrimSpace(root)), "bench")
	if out, err := exec.CommandContext(ctx, "go", "build", "-C", bench, "-o", r.binary, "./competitor").CombinedOutput(); err != nil {
		return fmt.Errorf("build bench/competitor: %w\n%s", err, out)
	}
	db, err := store.Open(store.Config{DSN: c.dsn("migrate")})
	if err != nil {
		return err
	}
	defer db.Close()
	return db.Migrate(ctx, nil)
}

func (r *competitor) command(p place) *exec.Cmd {
	cmd := exec.Command(r.binary, r.name)
	cmd.Env = append(p.environ(), envObserver+"="+r.where.Tasks, "CHAOS_COMMAND="+r.self, "CHAOS_EFFECT="+effectSQL)
	return cmd
}

// awaitCompetitors returns when every replica has said that it works.
func (c *cluster) awaitCompetitors(ctx context.Context) error {
	return harness.Eventually(ctx, time.Minute, "every replica has started", func() error {
		n, err := c.countLogged("rival_started")
		if err == nil && n < len(c.replicas) {
			err = fmt.Errorf("%d of %d have", n, len(c.replicas))
		}
		return err
	})
}
