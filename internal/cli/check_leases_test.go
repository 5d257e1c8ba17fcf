package cli

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"onejob/internal/testenv"
	"onejob/lock/consul"
)

func TestMetricsAddress(t *testing.T) {
	here, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ host, http, want, problem string }{
		"Here":           {here, "127.0.0.1:7677", "127.0.0.1:7677", ""},
		"HereEverywhere": {here, "[::]:7677", "localhost:7677", ""},
		"Elsewhere":      {"far", "10.0.0.7:7677", "10.0.0.7:7677", ""},
		"All":            {"far", "0.0.0.0:7677", "far:7677", ""},
		"Loopback":       {"far", "127.0.0.1:7677", "", "run this command there"},
		"None":           {here, "", "", "set http.listen"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := metricsAddress(consul.Replica{Host: c.host, HTTP: c.http})
			if got != c.want || (err == nil) != (c.problem == "") || err != nil && !strings.Contains(err.Error(), c.problem) {
				t.Errorf("the address is %q, %v, want %q, %q", got, err, c.want, c.problem)
			}
		})
	}
}

func TestJudgeLeases(t *testing.T) {
	for name, c := range map[string]struct{ late, agent, servers, level, text string }{
		"Nothing":      {"0 0 0", "0 0 0", "", "?", "nothing yet"},
		"NoHeartbeats": {"100 100 100", "0 0 0", "0 0 0", "?", "nothing yet"},
		"Fits":         {"90 100 100", "100 100 100", "90 100 100", "ok", "at least 5 times as long"},
		"Tight":        {"90 90 100", "100 100 100", "100 100 100", "warn", "only 1.7 times as long"},
		"SlowAgent":    {"100 100 100", "90 90 100", "100 100 100", "warn", "only 2.0 times as long"},
		"SlowServers":  {"100 100 100", "100 100 100", "90 90 100", "warn", "only 2.7 times as long"},
		"OnlyServers":  {"90 100 100", "", "90 100 100", "ok", "for less than 1s, its renewals took less than 1s, and it lost 1 session: "},
		"OnlySlow":     {"100 100 100", "", "90 90 100", "warn", "only 2.7 times as long"},
		"TooShort":     {"90 90 99", "100 100 100", "100 100 100", "FAIL", "raise consul.check_ttl"},
	} {
		t.Run(name, func(t *testing.T) {
			text := "process_start_time_seconds 1.7e9\n# TYPE onejob_sessions_lost_total counter\nonejob_sessions_lost_total 1\n"
			for _, h := range []struct{ name, label, counts string }{
				{"onejob_timer_lateness_seconds", "", c.late},
				{"onejob_heartbeat_duration_seconds", `target="agent",`, c.agent},
				{"onejob_heartbeat_duration_seconds", `target="consul",`, c.servers},
				{"onejob_heartbeat_duration_seconds", `target="postgres",`, "0 0 0"},
			} {
				n := strings.Fields(h.counts)
				if len(n) == 0 {
					continue
				}
				total := "100"
				if n[2] == "0" {
					total = "0"
				}
				if !strings.Contains(text, "# TYPE "+h.name) {
					text += "# TYPE " + h.name + " histogram\n"
				}
				for i, le := range []string{"0.01", "1", "3", "+Inf"} {
					text += h.name + "_bucket{" + h.label + `le="` + le + `"} ` + append(n, total)[i] + "\n"
				}
				text += h.name + "_count{" + h.label + "} " + total + "\n" + h.name + "_sum{" + h.label + "} 1\n"
			}
			parser := expfmt.NewTextParser(model.UTF8Validation)
			families, err := parser.TextToMetricFamilies(strings.NewReader(text))
			if err != nil {
				t.Fatal(err)
			}
			v := judgeLeases(families, leaseSlack{stall: 5 * time.Second, heartbeat: 6 * time.Second, renewal: 8 * time.Second})
			if v.level != c.level || !strings.Contains(v.text, c.text) {
				t.Errorf("the verdict is %s %s, want %s with %q", v.level, v.text, c.level, c.text)
			}
		})
	}
	if got, want := slackOf(consul.Config{}), (leaseSlack{stall: 5 * time.Second, heartbeat: 8 * time.Second, renewal: 11 * time.Second}); got != want {
		t.Errorf("by default there is time for %+v, want %+v", got, want)
	}
}

// A command such as "onejob lock" has a session in Consul as a replica has, and no metrics.
func TestLeasesOfCommandsAreNotChecked(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	cfg, err := loadConfig("", []string{"ONEJOB_CONSUL_ADDRESS=" + kv.Addr, "ONEJOB_CONSUL_PREFIX=" + kv.Prefix})
	if err != nil {
		t.Fatal(err)
	}
	check := func(want string) {
		t.Helper()
		var out strings.Builder
		if err := checkLeases(t.Context(), cfg, &out); err == nil || err.Error() != want {
			t.Errorf("it says %v, want %s\n%s", err, want, out.String())
		}
		if strings.Contains(out.String(), "onejob lock") {
			t.Errorf("it asks a command:\n%s", out.String())
		}
	}
	start := func(r consul.Replica) {
		t.Helper()
		lockConfig := cfg.consulConfig()
		lockConfig.Replica = r
		locks, err := consul.New(lockConfig)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(background(context.WithoutCancel(t.Context()), func(ctx context.Context) error { return locks.Run(ctx, nil) }))
		if err := locks.Ready(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	start(consul.Replica{Name: "onejob lock db1", Version: "v1"})
	check("no replica is running")
	start(consul.Replica{Name: "web-1", Version: "v1", Process: "5d8a1bb1-6f5e-4c2b-8f0e-2d6a3b0c9e77"})
	check("1 replica of 1: leases are too short, or unknown")
}
