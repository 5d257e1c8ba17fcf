package rabbitmq

import (
	"strings"
	"testing"
	"time"

	"onejob/internal/testenv"
	"onejob/internal/testenv/proxy"
)

// TestInspectOnASlowWay: holders are asked, however long the broker takes for what comes before.
func TestInspectOnASlowWay(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	way, err := proxy.New(v.Server.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = way.Close() })
	cfg := config(t, v)
	near := start(t, cfg)
	if err := near.Create(t.Context(), "k", 1); err != nil {
		t.Fatal(err)
	}
	lease := take(t, near, "k")
	way.Delay(proxy.Both, 400*time.Millisecond)
	cfg.URL = strings.Replace(cfg.URL, v.Server.Addr(), way.Addr(), 1)
	sem, err := create(t, cfg).Inspect(t.Context(), "k")
	if err != nil || sem.Slots != 1 || len(sem.Holders) != 1 || sem.Holders[0].Session != lease.queue {
		t.Errorf("got %+v, %v; want one slot and its holder", sem, err)
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
}
