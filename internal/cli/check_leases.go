package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"os"
	"slices"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"onejob/internal/metrics"
	"onejob/internal/plaintext"
	"onejob/lock"
	"onejob/lock/consul"
)

// checkLeases asks every living replica for its metrics and says whether its leases last
// long enough for the machine that it runs on.
func checkLeases(ctx context.Context, cfg Config, out io.Writer) error {
	locks, err := consul.New(cfg.consulConfig())
	if err != nil {
		return usage(err)
	}
	replicas, err := locks.Replicas(ctx)
	if err != nil {
		return err
	}
	replicas = slices.DeleteFunc(replicas, isCommand)
	if len(replicas) == 0 {
		return errors.New("no replica is running")
	}
	slack, failed := slackOf(cfg.consulConfig()), 0
	printf(out, "By this configuration a replica loses its leases when it stands still, or goes unheard, for %v.\n", slack.stall)
	for _, r := range replicas {
		name := r.Name + " on " + r.Host
		address, err := metricsAddress(r)
		var families map[string]*dto.MetricFamily
		if err == nil {
			families, err = scrape(ctx, address)
		}
		if err != nil {
			failed++
			printf(out, "?     %s: %v\n", name, err)
			continue
		}
		v := judgeLeases(families, slack)
		if v.level == "FAIL" {
			failed++
		}
		printf(out, "%-5s %s: %s\n", v.level, name, v.text)
	}
	if failed > 0 {
		return fmt.Errorf("%s of %d: leases are too short, or unknown", plaintext.Plural(failed, "replica"), len(replicas))
	}
	return nil
}

// isCommand reports whether it is a command such as "onejob lock" that shows itself: it has a
// session and no tasks, and belongs to no cluster.
func isCommand(r consul.Replica) bool { return r.Process == "" }

// metricsAddress returns where a replica shows its metrics. What it says of itself is its own
// view: an address of the loopback means another replica, or none, on any other host.
func metricsAddress(r consul.Replica) (string, error) {
	host, port, err := net.SplitHostPort(r.HTTP)
	if err != nil {
		return "", errors.New("it serves no metrics: set http.listen")
	}
	ip := net.ParseIP(host)
	here, _ := os.Hostname()
	switch {
	case r.Host == here && ip != nil && ip.IsUnspecified():
		host = "localhost"
	case r.Host == here || ip == nil:
	case ip.IsLoopback():
		return "", fmt.Errorf("it listens on its own host only (%s): run this command there, or set http.listen to an address of the network", r.HTTP)
	case ip.IsUnspecified():
		host = r.Host
	}
	return net.JoinHostPort(host, port), nil
}

// scrape returns what a replica shows at /metrics.
func scrape(ctx context.Context, address string) (map[string]*dto.MetricFamily, error) {
	ctx, cancel := context.WithTimeout(ctx, metrics.AnswerTimeout+time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/metrics", nil)
	if err != nil {
		return nil, err
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}} // through no proxy
	resp, err := client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("no metrics: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("no metrics at %s: %s", address, resp.Status)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	return parser.TextToMetricFamilies(io.LimitReader(resp.Body, 16<<20))
}

type leaseVerdict struct{ level, text string }

// leaseSlack is for how long a replica may stand still, and how long a heartbeat to the agent
// and a renewal of the session may take, before its leases end.
type leaseSlack struct{ stall, heartbeat, renewal time.Duration }

func slackOf(c consul.Config) leaseSlack {
	c = c.WithDefaults()
	return leaseSlack{
		stall:     c.Slack(),
		heartbeat: lock.Timing{TTL: c.CheckTTL, Heartbeat: c.Heartbeat, Margin: c.Margin}.Slack(),
		renewal:   lock.Timing{TTL: c.SessionTTL, Heartbeat: c.Renew, Margin: c.Margin}.Slack(),
	}
}

// judgeLeases compares the worst that a replica has measured with what its leases allow.
// A histogram tells the worst only as the bound of the bucket that it is in. With liveness ttl
// there are no heartbeats to the agent. Those to Postgres do not count: while Postgres is slow,
// Consul gets the signs of life in its place.
func judgeLeases(families map[string]*dto.MetricFamily, slack leaseSlack) leaseVerdict {
	stall, some := worst(families["onejob_timer_lateness_seconds"], "")
	heartbeat, beats := worst(families["onejob_heartbeat_duration_seconds"], "agent")
	renewal, renews := worst(families["onejob_heartbeat_duration_seconds"], "consul")
	if !some || !beats && !renews {
		return leaseVerdict{"?", "it has measured nothing yet"}
	}
	lost, measured := 0, "since its start"
	if f := families["onejob_sessions_lost_total"]; f != nil {
		lost = int(f.GetMetric()[0].GetCounter().GetValue())
	}
	if f := families["process_start_time_seconds"]; f != nil {
		started := time.UnixMilli(int64(f.GetMetric()[0].GetGauge().GetValue() * 1000))
		measured = fmt.Sprintf("in %v", time.Since(started).Round(time.Second))
	}
	text := fmt.Sprintf("%s it stood still for less than %v", measured, stall)
	times := slack.stall.Seconds() / stall.Seconds() // how many times as long as the worst the leases last
	if beats {
		text += fmt.Sprintf(", its heartbeats took less than %v", heartbeat)
		times = min(times, slack.heartbeat.Seconds()/heartbeat.Seconds())
	}
	if renews {
		text += fmt.Sprintf(", its renewals took less than %v", renewal)
		times = min(times, slack.renewal.Seconds()/renewal.Seconds())
	}
	text += ", and it lost " + plaintext.Plural(lost, "session")
	switch {
	case times <= 1:
		return leaseVerdict{"FAIL", text + ": leases are too short for this machine; raise consul.check_ttl and consul.session_ttl, or give it processors and memory"}
	case times <= 3:
		return leaseVerdict{"warn", text + fmt.Sprintf(": leases last only %.1f times as long", times)}
	}
	return leaseVerdict{"ok", text + fmt.Sprintf(": leases last at least %.0f times as long", math.Floor(times))}
}

// worst returns the upper bound of the highest bucket in use, of the series with this
// target if one is given.
func worst(f *dto.MetricFamily, target string) (bound time.Duration, some bool) {
	for _, m := range f.GetMetric() {
		if target != "" && (len(m.GetLabel()) == 0 || m.GetLabel()[0].GetValue() != target) {
			continue
		}
		h := m.GetHistogram()
		if h.GetSampleCount() == 0 {
			continue
		}
		some = true
		for _, b := range h.GetBucket() {
			seconds := min(b.GetUpperBound(), time.Hour.Seconds())
			bound = max(bound, time.Duration(seconds*float64(time.Second)))
			if b.GetCumulativeCount() == h.GetSampleCount() {
				break
			}
		}
	}
	return bound, some
}
