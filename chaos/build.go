package main

import (
	"context"
	"fmt"
	"os/exec"
	"runtime"
	"strings"
)

// build is what was run, and on what.
type build struct {
	Commit   string `json:"commit"` // with "changed" after it if the tree was
	Go       string `json:"go"`
	Postgres string `json:"postgres"`
	Consul   string `json:"consul"`
	RabbitMQ string `json:"rabbitmq,omitempty"`
}

func (b build) String() string {
	s := fmt.Sprintf("commit %s, %s, PostgreSQL %s, Consul %s", b.Commit, b.Go, b.Postgres, b.Consul)
	if b.RabbitMQ != "" {
		s += ", RabbitMQ " + b.RabbitMQ
	}
	return s
}

func (c *cluster) build(ctx context.Context) (build, error) {
	b := build{Commit: commit(ctx), Go: runtime.Version()}
	if err := c.operator.QueryRow(ctx, `SHOW server_version`).Scan(&b.Postgres); err != nil {
		return b, fmt.Errorf("ask Postgres for its version: %w", err)
	}
	self, err := c.consul.Servers[0].Client().Agent().Self()
	if err != nil {
		return b, fmt.Errorf("ask Consul for its version: %w", err)
	}
	b.Consul = fmt.Sprint(self["Config"]["Version"])
	if c.rabbitmq != nil {
		var overview struct {
			Version string `json:"rabbitmq_version"`
		}
		if err := c.rabbitmq.Manage(ctx, "GET", "/overview", nil, &overview); err != nil {
			return b, fmt.Errorf("ask RabbitMQ for its version: %w", err)
		}
		b.RabbitMQ = overview.Version
	}
	return b, nil
}

// commit is that of the working tree, as far as git knows.
func commit(ctx context.Context) string {
	head, err := exec.CommandContext(ctx, "git", "rev-parse", "--short=12", "HEAD").Output()
	if err != nil {
		return "unknown"
	}
	changed, err := exec.CommandContext(ctx, "git", "status", "--porcelain", "--untracked-files=no").Output()
	if err != nil || len(changed) > 0 {
		return strings.TrimSpace(string(head)) + " changed"
	}
	return strings.TrimSpace(string(head))
}
