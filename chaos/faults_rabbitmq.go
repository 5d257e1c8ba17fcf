package main

import (
	"context"
	"time"

	"onejob/internal/testenv/proxy"
)

// Faults of RabbitMQ, where limits are kept there.
var rabbitmqFaults = []*kind{
	{name: "rabbitmq-kill", what: "kill -9 of RabbitMQ", weight: 2, least: time.Second, most: 20 * time.Second, rabbitmq: true, run: killRabbitMQ},
	{name: "cut-rabbitmq", what: "a replica black-holed from RabbitMQ", weight: 2, least: time.Second, most: 40 * time.Second, rabbitmq: true, run: link(toRabbitMQ, cut(proxy.Both))},
}

func toRabbitMQ(_ *fault, r *replica) ([]*proxy.Proxy, string) {
	return []*proxy.Proxy{r.rabbitmq}, "rabbitmq"
}

func killRabbitMQ(ctx context.Context, h *fault) error {
	if !h.c.rabbitmqBusy.TryLock() {
		return errNothing
	}
	defer h.c.rabbitmqBusy.Unlock()
	if err := h.begins("the server"); err != nil {
		return err
	}
	h.c.rabbitmq.Kill()
	h.lasts(ctx)
	return h.c.rabbitmq.Start(context.WithoutCancel(ctx))
}
