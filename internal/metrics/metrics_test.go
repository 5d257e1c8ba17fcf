package metrics_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"onejob/internal/metrics"
	"onejob/internal/retry"
	"onejob/lock"
	"onejob/lock/consul"
	"onejob/store"
	"onejob/worker"
)

var update = flag.Bool("update", false, "write docs/reference/metrics.md anew")

type backlog []store.Backlog

func (b backlog) Backlog(context.Context) ([]store.Backlog, error) { return b, nil }

// limits is a backend with one limit. It is here because a real one is of no interest to
// what is shown of it.
type limits struct{ lock.Semaphores }

func (limits) List(context.Context) ([]string, error) { return []string{"api"}, nil }
func (limits) Inspect(context.Context, string) (lock.Semaphore, error) {
	return lock.Semaphore{Name: "api", Slots: 3, Holders: make([]lock.SlotHolder, 2)}, nil
}

// everything returns metrics of a replica that has done a bit of everything.
func everything(t *testing.T, leading bool) *metrics.Replica {
	t.Helper()
	m := metrics.New("v1")
	lead := func() bool { return leading }
	pool, err := pgxpool.New(t.Context(), "host=127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	m.Watch(
		metrics.Process{Status: func() worker.Status { return worker.Status{Running: 2, Concurrency: 32, Payload: 10, Leading: leading} },
			LeaseLeft: func() time.Duration { return 8 * time.Second }, Pool: pool.Stat, LinesDropped: func() uint64 { return 3 }},
		&metrics.Backlog{Leading: lead, Store: backlog{{Queue: "default", Kind: "exec", Due: 7, Age: time.Minute}}},
		&metrics.Limits{Leading: lead, Limits: limits{}})
	for what := worker.MeasureClaim; what <= worker.MeasureOverlap; what++ {
		m.Worker(worker.Measurement{What: what, Kind: "exec", Cause: "failed", Count: 3, Took: time.Second})
	}
	m.Worker(worker.Measurement{What: worker.MeasureOccurrence, Count: 5})
	for what := consul.MeasureHeartbeat; what <= consul.MeasureLost; what++ {
		m.Consul(what, 4, time.Millisecond)
	}
	m.Store(5, time.Millisecond)
	return m
}

func gather(t *testing.T, m *metrics.Replica) map[string]*dto.MetricFamily {
	t.Helper()
	list, err := m.Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	families := map[string]*dto.MetricFamily{}
	for _, f := range list {
		families[f.GetName()] = f
	}
	return families
}

// Every measurement arrives in a metric of its own.
func TestEveryMeasurementIsShown(t *testing.T) {
	m := everything(t, true)
	for _, want := range []string{
		`onejob_claim_tasks_sum 3`, `onejob_task_pickup_seconds_count{kind="exec"} 1`, `onejob_task_run_seconds_sum{kind="exec"} 1`,
		`onejob_attempts_total{kind="exec",outcome="failed"} 1`, `onejob_retries_total{kind="exec"} 1`, `onejob_requeues_total{cause="failed"} 1`,
		`onejob_completions_refused_total{kind="exec"} 1`, `onejob_lock_conflicts_total 1`, `onejob_takeovers_total{kind="exec"} 3`,
		`onejob_takeover_silence_seconds_count 1`, `onejob_quarantined_total{kind="exec"} 1`, `onejob_heartbeat_duration_seconds_count{target="postgres"} 1`,
		`onejob_timer_lateness_seconds_count 1`, `onejob_occurrences_total{result="enqueued"} 5`, `onejob_overlaps_found_total 3`,
		`onejob_heartbeat_duration_seconds_count{target="agent"} 1`, `onejob_heartbeat_duration_seconds_count{target="consul"} 1`,
		`onejob_batch_tasks_sum{operation="lock"} 4`, `onejob_batch_tasks_sum{operation="release"} 4`, `onejob_batch_tasks_sum{operation="complete"} 5`,
		`onejob_sessions_lost_total 1`, `onejob_running_attempts 2`, `onejob_concurrency 32`, `onejob_payload_bytes 10`, `onejob_leader 1`,
		`onejob_session_live 1`, `onejob_lease_remaining_seconds 8`, `onejob_tasks_due{kind="exec",queue="default"} 7`,
		`onejob_tasks_due_age_seconds{kind="exec",queue="default"} 60`, `onejob_limit_slots{limit="api"} 3`, `onejob_limit_slots_held{limit="api"} 2`,
		`onejob_scrape_success{source="backlog"} 1`, `onejob_scrape_success{source="limits"} 1`, `onejob_build_info{goversion=`,
	} {
		if text := scrape(t, m); !strings.Contains(text, "\n"+want) {
			t.Errorf("there is no %s", want)
		}
	}
}

