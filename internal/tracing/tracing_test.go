package tracing_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/zap/zaptest"

	"onejob/boottime"
	"onejob/internal/tracing"
	"onejob/tasks"
)

// Whichever steps an attempt reaches, each has one span that ends, and the attempt's tells
// what became of it.
func TestStepsOfAnAttempt(t *testing.T) {
	for name, c := range map[string]struct {
		locked, ran error
		begins      bool // the lock is given
		runs        bool // the handler begins
		outcome     tasks.Outcome
		want        string
	}{
		"succeeded":         {nil, nil, true, true, tasks.Succeeded, "wait lock run complete succeeded Unset"},
		"failed":            {nil, errors.New("no"), true, true, tasks.Failed, "wait lock run! complete failed Error"},
		"not locked":        {errors.New("held"), nil, false, false, "", "wait lock! requeued Unset"},
		"not begun":         {nil, errors.New("no such kind"), true, false, "", "wait lock requeued Unset"},
		"put back at once":  {nil, nil, false, false, "", "wait lock requeued Unset"},
		"its lease is lost": {nil, errors.New("lost"), true, true, tasks.LeaseLost, "wait lock run! complete lease_lost Error"},
	} {
		t.Run(name, func(t *testing.T) {
			spans := tracetest.NewSpanRecorder()
			tracer := tracing.With(sdk.NewTracerProvider(sdk.WithSpanProcessor(spans)))
			now := time.Now()
			task := &tasks.Task{ID: 9007199254740993, Kind: "k", CreatedAt: now.Add(-time.Minute), RunAt: now.Add(-10 * time.Second), StartedAt: now, HeardAt: boottime.Now()}
			a := tracer.Attempt(task)
			if name != "put back at once" {
				a.Locked(c.locked)
			}
			if c.begins {
				if c.runs {
					at := &tasks.Attempt{Task: *task}
					ctx := a.Running(context.Background(), at)
					if span := trace.SpanContextFromContext(ctx).SpanID().String(); !strings.Contains(at.Traceparent, span) || at.Traceparent == task.Traceparent {
						t.Errorf("the handler has %q and the span %s, the task %q", at.Traceparent, span, task.Traceparent)
					}
				}
				a.Ran(c.ran)
			}
			a.Ended(c.outcome, "why")
			if began, ended := len(spans.Started()), len(spans.Ended()); began != ended {
				t.Errorf("%d spans began, and %d ended", began, ended)
			}
			all := spans.Ended()
			slices.SortStableFunc(all, func(a, b sdk.ReadOnlySpan) int { return a.StartTime().Compare(b.StartTime()) })
			var got []string
			whole := ""
			for _, s := range all {
				if s.Name() == "task k" {
					for _, attribute := range s.Attributes() {
						if attribute.Key == "onejob.outcome" {
							whole = attribute.Value.AsString() + " " + s.Status().Code.String()
						}
					}
					continue
				}
				step := s.Name()
				if s.Status().Code == codes.Error {
					step += "!"
				}
				got = append(got, step)
				if took := s.EndTime().Sub(s.StartTime()); s.Name() == "wait" && (took < 10*time.Second || took > 11*time.Second) {
					t.Errorf("the task waited for %v, want 10s", took)
				}
			}
			if text := strings.Join(append(got, whole), " "); text != c.want {
				t.Errorf("the spans are %s, want %s", text, c.want)
			}
		})
	}
}

// An error may have bytes that are not UTF-8, as the output of a command has them. The collector
// gets the spans of that attempt, and those of others that are sent with them.
func TestErrorsThatAreNotUTF8(t *testing.T) {
	received := make(chan string, 10)
	collector := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		received <- string(body)
	}))
	defer collector.Close()
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
	tracer, stop, err := tracing.New(t.Context(), "one", "test", zaptest.NewLogger(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, kind := range []string{"bytes", "bystander"} {
		a := tracer.Attempt(&tasks.Task{ID: 1, Kind: kind, HeardAt: boottime.Now()})
		a.Locked(errors.New("locked \xff"))
		a.Running(t.Context(), &tasks.Attempt{})
		a.Ran(errors.New("ran \xff"))
		a.Ended(tasks.Failed, "ended \xff")
	}
	stop() // sends what is left
	select {
	case body := <-received:
		for _, want := range []string{"task bytes", "task bystander", `locked \xff`, `ran \xff`, `ended \xff`} {
			if !strings.Contains(body, want) {
				t.Errorf("the collector has no %q", want)
			}
		}
	default:
		t.Error("the collector got no spans")
	}
}

// A collector on this machine listens for plain HTTP. What is set holds.
func TestEndpoint(t *testing.T) {
	for variable, want := range map[string]string{
		"": "http://localhost:4318/v1/traces",
		"OTEL_EXPORTER_OTLP_ENDPOINT=https://x:1":        "https://x:1/v1/traces",
		"OTEL_EXPORTER_OTLP_ENDPOINT=http://x:1":         "http://x:1/v1/traces",
		"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=https://x:1": "https://x:1/",
	} {
		t.Run(variable, func(t *testing.T) {
			t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "")
			t.Setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
			if name, value, ok := strings.Cut(variable, "="); ok {
				t.Setenv(name, value)
			}
			got := ""
			proxy := otlptracehttp.WithProxy(func(r *http.Request) (*url.URL, error) {
				got = r.URL.String()
				return nil, errors.New("do not connect")
			})
			if err := otlptracehttp.NewClient(append(tracing.Options(os.Getenv), proxy)...).UploadTraces(t.Context(), nil); err == nil || got != want {
				t.Errorf("it would send to %q, want %q: %v", got, want, err)
			}
		})
	}
}

func TestWanted(t *testing.T) {
	for variables, want := range map[string]bool{
		"":                                      false,
		"OTEL_EXPORTER_OTLP_ENDPOINT=http://x":  true,
		"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=x":  true,
		"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT=x": false,
		"OTEL_TRACES_EXPORTER=otlp":             true,
		"OTEL_TRACES_EXPORTER=none OTEL_EXPORTER_OTLP_ENDPOINT=x":                     false,
		"OTEL_SDK_DISABLED=true OTEL_EXPORTER_OTLP_ENDPOINT=x":                        false,
		"OTEL_SDK_DISABLED=True OTEL_EXPORTER_OTLP_ENDPOINT=x":                        false,
		"OTEL_EXPORTER_OTLP_ENDPOINT=x OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf":     true,
		"OTEL_SERVICE_NAME=x OTEL_RESOURCE_ATTRIBUTES=a=b OTEL_TRACES_SAMPLER=always": false,
	} {
		got, err := tracing.Wanted(func(name string) string {
			for v := range strings.FieldsSeq(variables) {
				if value, ok := strings.CutPrefix(v, name+"="); ok {
					return value
				}
			}
			return ""
		})
		if got != want || err != nil {
			t.Errorf("%q: %v, %v", variables, got, err)
		}
	}
}
