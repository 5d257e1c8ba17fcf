package main

import (
	"context"
	"time"
)

// meter reads what the processes of a run have cost so far.
type meter struct {
	environment *environment
	progress    *progress // its own backend is not counted
	ours        []int     // backends that are not counted either
	consul      *consul
	processes   []*process
}

// reading is what a meter shows at one moment.
type reading struct {
	cpu    map[string]time.Duration // by process: subject, postgres, consul
	writes float64                  // to Consul
	claims int64                    // of onejob, those given back included

	machine processorUse
}

func (m *meter) read(ctx context.Context) (r reading, err error) {
	r.cpu = map[string]time.Duration{}
	for _, p := range m.processes {
		used, err := cpuTime(p.pid())
		if err != nil {
			return r, err
		}
		r.cpu["subject"] += used
	}
	if r.cpu["postgres"], err = cpuTime(m.environment.pgPID, append(m.ours[:len(m.ours):len(m.ours)], int(m.progress.conn.PgConn().PID()))...); err != nil {
		return r, err
	}
	if m.consul != nil {
		if r.cpu["consul"], err = cpuTime(m.consul.pid); err != nil {
			return r, err
		}
		if r.writes, err = m.consul.writes(); err != nil {
			return r, err
		}
	}
	if r.machine, err = readProcessorUse(); err != nil {
		return r, err
	}
	if m.progress.jobs.claims != "" {
		err = m.progress.conn.QueryRow(ctx, m.progress.jobs.claims).Scan(&r.claims)
	}
	return r, err
}