// What all replicas share is shown by one of them.
// Rows of dead replicas have the kinds that somebody has written: many, or of bytes that are not
// UTF-8. The kinds that the replica serves keep their names.
func TestKindsOfRowsAreBounded(t *testing.T) {
	m := metrics.New("v1")
	for i := range 5000 {
		m.Worker(worker.Measurement{What: worker.MeasureTakeover, Kind: fmt.Sprintf("planted %d", i), Count: 1})
		m.Worker(worker.Measurement{What: worker.MeasureQuarantine, Kind: fmt.Sprintf("planted \xff %d", i)})
	}
	m.Worker(worker.Measurement{What: worker.MeasureEnd, Kind: "served", Cause: "succeeded"})
	m.Worker(worker.Measurement{What: worker.MeasureTakeover, Kind: "served", Count: 1})
	families := gather(t, m)
	total, kinds := 0.0, map[string]float64{}
	for _, metric := range families["onejob_takeovers_total"].GetMetric() {
		kinds[metric.GetLabel()[0].GetValue()] = metric.GetCounter().GetValue()
		total += metric.GetCounter().GetValue()
	}
	if len(kinds) > 202 || total != 5001 || kinds["served"] != 1 || kinds["planted 0"] != 1 || kinds["other"] < 4000 {
		t.Errorf("%d kinds have %v takeovers, %v of them others: %v", len(kinds), total, kinds["other"], kinds)
	}
	if n := len(families["onejob_quarantined_total"].GetMetric()); n > 202 {
		t.Errorf("%d kinds are quarantined", n)
	}
}

func TestOnlyTheLeaderShowsWhatIsShared(t *testing.T) {
	text := scrape(t, everything(t, false))
	for _, name := range []string{"onejob_tasks_due", "onejob_limit_slots", "onejob_scrape_success"} {
		if strings.Contains(text, name) {
			t.Errorf("a replica that does not lead shows %s", name)
		}
	}
}

// A source with a fault does not hide what the others show.
func TestASourceWithAFaultHidesNothingElse(t *testing.T) {
	m := metrics.New("v1")
	twice := store.Backlog{Queue: "default", Kind: "exec", Due: 7}
	m.Watch(&metrics.Backlog{Leading: func() bool { return true }, Store: backlog{twice, twice}})
	m.Worker(worker.Measurement{What: worker.MeasureRetry, Kind: "exec"})
	text := scrape(t, m)
	for _, want := range []string{`onejob_retries_total{kind="exec"} 1`, `onejob_tasks_due{kind="exec",queue="default"} 7`} {
		if !strings.Contains(text, "\n"+want) {
			t.Errorf("there is no %s", want)
		}
	}
}

// limitsOf is a backend in which a look at a limit takes some time, and gives an error for some.
type limitsOf struct {
	lock.Semaphores
	names []string
	takes time.Duration
	errs  map[string]error
}

func (l limitsOf) List(context.Context) ([]string, error) { return l.names, nil }

func (l limitsOf) Inspect(ctx context.Context, name string) (lock.Semaphore, error) {
	if retry.Pause(ctx, l.takes); ctx.Err() != nil {
		return lock.Semaphore{Name: name}, ctx.Err()
	}
	return lock.Semaphore{Name: name, Slots: 3}, l.errs[name]
}

// shownOf returns what is shown of a backend's limits: how many, and whether it has answered.
func shownOf(t *testing.T, l lock.Semaphores) (limits int, success float64) {
	t.Helper()
	m := metrics.New("v1")
	m.Watch(&metrics.Limits{Leading: func() bool { return true }, Limits: l})
	families := gather(t, m)
	return len(families["onejob_limit_slots"].GetMetric()), families["onejob_scrape_success"].GetMetric()[0].GetGauge().GetValue()
}

// One limit that another program writes in a format of its own is no backend that does not
// answer, for which an alert fires.
func TestForeignLimitsAreLeftOut(t *testing.T) {
	l := limitsOf{names: []string{"api", "foreign", "gone"}, errs: map[string]error{
		"foreign": fmt.Errorf("limit foreign: %w", lock.ErrForeign),
		"gone":    fmt.Errorf("limit gone: %w", lock.ErrNoSemaphore),
	}}
	if limits, success := shownOf(t, l); limits != 1 || success != 1 {
		t.Errorf("%d limits are shown, success %v", limits, success)
	}
	l.errs["gone"] = errors.New("no answer")
	if limits, success := shownOf(t, l); limits != 1 || success != 0 {
		t.Errorf("without an answer %d limits are shown, success %v", limits, success)
	}
}

// unnamed is RabbitMQ of which no limit is named in the configuration.
type unnamed struct{ lock.Semaphores }

