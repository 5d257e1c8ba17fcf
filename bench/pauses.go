package main

import (
	"bytes"
	"io"
	"os"
	"strings"
	"time"
)

// pauses adds up what keeps a replica from its locks, and what that costs it.
type pauses struct {
	consul  *consul
	counted string // the interval of Consul's metrics that was added last
	unread  int    // how often they could not be had

	removals int           // how often Consul removed tombstones
	removing time.Duration // for so long its state machine did nothing else
	longest  time.Duration

	log          string // of the replica
	read         int64  // so much of it
	sessionsLost int
	leasesLost   int
}

// metricsEvery is more often than Consul's metrics begin a new interval, which
// they do every 10 s: of each only the last complete one can be read.
const metricsEvery = 3 * time.Second

// follow adds what Consul has measured since it was called last, provided that
// this was no longer than metricsEvery ago. Consul fails to print an interval in
// which one of its values was no number, as in its first seconds.
func (p *pauses) follow() {
	metrics, err := p.consul.Client().Agent().Metrics()
	if err != nil {
		p.unread++
		return
	}
	if metrics.Timestamp == p.counted {
		return
	}
	p.counted = metrics.Timestamp
	const milliseconds = float64(time.Millisecond)
	for _, s := range metrics.Samples {
		if strings.HasSuffix(s.Name, ".fsm.tombstone") {
			p.removals += s.Count
			p.removing += time.Duration(s.Sum * milliseconds)
			p.longest = max(p.longest, time.Duration(s.Max*milliseconds))
		}
	}
}

// count adds what the replica has written to its log since it was called last.
func (p *pauses) count() error {
	file, err := os.Open(p.log)
	if err != nil {
		return err
	}
	defer file.Close()
	text, err := io.ReadAll(io.NewSectionReader(file, p.read, 1<<40))
	if err != nil {
		return err
	}
	whole := text[:bytes.LastIndexByte(text, '\n')+1] // the last line may not be written to its end
	p.read += int64(len(whole))
	p.sessionsLost += bytes.Count(whole, []byte("session_lost"))
	p.leasesLost += bytes.Count(whole, []byte("task_lease_lost"))
	return nil
}
