package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/chaos/harness"
	"onejob/internal/procfs"
	"onejob/internal/testenv/processes"
)

// family starts a process with a child and a grandchild that has a session of its own.
func family(t *testing.T) *harness.Process {
	t.Helper()
	proc, err := harness.Start(exec.Command("/bin/sh", "-c", "(setsid sleep 600 & wait) & wait"), filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, pid := range stopAll([]*harness.Process{proc}) {
			if p, err := os.FindProcess(pid); err == nil {
				_ = p.Kill()
			}
		}
		<-proc.Exited
	})
	err = harness.Eventually(t.Context(), 20*time.Second, "there are three generations", func() error {
		for _, p := range harness.Below(proc.Cmd.Process.Pid) {
			if name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p.PID)); bytes.HasPrefix(name, []byte("sleep")) {
				return nil
			}
		}
		return errNothing
	})
	if err != nil {
		t.Fatal(err)
	}
	return proc
}

func TestAHostIsStoppedWhole(t *testing.T) {
	one, other := family(t), family(t)
	pids := stopAll([]*harness.Process{one, other})
	if len(pids) != 6 || !slices.Contains(pids, one.Cmd.Process.Pid) || !slices.Contains(pids, other.Cmd.Process.Pid) {
		t.Errorf("stopped were %v", pids)
	}
	for _, pid := range pids {
		if p, err := procfs.Read(pid); err != nil || !p.Stopped {
			t.Errorf("process %d is %+v (%v)", pid, p, err)
		}
	}
	for _, pid := range slices.Backward(pids) {
		if p, err := os.FindProcess(pid); err == nil {
			_ = p.Kill()
		}
	}
	if err := awaitGone(t.Context(), pids); err != nil {
		t.Error(err)
	}
}

func TestTheLargestProcessIsChosen(t *testing.T) {
	proc := family(t)
	// A shell with 200 MB in a variable is larger than the family.
	large, err := harness.Start(exec.Command("/bin/sh", "-c", "x=$(head -c 200000000 /dev/zero | tr '\\0' x); sleep 600; echo $x"), filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, pid := range stopAll([]*harness.Process{large}) {
			if p, err := os.FindProcess(pid); err == nil {
				_ = p.Kill()
			}
		}
		<-large.Exited
	})
	pid := large.Cmd.Process.Pid
	err = harness.Eventually(t.Context(), time.Minute, "it is large", func() error {
		if rss, err := processes.Status(pid, "VmRSS"); err != nil || rss < 150 {
			return errNothing
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if got, score := largest(harness.Below(proc.Cmd.Process.Pid, pid)); got != pid {
		t.Errorf("chosen was %d with score %d, not %d", got, score, pid)
	}
	if got, _ := largest(nil); got != 0 {
		t.Errorf("of nobody %d was chosen", got)
	}
}

// A token has the rights that docs/operate/security.md names, until a fault takes some or all
// away, and then again, with the same secret; also in a Consul that was wiped.
func TestTokensAreTakenAwayAndRestored(t *testing.T) {
	page, err := os.ReadFile("../docs/operate/security.md")
	if err != nil {
		t.Fatal(err)
	}
	words := func(s string) string { return strings.Join(strings.Fields(s), " ") }
	for line := range strings.Lines(strings.TrimSpace(replicaRules)) {
		if !strings.Contains(words(string(page)), words(line)) {
			t.Errorf("docs/operate/security.md has no rule %s", line)
		}
	}

	dir, err := makeDir()
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	c, err := startCluster(t.Context(), dir, settings{}, true, t.Logf)
	defer c.close()
	if err != nil {
		t.Fatal(err)
	}
	agent := c.hosts[0].agent
	_, secret := tokenOf("daemon-1", 0)
	client, err := api.NewClient(&api.Config{Address: agent.Addr(), Token: secret})
	if err != nil {
		t.Fatal(err)
	}
	kv := client.KV()
	rights := map[string]func() error{
		"read": func() error { _, _, err := kv.Get(consulPrefix+"/cluster", nil); return err },
		"list": func() error { _, _, err := kv.Keys(consulPrefix+"/tasks/", "", nil); return err },
		"write": func() error {
			_, err := kv.Put(&api.KVPair{Key: consulPrefix + "/tasks/7"}, nil)
			return err
		},
		"replicas": func() error { _, _, err := kv.Get(consulPrefix+"/replicas/x", nil); return err },
		"session": func() error {
			id, _, err := client.Session().CreateNoChecks(&api.SessionEntry{Node: c.hosts[1].agent.Node()}, nil)
			if err == nil {
				_, err = client.Session().Destroy(id, nil)
			}
			return err
		},
		"service": func() error {
			return client.Agent().ServiceRegister(&api.AgentServiceRegistration{ID: "x", Name: "onejob"})
		},
	}
	expect := func(when string, denied ...string) {
		t.Helper()
		for name, use := range rights {
			want := slices.Contains(denied, name)
			if err := harness.Eventually(t.Context(), 20*time.Second, when, func() error { // agents remember tokens for seconds
				err := use()
				if refused := err != nil && (strings.Contains(err.Error(), "denied") || strings.Contains(err.Error(), "not found")); refused != want {
					return err
				}
				return nil
			}); err != nil {
				t.Errorf("%s the right to %s is not as it should be: %v", when, name, err)
			}
		}
	}
	r := &replica{c: c, host: c.hosts[0], place: place{name: "daemon-1", tokenFile: filepath.Join(dir, "daemon-1.token")}}
	restore := func() {
		t.Helper()
		if err := c.authorize(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	restore()
	expect("at first")
	for name, rules := range narrowRules(agent.Node()) {
		if err := c.setPolicy(t.Context(), r.name, rules); err != nil {
			t.Fatal(err)
		}
		expect(name, map[string][]string{
			"sessions of its own agent only":                   {"session"},
			"it reads keys, and neither lists nor writes them": {"list", "write"},
			"it writes locks, and does not see who is alive":   {"replicas"},
			"it feeds no health check":                         {"service"},
		}[name]...)
	}
	restore()
	expect("when its rights are given back")
	if err := c.revoke(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	expect("without the token", "read", "list", "write", "replicas", "session", "service")
	restore()
	expect("when the token is made again")
	all := []string{"read", "list", "write", "replicas", "session", "service"}
	for n, denied := range [][]string{{}, {}, all} { // it is started with the second token before the third rotation
		if n == 2 {
			r.tokens.starts()
		}
		if err := c.rotate(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		_, secret := tokenOf(r.name, n+1)
		if got, err := os.ReadFile(r.tokenFile); err != nil || string(got) != secret+"\n" {
			t.Errorf("after %d rotations the file has %q, %v", n+1, got, err)
		}
		expect(fmt.Sprintf("the first token, after %d rotations", n+1), denied...)
	}
	_, now := tokenOf(r.name, 3)
	if client, err = api.NewClient(&api.Config{Address: agent.Addr(), Token: now}); err != nil {
		t.Fatal(err)
	}
	kv = client.KV()
	expect("with the fourth token")
	for _, s := range append(c.consul.Servers[:3:3], c.hosts[0].agent, c.hosts[1].agent, c.hosts[2].agent) {
		if err := s.Wipe(); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.heal(context.Background()); err != nil {
		t.Fatal(err)
	}
	restore()
	expect("in a Consul that was wiped")
}