func (unnamed) List(context.Context) ([]string, error) { return nil, lock.ErrCannotList }

func TestLimitsThatCannotBeListed(t *testing.T) {
	if limits, success := shownOf(t, unnamed{}); limits != 0 || success != 1 {
		t.Errorf("%d limits are shown, success %v", limits, success)
	}
}

// In RabbitMQ a look at a limit takes more than a second if a holder does not answer, and eight
// limits are looked at at a time.
func TestLimitsWithSilentHolders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := limitsOf{takes: 1300 * time.Millisecond}
		for i := range 24 {
			l.names = append(l.names, fmt.Sprint("limit", i))
		}
		if limits, success := shownOf(t, l); limits != len(l.names) || success != 1 {
			t.Errorf("%d limits are shown, success %v", limits, success)
		}
		l.takes = time.Hour
		began := time.Now()
		if _, success := shownOf(t, l); success != 0 || time.Since(began) >= metrics.AnswerTimeout {
			t.Errorf("a backend that does not answer: success %v after %v", success, time.Since(began))
		}
	})
}

func scrape(t *testing.T, m *metrics.Replica) string {
	t.Helper()
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if w.Code != http.StatusOK {
		t.Fatalf("status %d: %s", w.Code, w.Body)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	if _, err := parser.TextToMetricFamilies(bytes.NewReader(w.Body.Bytes())); err != nil {
		t.Fatalf("Prometheus' own parser refuses the answer: %v", err)
	}
	return w.Body.String()
}

func TestNamesFollowTheConventions(t *testing.T) {
	problems, err := testutil.GatherAndLint(everything(t, true).Gatherer())
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

// docs/reference/metrics.md has every metric.
func TestReference(t *testing.T) {
	const begin, end = "<!-- begin: go test ./internal/metrics -run TestReference -update -->\n", "<!-- end -->"
	families := gather(t, everything(t, true))
	var names []string
	for name := range families {
		if strings.HasPrefix(name, "onejob_") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	var table strings.Builder
	fmt.Fprintf(&table, "| metric | type | labels | meaning |\n|---|---|---|---|\n")
	for _, name := range names {
		f := families[name]
		var labels []string
		for _, l := range f.GetMetric()[0].GetLabel() {
			labels = append(labels, "`"+l.GetName()+"`")
		}
		fmt.Fprintf(&table, "| `%s` | %s | %s | %s |\n", name, strings.ToLower(f.GetType().String()), strings.Join(labels, ", "), f.GetHelp())
	}
	path := filepath.Join("..", "..", "docs", "reference", "metrics.md")
	page, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(page), begin)
	have, after, closed := strings.Cut(rest, end)
	if !found || !closed {
		t.Fatalf("%s has no place for the table", path)
	}
	switch {
	case *update:
		if err := os.WriteFile(path, []byte(before+begin+"\n"+table.String()+"\n"+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
	case strings.TrimSpace(have) != strings.TrimSpace(table.String()):
		t.Errorf("%s differs from the code; write it anew with: go test ./internal/metrics -run TestReference -update", path)
	}
}

// Alerts and the dashboard name metrics that there are, and every alert leads to a section
// of the runbook.
func TestAlertsAndDashboardNameMetrics(t *testing.T) {
	families := gather(t, everything(t, true))
	root := filepath.Join("..", "..")
	for _, file := range []string{"deploy/prometheus/alerts.yaml", "deploy/prometheus/alerts_test.yaml", "deploy/grafana/onejob.json"} {
		text, err := os.ReadFile(filepath.Join(root, file))
		if err != nil {
			t.Fatal(err)
		}
		names := regexp.MustCompile(`(?:onejob|process)_[a-z_]+`).FindAllString(string(text), -1)
		if len(names) < 10 {
			t.Errorf("%s names %d metrics", file, len(names))
		}
		for _, name := range names {
			base := name
			for _, suffix := range []string{"_bucket", "_count", "_sum"} {
				if trimmed := strings.TrimSuffix(name, suffix); families[trimmed] != nil {
					base = trimmed
				}
			}
			if families[base] == nil {
				t.Errorf("%s: there is no metric %s", file, name)
			}
		}
		for _, m := range regexp.MustCompile(`runbook: (\S+)#([a-z-]+)`).FindAllStringSubmatch(string(text), -1) {
			page, err := os.ReadFile(filepath.Join(root, m[1]))
			if err != nil {
				t.Fatal(err)
			}
			if title := strings.ReplaceAll(m[2], "-", "[ -]"); !regexp.MustCompile(`(?mi)^## ` + title + `$`).Match(page) {
				t.Errorf("%s: %s has no section %s", file, m[1], m[2])
			}
		}
	}
}
