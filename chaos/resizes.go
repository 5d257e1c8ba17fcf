package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"slices"
	"strings"
	"time"

	"onejob/chaos/checker"
	"onejob/chaos/harness"
	"onejob/chaos/observer"
	"onejob/internal/retry"
)

// resizes are changes of the elastic limit by a person who runs "onejob limits set".
type resizes struct {
	c    *cluster
	rand *rand.Rand
	all  []checker.Resize
}

// run resizes it every few seconds until ctx ends.
func (r *resizes) run(ctx context.Context) {
	for {
		retry.Pause(ctx, 2*time.Second+time.Duration(r.rand.IntN(4000))*time.Millisecond)
		if ctx.Err() != nil {
			return
		}
		_ = r.set(ctx, 1+r.rand.IntN(elasticMost))
	}
}

// end gives the limit as many slots as it may have, so that what waits for them is soon done. If that
// cannot be had it takes longer.
func (r *resizes) end(ctx context.Context) {
	err := harness.Eventually(ctx, time.Minute, "the limit has all its slots", func() error { return r.set(ctx, elasticMost) })
	if err != nil {
		r.c.say("%v", err)
	}
}

// set changes the number of slots. When it fails, nobody knows whether it did.
func (r *resizes) set(ctx context.Context, slots int) error {
	i := slices.IndexFunc(r.c.replicas, func(r *replica) bool { _, ok := r.subject.(*daemon); return ok })
	if i < 0 {
		return nil
	}
	d := r.c.replicas[i].subject.(*daemon)
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, d.binary, "limits", "set", elastic, fmt.Sprint(slots), "--config", d.config)
	host := r.c.hosts[r.rand.IntN(len(r.c.hosts))]
	p := place{name: "operator", consul: host.agent.Addr(), tls: host.tls, dsn: r.c.dsn("operator"), token: managementToken}
	if r.c.rabbitmq != nil {
		p.rabbitmq = r.c.rabbitmq.URL("")
	}
	cmd.Env = p.environ()
	cmd.WaitDelay = time.Second
	change := checker.Resize{Limit: elastic, Slots: slots, From: observer.At(time.Now())}
	out, err := cmd.CombinedOutput()
	change.To, change.Done = observer.At(time.Now()), err == nil
	if err != nil {
		r.c.say("limits set %s %d: %v: %s", elastic, slots, err, strings.TrimSpace(string(out)))
	}
	r.all = append(r.all, change)
	return err
}
