package main

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	v1 "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"onejob/internal/testenv"
)

// A collector keeps the spans that are sent to it.
type spans struct {
	mu  sync.Mutex
	all []*v1.Span
}

func (s *spans) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	var request collector.ExportTraceServiceRequest
	if err != nil || r.URL.Path != "/v1/traces" || proto.Unmarshal(body, &request) != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, resource := range request.ResourceSpans {
		for _, scope := range resource.ScopeSpans {
			s.all = append(s.all, scope.Spans...)
		}
	}
}

// find returns the spans with a name.
func (s *spans) find(name string) (list []*v1.Span) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, span := range s.all {
		if span.Name == name {
			list = append(list, span)
		}
	}
	return list
}

// A task that was enqueued in a trace goes on in it: the replica's spans, the command's
// environment, the request's header and the lines of the log have it.
func TestTraces(t *testing.T) {
	t.Parallel()
	const (
		traceID = "4bf92f3577b34da6a3ce929d0e0e4736"
		parent  = "00f067aa0ba902b7"
		row     = "00-" + traceID + "-" + parent + "-01"
	)
	sent := &spans{}
	otlp := httptest.NewServer(sent)
	defer otlp.Close()
	headers := make(chan string, 10)
	receiver := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { headers <- r.Header.Get("Traceparent") }))
	defer receiver.Close()

	db := testenv.Postgres(t)
	w := newWatcher(t, db.DSN) // for its binary and environment
	w.env = append(w.env, "OTEL_EXPORTER_OTLP_ENDPOINT="+otlp.URL, "OTEL_BSP_SCHEDULE_DELAY=100", "ONEJOB_LOG_FORMAT=json")
	w.must("migrate", "up")
	out := filepath.Join(t.TempDir(), "out")
	config := filepath.Join(t.TempDir(), "onejob.yaml")
	if err := os.WriteFile(config, fmt.Appendf(nil, `
kinds:
  exec: {commands: {trace: {path: /bin/sh, args: [-c, 'echo "$ONEJOB_TASK_ID $TRACEPARENT" >> %s; exit $((ONEJOB_TASK_ID == 2))']}}}
  http: {allow: [%q]}
`, out, receiver.URL), 0o600); err != nil {
		t.Fatal(err)
	}
	pool := db.Pool(t)
	for _, sql := range []string{
		`INSERT INTO onejob.tasks (kind, payload, traceparent) VALUES ('exec', '{"command": "trace"}', '` + row + `')`,
		`INSERT INTO onejob.tasks (kind, payload, max_attempts) VALUES ('exec', '{"command": "trace"}', 1)`,
		`INSERT INTO onejob.tasks (kind, payload, traceparent) VALUES ('http', '{"url": "` + receiver.URL + `"}', '` + row + `')`,
	} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	for _, bad := range []string{"", "x", "00-" + traceID + "-" + parent, "ff" + row[2:], "00-" + strings.Repeat("0", 32) + "-" + parent + "-01", strings.ToUpper(row)} {
		if _, err := pool.Exec(t.Context(), `INSERT INTO onejob.tasks (kind, traceparent) VALUES ('noop', $1)`, bad); err == nil || !strings.Contains(err.Error(), "traceparent_is_as_w3c_trace_context_says") {
			t.Errorf("traceparent %q: %v", bad, err)
		}
	}
	serve := w.command("serve", "--config", config)
	log, err := serve.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := serve.Start(); err != nil {
		t.Fatal(err)
	}
	lines := make(chan string, 1000)
	go func() {
		defer close(lines)
		for scan := bufio.NewScanner(log); scan.Scan(); {
			lines <- scan.Text()
		}
	}()
	t.Cleanup(func() { _ = serve.Process.Kill() })
	testenv.Eventually(t, 2*time.Minute, "all spans are sent", func() bool {
		return len(sent.find("task exec")) == 2 && len(sent.find("task http")) == 1 && len(sent.find("complete")) == 3
	})
	_ = serve.Process.Signal(syscall.SIGTERM)
	said := ""
	for line := range lines {
		if strings.Contains(line, `"task_id":1,`) && strings.Contains(line, "task_succeeded") {
			said = line
		}
	}
	if err := serve.Wait(); err != nil {
		t.Error(err)
	}
	if !strings.Contains(said, `"trace_id":"`+traceID+`"`) {
		t.Errorf("the log says %s", said)
	}

	id := func(b []byte) string { return hex.EncodeToString(b) }
	text := func(s *v1.Span, key string) string {
		for _, a := range s.Attributes {
			if a.Key == key {
				if n := a.Value.GetIntValue(); n != 0 {
					return fmt.Sprint(n)
				}
				return a.Value.GetStringValue()
			}
		}
		return ""
	}
	runs := map[string]string{} // by task, the traceparent of what ran
	for _, name := range []string{"task exec", "task http"} {
		for _, whole := range sent.find(name) {
			task := text(whole, "onejob.task.id")
			traced := task != "2"
			if traced != (id(whole.TraceId) == traceID) || traced != (id(whole.ParentSpanId) == parent) {
				t.Errorf("the attempt at task %s is in trace %s, below %q", task, id(whole.TraceId), id(whole.ParentSpanId))
			}
			if outcome := text(whole, "onejob.outcome"); outcome != map[bool]string{true: "succeeded", false: "failed"}[traced] {
				t.Errorf("the outcome of task %s is %q", task, outcome)
			}
			if failed := whole.Status.GetCode() == v1.Status_STATUS_CODE_ERROR; failed == traced {
				t.Errorf("the status of task %s is %v", task, whole.Status)
			}
			for _, step := range []string{"wait", "lock", "run", "complete"} {
				found := 0
				for _, s := range sent.find(step) {
					if id(s.ParentSpanId) == id(whole.SpanId) && id(s.TraceId) == id(whole.TraceId) {
						found++
						if s.EndTimeUnixNano < s.StartTimeUnixNano || step != "wait" && (s.StartTimeUnixNano < whole.StartTimeUnixNano || s.EndTimeUnixNano > whole.EndTimeUnixNano) {
							t.Errorf("task %s: %s does not lie within the attempt", task, step)
						}
						if step == "run" {
							runs[task] = "00-" + id(s.TraceId) + "-" + id(s.SpanId) + "-01"
						}
					}
				}
				if found != 1 {
					t.Errorf("task %s has %d spans %s", task, found, step)
				}
			}
		}
	}
	links := 0
	for _, claim := range sent.find("claim") {
		for _, l := range claim.Links {
			if id(l.TraceId) == traceID && id(l.SpanId) == parent {
				links++
			}
		}
	}
	if links != 2 {
		t.Errorf("claims have %d links to the trace, want one for each of its tasks", links)
	}
	written, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range []string{"1", "2"} {
		if line := task + " " + runs[task] + "\n"; !strings.Contains(string(written), line) {
			t.Errorf("the commands had\n%swant %s", written, line)
		}
	}
	if got := <-headers; got != runs["3"] {
		t.Errorf("the request had %q, want %q", got, runs["3"])
	}
}

