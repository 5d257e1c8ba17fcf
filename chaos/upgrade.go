package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"onejob/chaos/harness"
	"onejob/chaos/observer"
	"onejob/internal/retry"
)

// Two versions of onejob in one run, with OLD=<commit>. If both have the same schema, half of
// the daemons are of the old version at first, and are upgraded and go back again and again. If
// that of the old one is older, all daemons are old until a third of the run is over; then the
// schema is migrated under them, and they are upgraded one by one.

// prepareOld builds the old version, and makes its schema.
func (d *daemon) prepareOld(ctx context.Context, c *cluster) error {
	source := filepath.Join(c.dir, "old")
	if err := os.Mkdir(source, 0o755); err != nil {
		return err
	}
	root, err := exec.CommandContext(ctx, "git", "rev-parse", "--show-toplevel").Output()
	if err != nil {
		return fmt.Errorf("find the repository that has OLD=%s: %w", c.old, err)
	}
	archive := exec.CommandContext(ctx, "git", "archive", "--output", source+".tar", c.old)
	archive.Dir = strings.TrimSpace(string(root))
	d.old = filepath.Join(c.dir, "onejob-old")
	for _, cmd := range []*exec.Cmd{archive,
		exec.CommandContext(ctx, "tar", "-xf", source+".tar", "-C", source),
		exec.CommandContext(ctx, "go", "build", "-C", source, "-o", d.old, "./cmd/onejob"),
	} {
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("build OLD=%s: %w\n%s", c.old, err, out)
		}
	}
	if err := migrateBy(ctx, c, d.old); err != nil {
		return err
	}
	status := exec.CommandContext(ctx, d.binary, "migrate", "status")
	status.Env = place{name: "migrate", dsn: c.dsn("migrate")}.environ()
	out, err := status.CombinedOutput()
	exit := (*exec.ExitError)(nil)
	if err != nil && (!errors.As(err, &exit) || exit.ExitCode() != 1) {
		return fmt.Errorf("onejob migrate status, with the schema of OLD=%s: %w\n%s", c.old, err, out)
	}
	c.midway = err != nil
	return nil
}

func migrateBy(ctx context.Context, c *cluster, binary string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	migrate := exec.CommandContext(ctx, binary, "migrate", "up")
	migrate.Env = place{name: "migrate", dsn: c.dsn("migrate")}.environ()
	if out, err := migrate.CombinedOutput(); err != nil {
		return fmt.Errorf("onejob migrate up: %w\n%s", err, out)
	}
	return nil
}

// migrateMidway waits for so long, migrates the schema under the old version, and starts the
// replicas that had to wait for that. What is not started anew goes on as the old version.
func (c *cluster) migrateMidway(ctx context.Context, after time.Duration) error {
	if !c.midway {
		return nil
	}
	m := observer.Mark{ID: c.nextMark(), Kind: "migration", Target: "all"} // some kinds of tasks are run by nobody yet
	if err := c.observer.Begin(m); err != nil {
		return err
	}
	retry.Pause(ctx, after)
	d := c.replicas[0].subject.(*daemon)
	c.say("migrating the schema under the old version")
	for _, r := range c.replicas { // the old version refuses to start on the new schema
		r.mu.Lock()
		r.place.old = false
		r.mu.Unlock()
	}
	ctx = context.WithoutCancel(ctx)
	began := time.Now()
	if err := harness.Eventually(ctx, 3*time.Minute, "the schema is migrated", func() error { return d.migrate(ctx, c) }); err != nil {
		return err
	}
	c.say("the schema is migrated after %.1f s", time.Since(began).Seconds())
	c.migrated.Store(true)
	for _, letGo := range c.waiting {
		if err := letGo(); err != nil {
			return err
		}
	}
	return c.observer.End(m)
}

// changeVersion upgrades a replica, or goes back where that is possible.
func changeVersion(_ context.Context, h *fault) error {
	r := h.daemon()
	if r == nil {
		return errNothing
	}
	proc := r.process()
	if !proc.Running() || h.c.midway && !h.c.migrated.Load() {
		return errNothing
	}
	letGo := r.hold()
	r.mu.Lock()
	to := !r.runsOld && !h.c.midway
	r.mu.Unlock()
	if h.about = ", to the new version"; to {
		h.about = ", to the old version"
	}
	if err := h.begins(r.name); err != nil {
		return err
	}
	_, err := h.c.stop(r.name, proc, stopMaxWait)
	r.mu.Lock()
	r.place.old = to
	r.mu.Unlock()
	return errors.Join(err, letGo())
}
