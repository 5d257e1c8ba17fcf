package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strings"

	"golang.org/x/sys/unix"

	"onejob/bench/riverjobs"
)

// machine is where and with which versions of everything was measured.
type machine struct {
	Cores    int    `json:"cores"`
	CPU      string `json:"cpu"`
	MemoryMB uint64 `json:"memory_mb"`
	Kernel   string `json:"kernel"`
	Load     string `json:"load_before"` // of the last 1, 5 and 15 minutes
	Go       string `json:"go"`
	Onejob   string `json:"onejob_commit"` // with "changed" after it if the tree was
	River    string `json:"river"`
	Pgx      string `json:"pgx"`
	Postgres string `json:"postgres"`
	Consul   string `json:"consul"`
}

func (m *machine) look(ctx context.Context, g *environment) error {
	m.Cores, m.Go = runtime.NumCPU(), runtime.Version()
	m.CPU = fieldOf("/proc/cpuinfo", "model name")
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err == nil {
		m.MemoryMB = uint64(info.Totalram) * uint64(info.Unit) >> 20
	}
	var name unix.Utsname
	if err := unix.Uname(&name); err == nil {
		m.Kernel = unix.ByteSliceToString(name.Release[:])
	}
	if text, err := os.ReadFile("/proc/loadavg"); err == nil {
		m.Load = strings.Join(strings.Fields(string(text))[:3], " ")
	}
	m.Onejob = commit(ctx)
	if build, ok := debug.ReadBuildInfo(); ok {
		for _, d := range build.Deps {
			switch d.Path {
			case "github.com/riverqueue/river":
				m.River = d.Version
			case "github.com/jackc/pgx/v5":
				m.Pgx = d.Version
			}
		}
	}
	if err := g.admin.QueryRow(ctx, `SHOW server_version`).Scan(&m.Postgres); err != nil {
		return err
	}
	c, err := g.startConsul(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	self, err := c.Client().Agent().Self()
	if err != nil {
		return err
	}
	m.Consul, _ = self["Config"]["Version"].(string)
	return nil
}

// fieldOf returns what follows the first "name :" in a file of /proc.
func fieldOf(path, name string) string {
	file, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		if key, value, ok := strings.Cut(lines.Text(), ":"); ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// commit returns which state of onejob was built, as far as git knows.
func commit(ctx context.Context) string {
	git := func(arguments ...string) string {
		out, err := exec.CommandContext(ctx, "git", append([]string{"-C", ".."}, arguments...)...).Output()
		if err != nil {
			return "unknown"
		}
		return strings.TrimSpace(string(out))
	}
	head := git("rev-parse", "--short=12", "HEAD")
	if head != "unknown" && git("status", "--porcelain") != "" {
		head += " changed"
	}
	return head
}

// settings tells with which settings everything ran. What is not named is the
// default of whoever it belongs to.
func settings() map[string]any {
	return map[string]any{
		"postgres":      "defaults, durable commits, data on a disk, locale C, UTF8, TCP on the loopback interface",
		"heaps":         fmt.Sprintf("of all Go programs: GOGC=%d, as onejob serve sets it", gcPercent),
		"consul":        "one server with its data on a disk, defaults but for raft_multiplier 1 and GOGC=" + consulGOGC() + "; a new one for each run",
		"onejob":        map[string]any{"worker.concurrency": onejobConcurrency, "kind": "noop", "log": "info, JSON, into a file"},
		"onejob_idle":   "all defaults",
		"onejob_pickup": map[string]any{"concurrency": onejobConcurrency, "kind": "a Go handler"},
		"river": map[string]any{
			"MaxWorkers": riverjobs.BulkMaxWorkers, "FetchCooldown": riverjobs.BulkFetchCooldown.String(),
			"FetchPollInterval": riverjobs.BulkFetchPollInterval.String(), "pool": riverjobs.MaxConns,
			"note": "the settings of River's own benchmark command; batch completer and logger are its defaults",
		},
		"river_default_pickup": map[string]any{"MaxWorkers": riverjobs.BulkMaxWorkers, "pool": riverjobs.MaxConns, "note": "FetchCooldown and FetchPollInterval as by default, 100 ms and 1 s"},
		"river_advisory":       map[string]any{"lock": "pg_advisory_lock around each job, on a connection of its own", "pool": riverjobs.AdvisoryConns},
		"river_consul":         map[string]any{"lock": "api.Lock of Consul's Go client around each job", "MaxWorkers": riverjobs.ConsulWorkers},
		"held_row":             map[string]any{"loops": heldRowLoops},
		"naive":                map[string]any{"workers": naiveWorkers, "pool": 8},
		"floor":                map[string]any{"loops": baselineLoops, "batch": baselineBatch},
		"pickup":               map[string]any{"inserts_per_second": pickupRate, "clock": "from just before the INSERT is sent to the first line of the handler"},
		"enqueue":              map[string]any{"rows_per_insert": enqueueBatch, "connections": 1},
		"look_every_ms":        lookEvery.Milliseconds(),
	}
}