// Without a collector nothing is traced, and a trace is handed on as the row has it. What the
// variables ask for and is not there is refused at the start.
func TestUntraced(t *testing.T) {
	t.Parallel()
	const row = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"
	db := testenv.Postgres(t)
	w := newWatcher(t, db.DSN)
	w.must("migrate", "up")
	for variables, want := range map[string]string{
		"OTEL_TRACES_EXPORTER=zipkin":                                "OTEL_TRACES_EXPORTER: there is no exporter \"zipkin\" here; set otlp or none",
		"OTEL_TRACES_EXPORTER=otlp OTEL_EXPORTER_OTLP_PROTOCOL=grpc": "OTEL_EXPORTER_OTLP_PROTOCOL: \"grpc\" is not supported; set http/protobuf",
	} {
		c := w.command("serve")
		c.Env = append(c.Env, strings.Fields(variables)...)
		if text, err := c.CombinedOutput(); err == nil || c.ProcessState.ExitCode() != 2 || !strings.Contains(string(text), want) {
			t.Errorf("%s: %v, %s", variables, err, text)
		}
	}
	out := filepath.Join(t.TempDir(), "out")
	config := filepath.Join(t.TempDir(), "onejob.yaml")
	if err := os.WriteFile(config, fmt.Appendf(nil, `kinds: {exec: {commands: {trace: {path: /bin/sh, args: [-c, 'echo "$TRACEPARENT" > %s']}}}}`, out), 0o600); err != nil {
		t.Fatal(err)
	}
	pool := db.Pool(t)
	if _, err := pool.Exec(t.Context(), `INSERT INTO onejob.tasks (kind, payload, traceparent) VALUES ('exec', '{"command": "trace"}', $1)`, row); err != nil {
		t.Fatal(err)
	}
	serve := w.command("serve", "--config", config)
	serve.Env = append(serve.Env, "OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:1", "OTEL_SDK_DISABLED=true")
	if err := serve.Start(); err != nil {
		t.Fatal(err)
	}
	defer func(c *exec.Cmd) { _ = c.Process.Signal(syscall.SIGTERM); _ = c.Wait() }(serve)
	testenv.Eventually(t, 2*time.Minute, "the command has run", func() bool {
		text, _ := os.ReadFile(out)
		return string(text) == row+"\n"
	})
}
