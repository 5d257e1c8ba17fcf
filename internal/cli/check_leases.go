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
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

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
	if len(replicas) == 0 {
		return errors.New("no replica is running")
	}
	slack, failed := cfg.consulConfig().Slack(), 0
	printf(out, "By this configuration a replica loses its leases when it stands still, or goes unheard, for %v.\n", slack)
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
		return fmt.Errorf("%s of %d: leases are too short, or unknown", plural(failed, "replica"), len(replicas))
	}
	return nil
}

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
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
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

// judgeLeases compares the worst that a replica has measured with what its leases allow.
// A histogram tells the worst only as the bound of the bucket that it is in.
func judgeLeases(families map[string]*dto.MetricFamily, slack time.Duration) leaseVerdict {
	stall, some := worst(families["onejob_timer_lateness_seconds"], "")
	if !some {
		return leaseVerdict{"?", "it has measured nothing yet"}
	}
	beat, _ := worst(families["onejob_heartbeat_duration_seconds"], "agent")
	lost, measured := 0, "since its start"
	if f := families["onejob_sessions_lost_total"]; f != nil {
		lost = int(f.GetMetric()[0].GetCounter().GetValue())
	}
	if f := families["process_start_time_seconds"]; f != nil {
		started := time.UnixMilli(int64(f.GetMetric()[0].GetGauge().GetValue() * 1000))
		measured = fmt.Sprintf("in %v", time.Since(started).Round(time.Second))
	}
	text := fmt.Sprintf("%s it stood still for less than %v, its heartbeats took less than %v, and it lost %s", measured, stall, beat, plural(lost, "session"))
	longest := max(stall, beat)
	switch {
	case longest >= slack:
		return leaseVerdict{"FAIL", text + ": leases are too short for this machine; raise consul.check_ttl and consul.session_ttl, or give it processors and memory"}
	case 3*longest >= slack:
		return leaseVerdict{"warn", text + fmt.Sprintf(": leases last only %.1f times as long", slack.Seconds()/longest.Seconds())}
	}
	return leaseVerdict{"ok", text + fmt.Sprintf(": leases last at least %.0f times as long", math.Floor(slack.Seconds()/longest.Seconds()))}
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
