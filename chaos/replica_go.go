package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"onejob/chaos/observer"
	"onejob/internal/retry"
	"onejob/lock/consul"
	"onejob/lock/rabbitmq"
	"onejob/store"
	"onejob/tasks"
	execkind "onejob/tasks/kinds/exec"
	"onejob/worker"
)

// beReplica is the life of a replica with Go handlers: a main of one's own on
// onejob's packages, as users write it. It also runs commands.
func beReplica() (exitCode int, err error) {
	name := os.Getenv("ONEJOB_REPLICA")
	config := zap.NewProductionConfig()
	config.Level.SetLevel(zap.DebugLevel)
	config.Sampling = nil
	config.EncoderConfig.MessageKey = "event"
	config.EncoderConfig.TimeKey = "time"
	config.EncoderConfig.EncodeTime = func(t time.Time, e zapcore.PrimitiveArrayEncoder) {
		e.AppendString(t.UTC().Format("2006-01-02T15:04:05.000Z"))
	}
	config.OutputPaths = []string{"stdout"}
	log, err := config.Build()
	if err != nil {
		return 1, err
	}
	log = log.With(zap.String("replica", name))
	defer func() { _ = log.Sync() }()
	return worker.Supervise(log, func(ctx context.Context, p *worker.Process) error { return replicate(ctx, p, name, log) }), nil
}

// replicate is its working process.
func replicate(ctx context.Context, p *worker.Process, name string, log *zap.Logger) error {
	observerAddr := os.Getenv(envObserver)
	self, err := os.Executable()
	if err != nil {
		return err
	}
	commands, err := execkind.New(execkind.Config{Commands: map[string]execkind.Command{"work": workCommand(self, observerAddr)}})
	if err != nil {
		return err
	}
	kinds := tasks.Kinds{"exec": &told{observerAddr, commands}, "noop": tasks.Noop{}}
	for _, kind := range []string{"go", capped} {
		tasks.Handle(kinds, kind, func(ctx context.Context, a *tasks.Attempt, w work) (any, error) {
			c := observer.Claim{Task: a.ID, Attempt: a.Attempt, Fence: a.Fence, Key: a.LockKey, Limit: w.Limit, Kind: kind, Replica: a.Replica}
			return nil, perform(ctx, observerAddr, c, w)
		})
		kinds[kind] = &told{observerAddr, kinds[kind]}
	}
	db, err := store.Open(store.Config{DSN: os.Getenv("ONEJOB_POSTGRES_DSN"), ListenDSN: os.Getenv("ONEJOB_POSTGRES_LISTEN_DSN")})
	if err != nil {
		return err
	}
	defer db.Close()
	client := api.DefaultConfig()
	client.Address = os.Getenv("ONEJOB_CONSUL_ADDRESS")
	locks, err := consul.New(consul.Config{Client: client, Liveness: consul.Liveness(os.Getenv("ONEJOB_CONSUL_LIVENESS")), Replica: consul.Replica{Name: name}, Log: log})
	if err != nil {
		return err
	}
	config := worker.Config{Store: db, Locks: locks, Kinds: kinds, Replica: name, Log: log,
		Limits: locks.Semaphores(), LimitSlots: limitSlots, KindLimits: map[string]string{capped: capped}, ShutdownGrace: shutdownGrace}
	if queues := os.Getenv("ONEJOB_WORKER_QUEUES"); queues != "" {
		config.Queues = strings.Split(queues, ",")
	}
	if url := os.Getenv("ONEJOB_LIMITS_RABBITMQ_URL"); url != "" {
		names := slices.Sorted(maps.Keys(limitSlots))
		limits, err := rabbitmq.New(rabbitmq.Config{URL: url, Prefix: "onejob", Names: names, Name: "onejob " + name, Log: log})
		if err != nil {
			return err
		}
		config.Limits = limits
		running, stop := context.WithCancel(context.WithoutCancel(ctx)) // for longer than the replica
		done := make(chan struct{})
		go func() { defer close(done); _ = limits.Run(running) }()
		defer func() { stop(); <-done }()
	}
	log.Info("replica_started", zap.Int("pid", os.Getpid()))
	if err := p.Run(ctx, config); err != nil {
		return fmt.Errorf("replica %s: %w", name, err)
	}
	return nil
}

// told is a kind that tells the observer when the leases of its attempts end, before it
// learns that itself.
type told struct {
	observer string // its address
	tasks.Kind
}

// Prepare returns a handler that reports to the observer. Without an observer it reports to
// nobody.
func (k *told) Prepare(payload json.RawMessage) (tasks.Handler, error) {
	handler, err := k.Kind.Prepare(payload)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, a *tasks.Attempt) (tasks.Result, error) { return k.run(ctx, a, handler) }, nil
}

func (k *told) run(ctx context.Context, a *tasks.Attempt, handler tasks.Handler) (tasks.Result, error) {
	t, err := observer.Tell(ctx, k.observer, a.Fence)
	if err != nil {
		return handler(ctx, a)
	}
	a.Deadline = t.Deadline(a.Deadline)
	ended, end := context.WithCancel(context.WithoutCancel(ctx))
	var all sync.WaitGroup
	all.Go(func() {
		for ended.Err() == nil { // a handler need not ask
			a.Deadline()
			retry.Pause(ended, observer.Interval)
		}
		_ = t.Close()
	})
	defer all.Wait()
	defer end()
	return handler(ctx, a)
}
