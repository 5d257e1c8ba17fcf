package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"onejob/chaos/harness"
)

// Every host has two links: a net that faults cut, and a wire to the observer. The
// client is number 0, hosts are 1, 2 and 3.
func network(n int) string { return "10.77.0." + lastByte(n) }
func wire(n int) string    { return "10.78.0." + lastByte(n) }

func lastByte(n int) string {
	if n == 0 {
		return "1"
	}
	return strconv.Itoa(10 + n)
}

const hostCount = 3

// host is a namespace with a Consul server, a Postgres under Patroni, and a replica.
type host struct {
	settings
	n       int
	dir     string
	consul  *harness.Process
	patroni *harness.Process

	mu      sync.Mutex
	replica *harness.Process
	ended   bool // the replica is not to be started any more
	exits   int  // how often it ended by itself
}

func (h *host) name() string { return fmt.Sprint("host", h.n) }

func (h *host) namespace() string { return fmt.Sprint(h.space, "-", h.n) }

func (h *host) log(program string) string { return filepath.Join(h.dir, program+".log") }

// command runs a program in the host's namespace, as a user.
func (h *host) command(user, program string, args ...string) *exec.Cmd {
	all := []string{"netns", "exec", h.namespace(), "setpriv", "--reuid", user, "--regid", user, "--init-groups", program}
	cmd := exec.Command("ip", append(all, args...)...)
	cmd.Dir = h.dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LANG=C.UTF-8", "HOME=" + h.dir}
	return cmd
}

// make writes the configurations.
func (h *host) make() error {
	if err := os.MkdirAll(filepath.Join(h.dir, "consul"), 0o755); err != nil {
		return err
	}
	postgres := filepath.Join(h.dir, "postgres")
	if err := os.Mkdir(postgres, 0o700); err != nil {
		return err
	}
	if out, err := exec.Command("chown", "postgres:", postgres).CombinedOutput(); err != nil {
		return fmt.Errorf("chown: %w: %s", err, out)
	}
	var others []string
	for n := range hostCount {
		if n+1 != h.n {
			others = append(others, network(n+1))
		}
	}
	return writeAll(h.dir, map[string]any{
		"consul.json": map[string]any{
			"server": true, "bootstrap_expect": hostCount, "retry_join": others, "retry_interval": "1s",
			"node_name": h.name(), "data_dir": filepath.Join(h.dir, "consul"),
			"bind_addr": network(h.n), "client_addr": "127.0.0.1 " + wire(h.n),
			"log_level": "warn", "disable_update_check": true,
			"leave_on_terminate": false, "skip_leave_on_interrupt": true,
			"performance": map[string]any{"raft_multiplier": 1},
			"autopilot":   map[string]any{"cleanup_dead_servers": false}, // those that are killed come back
			"ports":       map[string]any{"dns": -1, "serf_wan": -1, "grpc": -1, "grpc_tls": -1},
		},
		"patroni.yml": h.patroniConfig(),
	})
}

// patroniConfig is the recipe of docs/operate/high-availability.md. JSON is YAML.
func (h *host) patroniConfig() map[string]any {
	bootstrap := map[string]any{
		"ttl": 20, "loop_wait": 5, "retry_timeout": 7, "maximum_lag_on_failover": 1 << 20,
		"synchronous_mode": h.standby == synchronous,
		"postgresql": map[string]any{
			"use_pg_rewind": true,
			"parameters": map[string]any{
				"wal_log_hints": "on", "max_connections": 60, "shared_buffers": "32MB",
				"log_min_error_statement": "panic", // writers try standbys, too
				"tcp_keepalives_idle":     10, "tcp_keepalives_interval": 5, "tcp_keepalives_count": 3, "tcp_user_timeout": "15s",
			},
		},
	}
	return map[string]any{
		"scope": "onejob-ha", "name": h.name(),
		"restapi": map[string]any{"listen": "0.0.0.0:8008", "connect_address": network(h.n) + ":8008"},
		"consul":  map[string]any{"host": "127.0.0.1:8500"},
		"bootstrap": map[string]any{
			"dcs":    bootstrap,
			"initdb": []any{map[string]any{"encoding": "UTF8"}, map[string]any{"auth": "trust"}},
			"pg_hba": []string{"local all all trust", "host all all 0.0.0.0/0 trust", "host replication all 0.0.0.0/0 trust"},
		},
		"postgresql": map[string]any{
			"listen": "0.0.0.0:5432", "connect_address": network(h.n) + ":5432",
			"bin_dir": h.postgres, "data_dir": filepath.Join(h.dir, "postgres", "data"), "pgpass": filepath.Join(h.dir, "postgres", "pgpass"),
			"authentication": map[string]any{
				"superuser":   map[string]any{"username": "postgres", "password": "unused"},
				"replication": map[string]any{"username": "replicator", "password": "unused"},
			},
			"parameters": map[string]any{"unix_socket_directories": filepath.Join(h.dir, "postgres")},
		},
	}
}

