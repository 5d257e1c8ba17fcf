package main

import (
	"context"
	"fmt"

	"onejob/chaos/harness"
)

// build is what was run, and on what.
func (c *cluster) build(ctx context.Context) (harness.Build, error) {
	b := harness.NewBuild(ctx)
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
