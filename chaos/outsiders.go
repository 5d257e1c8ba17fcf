package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"onejob/chaos/checker"
	"onejob/chaos/harness"
	"onejob/internal/retry"
	"onejob/internal/testenv/proxy"
)

// outsider starts one command after the other under "onejob lock", on lock keys that tasks
// have as well. Such a command has no row: what keeps it and a task apart is the key in
// Consul alone, so with outsiders that half is judged by itself.
type outsider struct {
	place
	c            *cluster
	binary       string       // onejob
	consulBinary string       // it uses "consul lock" on slots of a limit instead, if not empty
	link         *proxy.Proxy // to the agent of its host
	rand         *rand.Rand
	n            int // commands

	mu   sync.Mutex
	proc *harness.Process // "onejob lock", which may have ended
}

const (
	outsiderCount = 3
	sharedKey     = "shared-"
	sharedKeys    = 4 // lock keys that tasks share with outsiders
	consulLimit   = "wide"
)

// addOutsiders makes the outsiders, one on each host. They start nothing yet. In a run whose
// faults end nothing there is one more, which uses "consul lock": that has no guard, so under
// other faults nobody promises that its command ends in time.
func (c *cluster) addOutsiders(ctx context.Context, s settings) error {
	count := outsiderCount
	if gentle(s.Kinds) && !s.RabbitMQ {
		count++
	}
	i := slices.IndexFunc(c.replicas, func(r *replica) bool { _, ok := r.subject.(*daemon); return ok })
	if i < 0 {
		return nil
	}
	for n := range count {
		o := &outsider{c: c, binary: c.replicas[i].subject.(*daemon).binary, rand: rand.New(rand.NewPCG(s.Seed, uint64(10+n)))}
		o.name = fmt.Sprintf("outsider-%d", n+1)
		if err := c.admit(ctx, o.name); err != nil {
			return err
		}
		_, o.token = tokenOf(o.name, 0)
		var err error
		if o.link, err = proxy.New(c.hosts[n%len(c.hosts)].agent.Addr()); err != nil {
			return err
		}
		o.consul, o.liveness, o.tls = o.link.Addr(), c.liveness, c.hosts[n%len(c.hosts)].tls
		if c.hosts[n%len(c.hosts)].clocks {
			o.ahead = time.Duration(10+n) * aYear
		}
		if n >= outsiderCount {
			o.consulBinary = c.consul.Servers[0].Binary()
			if err := c.setPolicy(ctx, o.name, replicaRules+consulLockRule); err != nil {
				return err
			}
		}
		c.outsiders = append(c.outsiders, o)
	}
	return nil
}

// consulLockRule is what "consul lock" needs besides: it asks the agent who that is.
const consulLockRule = `
agent_prefix "" { policy = "read" }`

// run starts commands until ctx ends, and returns when the last one has ended.
func (o *outsider) run(ctx context.Context) error {
	for ctx.Err() == nil {
		if err := o.once(ctx); err != nil {
			return fmt.Errorf("%s: %w", o.name, err)
		}
		retry.Pause(ctx, 200*time.Millisecond+time.Duration(o.rand.IntN(800))*time.Millisecond)
	}
	return nil
}

