package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"
	"go.uber.org/zap"

	"onejob/bench/riverjobs"
	"onejob/internal/logging"
	"onejob/internal/metrics"
	lock "onejob/lock/consul"
	"onejob/store"
	"onejob/tasks"
	"onejob/worker"
)

// startTimes are what a subject writes down when pick-up is measured: a line "SENT MS;" for
// each task that starts, when it was sent and how much later it started.
type startTimes struct {
	work time.Duration // that each task takes after that

	mu  sync.Mutex
	out *bufio.Writer
	err error
}

// started notes that a task starts that was sent at a time in Unix nanoseconds, and does its
// work. One that was sent at zero is there to warm up.
func (s *startTimes) started(sent int64) {
	now := time.Now().UnixNano()
	if sent != 0 {
		s.mu.Lock()
		_, err := fmt.Fprintf(s.out, "%d %.3f;\n", sent, float64(now-sent)/1e6)
		s.err = errors.Join(s.err, err)
		s.mu.Unlock()
	}
	if s.work > 0 {
		time.Sleep(s.work)
	}
}

// write writes what was noted, every tenth of a second, so that little is lost when the
// process is killed.
func (s *startTimes) write(ctx context.Context) error {
	for {
		ended := sleep(ctx, 100*time.Millisecond) != nil
		s.mu.Lock()
		err := errors.Join(s.err, s.out.Flush())
		s.mu.Unlock()
		if ended || err != nil {
			return err
		}
	}
}

// runHandler is a replica of onejob with a Go handler of its own, no-op tasks, and defaults
// otherwise. Its log and its metrics are those of "onejob serve".
func runHandler(ctx context.Context, c startTimesConfig, started func(sent int64)) error {
	log := logging.New(logging.JSON(), &logging.Queue{Out: os.Stdout}, zap.InfoLevel, zap.String("replica", c.replica))
	defer func() { _ = log.Sync() }()
	shown := metrics.New("bench")
	kinds := tasks.Kinds{"noop": tasks.Noop{}}
	tasks.Handle(kinds, "stamp", func(_ context.Context, _ *tasks.Attempt, p struct{ Sent int64 }) (any, error) {
		started(p.Sent)
		return nil, nil
	})
	db, err := store.Open(store.Config{DSN: c.dsn, Measure: shown.Store})
	if err != nil {
		return err
	}
	defer db.Close()
	client := api.DefaultConfig()
	client.Address = c.consul
	locks, err := lock.New(lock.Config{Client: client, Log: log, Measure: shown.Consul})
	if err != nil {
		return err
	}
	replica, err := worker.New(worker.Config{Store: db, Locks: locks, Kinds: kinds, Replica: c.replica, Concurrency: cmp.Or(c.slots, onejobConcurrency), Measure: shown.Worker, Log: log})
	if err != nil {
		return err
	}
	return replica.Run(ctx)
}

// runHandlers is as many replicas as are asked for. If one ends, all do.
func runHandlers(ctx context.Context, c startTimesConfig, started func(sent int64)) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	errs := make(chan error)
	for i := range c.replicas {
		own := c
		if c.replicas > 1 {
			own.replica = fmt.Sprintf("%s-%d", c.replica, i+1)
		}
		go func() { defer stop(); errs <- runHandler(ctx, own, started) }()
	}
	var all error
	for range c.replicas {
		all = errors.Join(all, <-errs)
	}
	return all
}

// startTimesConfig is what a subject does whose start times are written down.
type startTimesConfig struct {
	subject, dsn, consul, replica, out string

	replicas int           // of onejob, in this process
	slots    int           // 0: as many as are fast
	work     time.Duration // that a task takes
}

// runStartTimes runs a subject and writes its start times to a file.
func runStartTimes(ctx context.Context, c startTimesConfig) error {
	file, err := os.Create(c.out)
	if err != nil {
		return err
	}
	defer file.Close()
	s := startTimes{work: c.work, out: bufio.NewWriter(file)}
	ended, end := context.WithCancel(context.WithoutCancel(ctx))
	written := make(chan error)
	go func() { written <- s.write(ended) }()
	switch c.subject {
	case "onejob":
		err = runHandlers(ctx, c, s.started)
	case "river", "river-default":
		err = riverjobs.Run(ctx, riverjobs.Config{DSN: c.dsn, Default: c.subject == "river-default", Workers: c.slots, Started: s.started})
	default:
		err = fmt.Errorf("there is no subject %q", c.subject)
	}
	end()
	return errors.Join(err, <-written)
}

// readStarts reads the files of start times. The last line of a file may have been cut off.
func readStarts(files []string) (starts []delay, err error) {
	for _, name := range files {
		file, err := os.Open(name)
		if errors.Is(err, os.ErrNotExist) {
			continue // killed before it began
		}
		if err != nil {
			return nil, err
		}
		for lines := bufio.NewScanner(file); lines.Scan(); {
			var sent int64
			var ms float64
			if n, _ := fmt.Sscanf(lines.Text(), "%d %f;", &sent, &ms); n == 2 && strings.HasSuffix(lines.Text(), ";") {
				starts = append(starts, delay{time.Unix(0, sent), ms})
			}
		}
		file.Close()
	}
	return starts, nil
}
