package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"syscall"
	"time"

	"onejob/chaos/checker"
	"onejob/chaos/harness"
	"onejob/chaos/observer"
	"onejob/internal/retry"
)

// fault makes Postgres fail over.
type fault struct {
	name string
	what string

	// begin does it to the primary. The other hosts are the standbys.
	begin func(ctx context.Context, c *cluster, primary *host) error

	// last is for how long nothing is repaired after the new primary has accepted its first
	// write; with alone, after the fault began.
	last  time.Duration
	alone bool

	// end repairs it, as a person or a service manager does.
	end func(ctx context.Context, c *cluster, primary *host) error
}

var faults = []*fault{
	{name: "switchover", what: "Patroni is asked for a switchover", begin: switchOver},
	{name: "crash", what: "kill -9 of the primary and its Patroni", last: 3 * time.Second,
		begin: func(_ context.Context, _ *cluster, p *host) error { return p.signalDatabase(syscall.SIGKILL) },
		end:   startPatroni},
	{name: "freeze", what: "SIGSTOP of the primary and its Patroni, SIGCONT after the failover", last: 3 * time.Second,
		begin: func(_ context.Context, _ *cluster, p *host) error { return p.signalDatabase(syscall.SIGSTOP) },
		end: func(_ context.Context, _ *cluster, p *host) error {
			return p.signalDatabase(syscall.SIGCONT)
		}},
	{name: "partition", what: "the primary's host is cut off from the others, with its Consul server and its replica", last: 10 * time.Second,
		begin: func(_ context.Context, _ *cluster, p *host) error { return p.unplug() },
		end:   func(_ context.Context, _ *cluster, p *host) error { return p.plug() }},
	{name: "patroni-kill", what: "kill -9 of the primary's Patroni alone: the old primary lives on", last: 15 * time.Second,
		begin: func(_ context.Context, _ *cluster, p *host) error { p.patroni.Kill(); return nil },
		end:   startPatroni},
	{name: "quorum-loss", what: "kill -9 of two of the three Consul servers", last: 40 * time.Second, alone: true,
		begin: loseQuorum, end: regainQuorum},
}

// switchOver leaves it to Patroni which standby is next: with synchronous_mode it must be
// the synchronous one. Whether Patroni has done it is for failOver to see: after some 20 s it
// answers that it does not know, also of a switchover that succeeds a moment later.
func switchOver(ctx context.Context, c *cluster, p *host) error {
	if err := p.ask(ctx, http.MethodPost, "http://"+wire(p.n)+":8008/switchover", map[string]string{"leader": p.name()}, nil); err != nil {
		c.say("  %v", err)
	}
	return nil
}

func startPatroni(_ context.Context, _ *cluster, p *host) error { return p.startPatroni() }

// quorumMark is the observer's mark of the time without a quorum.
const quorumMark = 1

func loseQuorum(_ context.Context, c *cluster, p *host) error {
	for _, h := range c.hosts {
		if h != p {
			h.consul.Kill()
		}
	}
	return c.observer.Begin(observer.Mark{ID: quorumMark, Kind: checker.NoConsul, Target: "two of three servers", Alone: true})
}

func regainQuorum(_ context.Context, c *cluster, p *host) error {
	err := c.observer.End(observer.Mark{ID: quorumMark})
	for _, h := range c.hosts {
		if h != p {
			err = errors.Join(err, h.startConsul())
		}
	}
	return err
}

const (
	// failingOver is how long Patroni may take until a new primary accepts writes.
	failingOver = 2 * time.Minute

	// repairing is how long it may take until both standbys follow.
	repairing = 3 * time.Minute

	// finishing is how long tasks may take to finish when all is in order: the longest
	// takes 15 s, and a lost attempt is followed by a wait.
	finishing = 2 * time.Minute
)

// failOver is one fault from its beginning until all is in order and everything that was
// enqueued until then has finished.
func (c *cluster) failOver(ctx context.Context, f *fault) (*figures, error) {
	p, timeline, err := c.settled(ctx)
	if err != nil {
		return nil, err
	}
	fig := &figures{fault: f, oldTimeline: timeline, began: time.Now()}
	c.say("%s: %s (%s, timeline %d)", f.name, f.what, p.name(), timeline)
	if err := f.begin(ctx, c, p); err != nil {
		return nil, fmt.Errorf("%s: %w", f.name, err)
	}
	if f.alone {
		retry.Pause(ctx, f.last)
		if err := f.end(ctx, c, p); err != nil {
			return nil, fmt.Errorf("end %s: %w", f.name, err)
		}
	}
	if err := harness.Eventually(ctx, failingOver, "a new primary accepts writes", func() error {
		var ok bool
		if fig.first, ok = c.writers.first(fig.began, timeline); !ok {
			return errors.New("none does")
		}
		return nil
	}); err != nil {
		return nil, fmt.Errorf("%s: %w", f.name, err)
	}
	c.say("  host%d accepted the first write after %.1f s", fig.first.host, fig.first.at.Sub(fig.began).Seconds())
	if !f.alone && f.end != nil {
		retry.Pause(ctx, f.last)
		if err := f.end(ctx, c, p); err != nil {
			return nil, fmt.Errorf("end %s: %w", f.name, err)
		}
	}
	if _, fig.newTimeline, err = c.settled(ctx); err != nil {
		return nil, fmt.Errorf("after %s: %w", f.name, err)
	}
	repaired := time.Now()
	if err := c.finished(ctx); err != nil {
		return nil, fmt.Errorf("after %s: %w", f.name, err)
	}
	fig.over = time.Now()
	c.say("  in order again after %.1f s; what was enqueued until then had finished %.1f s later", repaired.Sub(fig.began).Seconds(), fig.over.Sub(repaired).Seconds())
	return fig, nil
}