func writeAll(dir string, files map[string]any) error {
	for name, v := range files {
		b, err := json.MarshalIndent(v, "", "  ")
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, name), append(b, '\n'), 0o644); err != nil {
			return err
		}
	}
	return nil
}

func (h *host) startConsul() (err error) {
	h.consul, err = harness.Start(h.command("root", h.settings.consul, "agent", "-config-file", "consul.json"), h.log("consul"))
	return err
}

func (h *host) startPatroni() (err error) {
	h.patroni, err = harness.Start(h.command("postgres", "patroni", "patroni.yml"), h.log("patroni"))
	return err
}

// startReplica starts onejob, and starts it again when it ends, as a service manager
// does.
func (h *host) startReplica() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ended {
		return nil
	}
	cmd := h.command("root", filepath.Join(h.settings.dir, "onejob"), "serve", "--config", filepath.Join(h.settings.dir, "onejob.yaml"))
	cmd.Env = append(cmd.Env, "ONEJOB_REPLICA=onejob"+strconv.Itoa(h.n))
	p, err := harness.Start(cmd, h.log("onejob"))
	if err != nil {
		return err
	}
	h.replica = p
	go func() {
		<-p.Exited
		h.mu.Lock()
		again := !h.ended
		if again {
			h.exits++
		}
		h.mu.Unlock()
		if again {
			time.Sleep(time.Second)
			_ = h.startReplica() // it worked before
		}
	}()
	return nil
}

// stopReplica ends onejob with SIGTERM, for good.
func (h *host) stopReplica() error {
	h.mu.Lock()
	h.ended = true
	p := h.replica
	h.mu.Unlock()
	p.Signal(syscall.SIGTERM)
	if !p.Running() {
		return nil
	}
	select {
	case <-p.Exited:
		return nil
	case <-time.After(45 * time.Second):
		return fmt.Errorf("%s: onejob did not stop within 45s", h.name())
	}
}

// processesOf are the processes of a program that run on the host.
func (h *host) processesOf(program string) ([]int, error) {
	out, err := exec.Command("ip", "netns", "pids", h.namespace()).Output()
	if err != nil {
		return nil, fmt.Errorf("list the processes of %s: %w", h.name(), err)
	}
	var pids []int
	for field := range strings.FieldsSeq(string(out)) {
		pid, err := strconv.Atoi(field)
		if err != nil {
			return nil, err
		}
		name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		if err == nil && string(bytes.TrimSpace(name)) == program {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// signalDatabase sends a signal to Patroni, and then to Postgres with all its processes.
func (h *host) signalDatabase(s syscall.Signal) error {
	h.patroni.Signal(s)
	pids, err := h.processesOf("postgres")
	for _, pid := range pids {
		_ = syscall.Kill(pid, s) // some end as others do
	}
	return err
}

// unplug takes the host off the net, without a word to anybody. plug undoes that.
func (h *host) unplug() error { return ip("link", "set", fmt.Sprint("net", h.n), "nomaster") }
func (h *host) plug() error   { return ip("link", "set", fmt.Sprint("net", h.n), "master", "net") }

func ip(args ...string) error {
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

// member is a Postgres as Patroni describes it.
type member struct {
	Name     string `json:"name"`
	Role     string `json:"role"`
	State    string `json:"state"`
	Timeline int    `json:"timeline"`
}

// members asks the host's Patroni for all of the cluster.
func (h *host) members(ctx context.Context) ([]member, error) {
	var cluster struct{ Members []member }
	err := h.ask(ctx, http.MethodGet, "http://"+wire(h.n)+":8008/cluster", nil, &cluster)
	return cluster.Members, err
}

func (h *host) ask(ctx context.Context, method, url string, body, answer any) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	b, err := json.Marshal(body)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(b))
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		why, _ := io.ReadAll(io.LimitReader(resp.Body, 500))
		return fmt.Errorf("%s %s: %s: %s", method, url, resp.Status, why)
	}
	if answer == nil {
		return nil
	}
	return json.NewDecoder(resp.Body).Decode(answer)
}

// primary returns which of the members leads, if all are there and follow it.
func primary(members []member) (string, error) {
	i := slices.IndexFunc(members, func(m member) bool { return m.Role == "leader" })
	if i < 0 || len(members) != hostCount {
		return "", fmt.Errorf("there is no primary with two standbys: %+v", members)
	}
	for _, m := range members {
		if m.State != "running" && m.State != "streaming" || m.Timeline != members[i].Timeline {
			return "", fmt.Errorf("not all follow %s: %+v", members[i].Name, members)
		}
	}
	return members[i].Name, nil
}
