// Package tracing sends what a replica does with tasks as spans, by OpenTelemetry.
//
// A claim is a span with a link to each trace that it met. An attempt is a span, in the trace
// of the row or in one of its own, with a span for each of its steps: the time that the task
// was due before it was claimed (wait), the lock, the handler (run), and the outcome's way to
// Postgres (complete).
package tracing

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/zap"

	"onejob/boottime"
	"onejob/tasks"
	"onejob/worker"
)

// flushTimeout is how long a replica that ends tries to send the spans that are left.
const flushTimeout = 5 * time.Second

// Wanted reports whether the OTEL_ variables ask for traces. It returns an error if they
// ask for what is not there.
//
// Sources: OpenTelemetry's "Environment Variable Specification" and "OpenTelemetry Protocol
// Exporter". The exporter otlp is their default; here it needs an endpoint or has to be named,
// so that a replica without a collector sends nothing.
func Wanted(get func(string) string) (bool, error) {
	if strings.EqualFold(get("OTEL_SDK_DISABLED"), "true") {
		return false, nil
	}
	exporter := get("OTEL_TRACES_EXPORTER")
	_, endpoint := first(get, endpoints...)
	switch {
	case exporter == "none", exporter == "" && endpoint == "":
		return false, nil
	case exporter != "" && exporter != "otlp":
		return false, fmt.Errorf("OTEL_TRACES_EXPORTER: there is no exporter %q here; set otlp or none", exporter)
	}
	if name, protocol := first(get, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"); protocol != "" && protocol != "http/protobuf" {
		return false, fmt.Errorf("%s: %q is not supported; set http/protobuf, and the endpoint's port for it (4318 by default)", name, protocol)
	}
	return true, nil
}

var endpoints = []string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"}

// first returns the first variable of several that is set.
func first(get func(string) string, names ...string) (name, value string) {
	for _, name = range names {
		if value = get(name); value != "" {
			return name, value
		}
	}
	return "", ""
}

// options returns what otlptracehttp does not take from the OTEL_ variables: the default
// endpoint is http://localhost:4318, where otlptracehttp has https.
func options(get func(string) string) []otlptracehttp.Option {
	if _, endpoint := first(get, endpoints...); endpoint != "" {
		return nil
	}
	return []otlptracehttp.Option{otlptracehttp.WithInsecure()}
}

// New returns a tracer for worker.Config that sends spans where the OTEL_ variables of the
// environment say; nil if they ask for none. stop sends the spans that are left.
func New(ctx context.Context, replica, version string, log *zap.Logger) (t worker.Tracer, stop func(), err error) {
	if wanted, err := Wanted(os.Getenv); err != nil || !wanted {
		return nil, func() {}, err
	}
	exporter, err := otlptracehttp.New(ctx, options(os.Getenv)...)
	if err != nil {
		return nil, nil, fmt.Errorf("OTEL_EXPORTER_OTLP_ENDPOINT: %w", err)
	}
	var told atomic.Int64
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) {
		now := time.Now().Unix()
		if last := told.Load(); now-last >= 60 && told.CompareAndSwap(last, now) {
			log.Warn("traces_not_sent", zap.Error(err))
		}
	}))
	about, err := resource.New(ctx, resource.WithTelemetrySDK(), resource.WithHost(),
		resource.WithAttributes(attribute.String("service.name", "onejob"), attribute.String("service.version", version), attribute.String("service.instance.id", replica)),
		resource.WithFromEnv())
	if err != nil { // what was understood is there; a typing error in an attribute keeps no replica from its work
		otel.Handle(fmt.Errorf("OTEL_RESOURCE_ATTRIBUTES: %w", err))
	}
	provider := sdk.NewTracerProvider(sdk.WithBatcher(exporter), sdk.WithResource(about))
	return With(provider), func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTimeout)
		defer cancel()
		if err := provider.Shutdown(ctx); err != nil {
			log.Warn("traces_not_sent", zap.Error(err))
		}
	}, nil
}

