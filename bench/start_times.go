package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"runtime/debug"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"onejob/bench/riverjobs"
	"onejob/internal/logging"
	"onejob/internal/metrics"
	lock "onejob/lock/consul"
	"onejob/store"
	"onejob/tasks"
	"onejob/worker"
)

// startTimes are what a subject writes down when pick-up is measured: how long after
// its INSERT each task started.
type startTimes struct {
	mu     sync.Mutex
	delays []float64 // ms
}

// started notes that a task starts that was sent at a time in Unix nanoseconds.
// One that was sent at zero is there to warm up.
func (s *startTimes) started(sent int64) {
	now := time.Now().UnixNano()
	if sent == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.delays = append(s.delays, float64(now-sent)/1e6)
}

func (s *startTimes) write(path string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	text, err := json.Marshal(s.delays)
	if err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o600)
}

// gcPercent is that of "onejob serve".
const gcPercent = 400

// runHandler is a replica of onejob with a Go handler of its own, no-op tasks, and defaults
// otherwise. Its log and its metrics are those of "onejob serve".
func runHandler(ctx context.Context, dsn, consul string, concurrency int, started func(sent int64)) error {
	debug.SetGCPercent(gcPercent)
	log := zap.New(zapcore.NewCore(logging.JSON(), zapcore.Lock(os.Stdout), zap.InfoLevel))
	shown := metrics.New("bench")
	kinds := tasks.Kinds{"noop": tasks.Noop{}}
	tasks.Handle(kinds, "stamp", func(_ context.Context, _ *tasks.Attempt, p struct{ Sent int64 }) (any, error) {
		started(p.Sent)
		return nil, nil
	})
	db, err := store.Open(store.Config{DSN: dsn, Measure: shown.Store})
	if err != nil {
		return err
	}
	defer db.Close()
	client := api.DefaultConfig()
	client.Address = consul
	locks, err := lock.New(lock.Config{Client: client, Log: log, Measure: shown.Consul})
	if err != nil {
		return err
	}
	replica, err := worker.New(worker.Config{Store: db, Locks: locks, Kinds: kinds, Replica: "handler", Concurrency: concurrency, Measure: shown.Worker, Log: log})
	if err != nil {
		return err
	}
	return replica.Run(ctx)
}

// runStartTimes runs a subject and writes its stamps to a file at the end.
func runStartTimes(ctx context.Context, subject, dsn, consul, out string) error {
	var s startTimes
	var err error
	switch subject {
	case "onejob":
		err = runHandler(ctx, dsn, consul, onejobConcurrency, s.started)
	case "river":
		err = riverjobs.Run(ctx, riverjobs.Config{DSN: dsn, Started: s.started})
	case "river-default":
		err = riverjobs.Run(ctx, riverjobs.Config{DSN: dsn, Default: true, Started: s.started})
	default:
		err = fmt.Errorf("there is no subject %q", subject)
	}
	if err != nil {
		return err
	}
	return s.write(out)
}
