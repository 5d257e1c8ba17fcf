package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"onejob/chaos/checker"
	"onejob/chaos/harness"
	"onejob/chaos/observer"
	"onejob/internal/retry"
	"onejob/internal/servers"
)

const consulWiped = checker.ConsulWiped

const (
	// alone is how long replicas have to get a session in a Consul that was wiped,
	// before a person helps them.
	alone = 15 * time.Second

	// helped is how long they have after that.
	helped = time.Minute
)

// wipeConsul ends all servers and agents, and in half of the cases all replicas before
// that, and starts them again without their data. If no replica gets a session, it
// does what the runbook tells a person to do.
func wipeConsul(ctx context.Context, h *fault) error {
	c := h.c
	if !c.consulBusy.TryLock() {
		return errNothing
	}
	defer c.consulBusy.Unlock()
	for _, host := range c.hosts {
		if !host.busy.TryLock() {
			return errNothing
		}
		defer host.busy.Unlock()
	}
	var letGo []func() error
	killed := h.rand.IntN(2) == 0
	h.about = ", while the replicas live"
	if killed {
		h.about = ", and all replicas are killed"
	}
	if err := h.begins("all"); err != nil {
		return err
	}
	var all sync.WaitGroup
	if killed {
		for _, r := range c.replicas {
			over, err := c.also(checker.Kill, r.name)
			if err != nil {
				return err
			}
			up := r.hold()
			letGo = append(letGo, func() error { return errors.Join(up(), over()) })
			all.Go(func() { r.process().Kill() })
		}
		all.Wait()
	}
	wipe := append([]*servers.Consul{}, c.consul.Servers...)
	for _, host := range c.hosts {
		wipe = append(wipe, host.agent)
	}
	errs := make([]error, len(wipe))
	for i, s := range wipe {
		all.Go(func() { errs[i] = s.Wipe() })
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	over, err := h.c.also(checker.NoConsul, "all")
	if err != nil {
		return err
	}
	h.lasts(ctx)
	if err := over(); err != nil {
		return err
	}
	ctx = context.WithoutCancel(ctx)
	if err := c.consul.Start(ctx); err != nil {
		return err
	}
	if err := errors.Join(c.startAgents(ctx), c.authorizeAll(ctx)); err != nil {
		return err
	}
	for _, up := range letGo {
		if err := up(); err != nil {
			return err
		}
	}
	return c.awaitAdoption(ctx)
}

// awaitAdoption returns when a replica has a session, after it has helped if that was
// necessary. If nothing helps it says so: tasks are lost then, and the checker finds them.
func (c *cluster) awaitAdoption(ctx context.Context) error {
	began := time.Now()
	inSession := func() error {
		n, err := c.inSession(ctx)
		if err == nil && n == 0 {
			err = errors.New("none has one")
		}
		return err
	}
	if harness.Eventually(ctx, alone, "a replica has a session", inSession) == nil {
		c.say("%s: a replica has a session after %.1f s, without help", consulWiped, time.Since(began).Seconds())
		return nil
	}
	told, err := c.adoptConsul(ctx)
	if errors.Is(err, errNothing) {
		return nil
	}
	c.say("%s: onejob adopt-consul: %s (%v)", consulWiped, told, err)
	if err := harness.Eventually(ctx, helped, "a replica has a session", inSession); err != nil {
		c.say("%s: %v", consulWiped, err)
		return nil
	}
	c.say("%s: a replica has a session after %.1f s, with help", consulWiped, time.Since(began).Seconds())
	return nil
}

// attend is the person who is called when no replica has had a session for a while,
// though Consul answers: after Consul was wiped while Postgres lost what it knew of the
// new one, nobody but a person can know that no replica is left at the old one. It goes
// on until ctx ends.
func (c *cluster) attend(ctx context.Context) {
	for since := time.Now(); ctx.Err() == nil; retry.Pause(ctx, 2*time.Second) {
		n, err := c.inSession(ctx)
		if err != nil || n > 0 {
			since = time.Now()
		}
		if time.Since(since) < callAfter {
			continue
		}
		told, err := c.adoptConsul(ctx)
		c.say("no replica has had a session for %v; onejob adopt-consul: %s (%v)", callAfter, told, err)
		c.helped.Add(1)
		c.needed.add(observer.Mark{ID: c.nextMark(), Kind: checker.Helpless, Target: "all", Begin: observer.At(since), End: observer.At(time.Now())})
		since = time.Now()
	}
}

// helpless are the times in which no replica had a session, until a person helped.
type helpless struct {
	mu    sync.Mutex
	marks []observer.Mark
}

func (h *helpless) add(m observer.Mark) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.marks = append(h.marks, m)
}

func (h *helpless) all() []observer.Mark {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.marks)
}

// callAfter is how long no replica has a session before a person is called. No fault takes
// so long.
const callAfter = 90 * time.Second

// adoptConsul runs onejob adopt-consul as a person would, and returns what it prints.
func (c *cluster) adoptConsul(ctx context.Context) (string, error) {
	for _, r := range c.replicas {
		d, ok := r.subject.(*daemon)
		if !ok {
			continue
		}
		ctx, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		binary := d.binary
		if c.midway && !c.migrated.Load() {
			binary = d.old
		}
		cmd := exec.CommandContext(ctx, binary, "adopt-consul", "--yes", "--config", d.config)
		cmd.Env = place{name: "operator", consul: c.consul.Servers[0].Addr(), dsn: c.dsn("operator"), token: managementToken}.environ()
		out, err := cmd.CombinedOutput()
		return strings.ReplaceAll(strings.TrimSpace(string(out)), "\n", "; "), err
	}
	return "", fmt.Errorf("%w: there is no daemon", errNothing)
}