// With returns a tracer whose spans go to a provider.
func With(provider trace.TracerProvider) worker.Tracer {
	return tracer{provider.Tracer("onejob")}
}

type tracer struct{ trace.Tracer }

// Claimed makes the span of a claim.
func (t tracer) Claimed(list []*tasks.Task, took time.Duration) {
	var links []trace.Link
	for _, task := range list {
		if parent := trace.SpanContextFromContext(parentOf(task)); parent.IsValid() {
			links = append(links, trace.Link{SpanContext: parent})
		}
	}
	end := time.Now()
	_, span := t.Start(context.Background(), "claim", trace.WithTimestamp(end.Add(-took)), trace.WithSpanKind(trace.SpanKindConsumer),
		trace.WithLinks(links...), trace.WithAttributes(attribute.Int("onejob.tasks", len(list))))
	span.End(trace.WithTimestamp(end))
}

// Attempt begins the span of an attempt, when its task had been claimed.
func (t tracer) Attempt(task *tasks.Task) worker.Trace {
	claimed := time.Now().Add(-boottime.Now().Sub(task.HeardAt))
	a := &attempt{tracer: t}
	a.ctx, a.whole = t.Start(parentOf(task), "task "+task.Kind, trace.WithTimestamp(claimed), trace.WithSpanKind(trace.SpanKindConsumer), trace.WithAttributes(
		attribute.Int64("onejob.task.id", task.ID), attribute.String("onejob.kind", task.Kind), attribute.String("onejob.queue", task.Queue), attribute.String("onejob.lock_key", task.LockKey),
		attribute.Int("onejob.attempt", task.Attempt), attribute.Int64("onejob.fence", task.Fence), attribute.String("onejob.replica", task.Replica)))
	task.Traceparent = traceparent(a.ctx)
	due := task.CreatedAt
	if task.RunAt.After(due) {
		due = task.RunAt
	}
	_, wait := t.Start(a.ctx, "wait", trace.WithTimestamp(claimed.Add(-max(0, task.StartedAt.Sub(due)))))
	wait.End(trace.WithTimestamp(claimed))
	_, a.step = t.Start(a.ctx, "lock", trace.WithTimestamp(claimed))
	return a
}

// attempt is the span of an attempt, and that of its present step.
type attempt struct {
	tracer tracer
	ctx    context.Context
	whole  trace.Span
	step   trace.Span
}

// end ends the present step. An error may have bytes that are not UTF-8; the exporter would drop
// all spans that it sends together with such a text.
func (a *attempt) end(err error) {
	if a.step == nil {
		return
	}
	if err != nil {
		a.step.SetStatus(codes.Error, tasks.Text(err.Error()))
	}
	a.step.End()
	a.step = nil
}

func (a *attempt) Locked(err error) { a.end(err) }

func (a *attempt) Running(ctx context.Context, at *tasks.Attempt) context.Context {
	a.end(nil)
	ctx, a.step = a.tracer.Start(trace.ContextWithSpan(ctx, a.whole), "run")
	at.Traceparent = traceparent(ctx)
	return ctx
}

func (a *attempt) Ran(err error) {
	if a.step == nil {
		return // it did not begin
	}
	a.end(err)
	_, a.step = a.tracer.Start(a.ctx, "complete")
}

func (a *attempt) Ended(outcome tasks.Outcome, err string) {
	a.end(nil)
	a.whole.SetAttributes(attribute.String("onejob.outcome", cmp.Or(string(outcome), "requeued")))
	if outcome != "" && outcome != tasks.Succeeded {
		a.whole.SetStatus(codes.Error, tasks.Text(err))
	}
	a.whole.End()
}

// parentOf returns a context with the span that enqueued a task, if the row names one.
func parentOf(task *tasks.Task) context.Context {
	if task.Traceparent == "" {
		return context.Background()
	}
	return propagation.TraceContext{}.Extract(context.Background(), propagation.MapCarrier{"traceparent": task.Traceparent})
}

// traceparent returns the span of a context as the header has it.
func traceparent(ctx context.Context) string {
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	return carrier["traceparent"]
}
