package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/chaos/checker"
	"onejob/chaos/harness"
	"onejob/chaos/observer"
)

// run is the plot, once for each subject: start everything, enqueue and break
// things for a while, mend everything, let it come to an end, and check.
func run(ctx context.Context, s settings, subject string) (_ *report, err error) {
	ours := subject == onejobName
	dir, err := makeDir()
	if err != nil {
		return nil, err
	}
	began := time.Now()
	say := func(format string, a ...any) {
		fmt.Printf("%7.1f s  %s\n", time.Since(began).Seconds(), fmt.Sprintf(format, a...))
	}
	say("%s: seed %d, %v, %d tasks a second; folder %s", subject, s.Seed, s.Duration, s.Rate, dir)
	var r *report
	keep := func() bool {
		wrong := err != nil && ctx.Err() == nil || ours && r != nil && r.Violated()
		return s.Keep == "1" || s.Keep != "0" && wrong
	}
	defer func() {
		if keep() {
			fmt.Println("logs and evidence are kept in", dir)
			return
		}
		_ = os.RemoveAll(dir)
	}()

	c, err := startCluster(ctx, dir, s, ours, say)
	defer func() {
		if keep() {
			if err := c.keepLogs(); err != nil { // what the run has found is worth more
				say("keep the logs: %v", err)
			}
		}
		c.close()
	}()
	if err != nil {
		return nil, err
	}
	if err := c.startSubjects(ctx, subject); err != nil {
		return nil, err
	}
	evidence := checker.Evidence{Gentle: gentle(s.Kinds), Old: s.Old != "", Forgetful: s.Standby == async}
	evidence.Hosts = map[string][]string{}
	for _, r := range c.replicas {
		evidence.Hosts[r.host.name] = append(evidence.Hosts[r.host.name], r.name)
	}
	if ours { // the others have neither schedules nor limits, and no leases
		evidence.Limits, evidence.RabbitMQ, evidence.Lease, evidence.Queues = limitSlots, s.RabbitMQ, leaseLength(s.Liveness), restricted
		if err := c.addOutsiders(ctx, s); err != nil {
			return nil, err
		}
		if evidence.Schedules, err = c.addSchedules(ctx); err != nil {
			return nil, err
		}
	}

	built, err := c.build(ctx)
	if err != nil {
		return nil, err
	}
	say("%s", built)
	conditions := c.conditions()
	for _, what := range conditions {
		say("%s", what)
	}

	statements := watchStatements(ctx, c)
	defer statements.end()
	delays := watchDelays()
	defer delays.end()
	leaks, err := startLeaks(ctx, c, ours && len(s.Kinds) == 0 && s.Duration >= longEnough)
	if err != nil {
		return nil, err
	}

	attending, leave := context.WithCancel(ctx)
	defer leave()
	if ours {
		go c.attend(attending)
		go c.mindPooler(attending)
	}

	steps := plan(s.Seed, s.Kinds, s.Duration)
	say("enqueueing, and breaking things")
	work := newWorkload(c, s.Rate, s.Seed, subject)
	faultRun := &faultRun{c: c, plan: steps, from: time.Now().Add(s.Duration / 2)}
	if s.meetsAll() {
		faultRun.again = s.Kinds
	}
	if err := c.storm(ctx, s.Duration, work, faultRun, leaks); err != nil {
		return nil, err
	}

	say("repairing everything")
	if err := c.heal(ctx); err != nil {
		return nil, fmt.Errorf("mend everything: %w", err)
	}
	if err := c.acceptOutcomes(ctx); err != nil {
		return nil, err
	}
	if work.limits {
		work.resizes.end(ctx)
	}
	if err := c.endSchedules(ctx, &evidence); err != nil {
		return nil, err
	}
	say("waiting until everything has come to an end")
	took := time.Now()
	err = c.drain(ctx, s.Drain)
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case err != nil:
		say("%v: the checker will say", err)
	default:
		say("everything was over after %.1f s", time.Since(took).Seconds())
	}
	if err := c.endHostile(ctx); err != nil {
		return nil, err
	}
	if ours && err == nil {
		if err := leaks.end(ctx); err != nil {
			return nil, fmt.Errorf("look for what is left over: %w", err)
		}
	}

	if evidence.Enqueued, err = work.settle(ctx); err != nil {
		return nil, err
	}
	evidence.Declined, evidence.Resizes = work.declined, work.resizes.all
	leave()
	evidence.Stopped = observer.At(time.Now())
	unstopped, err := c.stopReplicas()
	if err != nil {
		return nil, err
	}
	if err := c.readEvidence(ctx, &evidence); err != nil {
		return nil, err
	}
	evidence.Statements, evidence.Delays = statements.end(), delays.end()
	if !ours { // their rows stay pending while they are worked on, and nobody promises that all succeed
		evidence.Gentle = false
		for i := range evidence.Enqueued {
			evidence.Enqueued[i].Due, evidence.Enqueued[i].MaxAttempts = 0, 0
		}
		evidence.Steps = nil
	}
	if evidence.Seen, err = c.observer.Stop(); err != nil {
		return nil, err
	}
	evidence.Marks, evidence.Missed = append(evidence.Marks, c.needed.all()...), faultRun.vain
	if evidence.Refused, err = c.countLogged(`"event":"completion_refused"`); err != nil {
		return nil, err
	}

	if evidence.Crashes, err = c.crashes(); err != nil {
		return nil, err
	}
	if ours {
		for _, r := range c.replicas {
			evidence.Crashes = append(evidence.Crashes, r.exits...)
		}
		c.stopping.Lock()
		evidence.Stops = c.stops
		c.stopping.Unlock()
	}

	r = newReport(s, began, faultRun, &evidence, checker.Check(evidence))
	r.Build, r.Conditions, r.Helped, r.PoolerExits = built, conditions, int(c.helped.Load()), int(c.poolerExits.Load())
	r.Inserts, r.InsertsFailed, r.Unstopped = work.batches, work.errors, unstopped
	for _, replica := range c.replicas {
		if n := len(replica.exits); n > 0 {
			say("replica %s ended by itself %d times", replica.name, n)
			r.Exits += n
		}
	}
	if r.Crashes, err = c.postgres.crashes(); err != nil {
		return nil, err
	}
	if ours {
		r.Growth, r.GrowthJudged, r.Leaks = leaks.checkAll(s.Duration)
	}
	r.Goroutines = leaks.goroutines
	if ours {
		r.Thin = r.thin(s)
	}
	if keep() {
		if err := writeJSON(filepath.Join(dir, "evidence.json"), evidence); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// makeDir makes a folder that the user that Postgres runs as can enter.
func makeDir() (string, error) {
	dir, err := os.MkdirTemp("/tmp", "chaos-")
	if err != nil {
		return "", err
	}
	return dir, os.Chmod(dir, 0o755)
}

// startSubjects starts six replicas and returns when all of them work.
func (c *cluster) startSubjects(ctx context.Context, name string) error {
	all := []replicas{{&daemon{}, "daemon", 4}, {&goReplica{}, "go", 2}}
	if name == onejobName {
		c.say("building onejob, starting four daemons and two replicas with Go handlers")
	} else {
		c.say("building %s, starting six of it", name)
		all = []replicas{{&competitor{name: name}, name, 6}}
	}
	for _, r := range all {
		if err := r.subject.prepare(ctx, c); err != nil {
			return err
		}
	}
	if _, err := c.operator.Exec(ctx, schema()); err != nil {
		return fmt.Errorf("let the database take notes: %w", err)
	}
	for _, r := range all {
		if err := c.addReplicas(ctx, r.subject, r.name, r.n); err != nil {
			return err
		}
	}
	if name != onejobName {
		return c.awaitCompetitors(ctx)
	}
	return c.awaitReplicas(ctx)
}

// storm enqueues and breaks things for so long. It returns when every fault has
// been repaired by the one who did it.
func (c *cluster) storm(ctx context.Context, long time.Duration, work *workload, faultRun *faultRun, leaks *leaks) error {
	storm, cancel := context.WithTimeout(ctx, long)
	defer cancel()
	var wg sync.WaitGroup
	wg.Go(func() { work.run(storm) })
	wg.Go(func() { leaks.watch(storm) })
	errs := make([]error, len(c.outsiders))
	for i, o := range c.outsiders {
		wg.Go(func() { errs[i] = o.run(storm) })
	}
	if work.limits {
		wg.Go(func() { work.resizes.run(storm) })
	}
	var migration error
	wg.Go(func() { migration = c.migrateMidway(storm, long/3) })
	err := faultRun.run(storm)
	cancel()
	wg.Wait()
	if err := errors.Join(append(errs, err, migration)...); err != nil {
		return err
	}
	return ctx.Err()
}

// drain waits until no task is pending or running, but for hostile ones.
func (c *cluster) drain(ctx context.Context, maxWait time.Duration) error {
	return harness.Eventually(ctx, maxWait, "everything has come to an end", func() error {
		var left int
		var first string // of them
		err := c.operator.QueryRow(ctx, `SELECT count(*) OVER (), concat_ws(', ', id, kind, status, 'queue ' || queue, 'limit ' || limit_name, 'lock key ' || lock_key,
       'attempt ' || attempt, 'due at ' || run_at, 'it is ' || statement_timestamp(), 'session ' || session, error)
  FROM onejob.tasks
 WHERE status IN ('pending', 'running') AND id NOT IN (SELECT task FROM chaos.added WHERE hostile)
 ORDER BY run_at, id
 LIMIT 1`).Scan(&left, &first)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			return nil
		case err == nil:
			return fmt.Errorf("%d tasks are pending or running; the first is task %s", left, first)
		}
		return err
	})
}

// countLogged counts a text in what the replicas have printed.
func (c *cluster) countLogged(text string) (n int, err error) {
	for _, r := range c.replicas {
		b, err := os.ReadFile(r.log())
		if err != nil {
			return 0, err
		}
		n += bytes.Count(b, []byte(text))
	}
	return n, nil
}

func writeJSON(path string, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(b, '\n'), 0o644)
}