// once runs one command. How it ends is for the checker: it may be killed, or not get the
// lock in time.
func (o *outsider) once(ctx context.Context) error {
	o.n++
	key := fmt.Sprint(sharedKey, o.rand.IntN(sharedKeys))
	w := work{MS: 50 + o.rand.IntN(500), Stubborn: o.rand.IntN(4) == 0, Child: o.rand.IntN(6) == 0}
	switch o.rand.IntN(12) { // for a task to meet, or a fault
	case 0:
		w.MS = 10000 + o.rand.IntN(6000)
	case 1, 2, 3:
		w.MS = 1000 + o.rand.IntN(4000)
	}
	if o.consulBinary != "" {
		w.Limit = consulLimit
	}
	payload, err := json.Marshal(execPayload{Data: w})
	if err != nil {
		return err
	}
	cmd := exec.Command(o.binary, "lock", "--wait", "30s", key, "--", o.c.self, partTask)
	name := fmt.Sprintf("%s/%d", o.name, o.n)
	if o.consulBinary != "" {
		cmd = exec.Command(o.consulBinary, "lock", fmt.Sprint("-n=", limitSlots[consulLimit]), "-timeout=30s", "-pass-stdin", "-shell=false",
			consulPrefix+"/limits/"+consulLimit, o.c.self, partTask)
		key = name // it has none
	}
	cmd.Env = append(o.environ(), "CONSUL_HTTP_ADDR="+o.consul, envObserver+"="+o.c.observer.Where.Tasks, envOutsider+"="+name, envStarter+"="+o.name, envKey+"="+key)
	cmd.Stdin = strings.NewReader(string(payload))
	p, err := harness.Start(withClock(cmd, o.ahead), filepath.Join(o.c.logs(), o.name+".log"))
	if err != nil {
		return err
	}
	o.mu.Lock()
	o.proc = p
	o.mu.Unlock()
	select {
	case <-p.Exited:
		return nil
	case <-ctx.Done():
	}
	_ = p.Cmd.Process.Signal(syscall.SIGTERM) // it passes that on
	select {
	case <-p.Exited:
	case <-time.After(45 * time.Second):
		o.c.say("%s: onejob lock did not end by SIGTERM and was killed", o.name)
		o.kill()
	}
	return nil
}

// kill kills "onejob lock". The guard of its command lives.
func (o *outsider) kill() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.proc.Running() {
		_ = o.proc.Cmd.Process.Kill()
	}
}

// Faults of outsiders.
var outsiderFaults = []*kind{
	{name: checker.OutsiderKill, what: "kill -9 of onejob lock", weight: 2, gentle: true, outsiders: true, run: onOutsider(func(_ context.Context, _ *fault, o *outsider) { o.kill() })},
	{name: checker.OutsiderFreeze, what: "SIGSTOP of onejob lock, and SIGCONT", weight: 2, gentle: true, outsiders: true, least: time.Second, most: 30 * time.Second, run: onOutsider(freezeOutsider)},
	{name: checker.OutsiderCut, what: "onejob lock black-holed from Consul", weight: 2, gentle: true, outsiders: true, least: time.Second, most: 30 * time.Second, run: onOutsider(cutOutsider)},
}

// onOutsider does harm to an outsider whose command is at work.
func onOutsider(harm func(context.Context, *fault, *outsider)) func(context.Context, *fault) error {
	return func(ctx context.Context, h *fault) error {
		var o *outsider
		err := harness.Eventually(ctx, 5*time.Second, "a command of an outsider is at work", func() (err error) {
			o, err = h.atWork()
			return err
		})
		if err != nil {
			return errNothing
		}
		if err := h.begins(o.name); err != nil {
			return err
		}
		harm(ctx, h, o)
		return nil
	}
}

func (h *fault) atWork() (*outsider, error) {
	stays, err := h.c.observer.Inside()
	if err != nil {
		return nil, err
	}
	for _, i := range h.rand.Perm(len(stays)) {
		for _, o := range h.c.outsiders {
			if o.name == stays[i].Replica && o.consulBinary == "" { // nothing ends the command of "consul lock" in time
				return o, nil
			}
		}
	}
	return nil, errors.New("none is")
}

func freezeOutsider(ctx context.Context, h *fault, o *outsider) {
	o.mu.Lock()
	p := o.proc
	o.mu.Unlock()
	_ = p.Cmd.Process.Signal(syscall.SIGSTOP)
	h.lasts(ctx)
	_ = p.Cmd.Process.Signal(syscall.SIGCONT)
}

func cutOutsider(ctx context.Context, h *fault, o *outsider) {
	o.link.Cut(proxy.Both)
	h.lasts(ctx)
	o.link.Heal(proxy.Both)
}

// isOutsider reports whether what a key of a replica says is from an outsider: each has a
// session of its own, and is on Consul's list as a replica is.
func isOutsider(value []byte) bool {
	var r struct{ Name string }
	return json.Unmarshal(value, &r) == nil && strings.HasPrefix(r.Name, "onejob lock ")
}

// closeOutsiders ends what still runs.
func (c *cluster) closeOutsiders() {
	for _, o := range c.outsiders {
		o.kill()
		_ = o.link.Close()
	}
}
