package cli

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

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
	for name, c := range map[string]struct{ late, beats, level, text string }{
		"Nothing":   {"0 0 0", "0 0 0", "?", "nothing yet"},
		"Fits":      {"90 100 100", "100 100 100", "ok", "at least 5 times as long"},
		"Tight":     {"90 90 100", "100 100 100", "warn", "only 1.7 times as long"},
		"SlowAgent": {"100 100 100", "90 90 100", "warn", "only 1.7 times as long"},
		"TooShort":  {"90 90 99", "100 100 100", "FAIL", "raise consul.check_ttl"},
	} {
		t.Run(name, func(t *testing.T) {
			text := "process_start_time_seconds 1.7e9\nonejob_sessions_lost_total 1\n"
			for _, h := range []struct{ name, label, counts string }{
				{"onejob_timer_lateness_seconds", "", c.late}, {"onejob_heartbeat_duration_seconds", `target="agent",`, c.beats},
			} {
				n := strings.Fields(h.counts)
				total := "100"
				if n[2] == "0" {
					total = "0"
				}
				text += "# TYPE " + h.name + " histogram\n"
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
			v := judgeLeases(families, 5*time.Second)
			if v.level != c.level || !strings.Contains(v.text, c.text) {
				t.Errorf("the verdict is %s %s, want %s with %q", v.level, v.text, c.level, c.text)
			}
		})
	}
}
