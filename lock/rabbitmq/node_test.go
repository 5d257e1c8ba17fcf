package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"onejob/internal/testenv"
	"onejob/lock"
)

// TestPauseWhileTheNodeOfAHolderIsDown: a delay queue on a node that is down keeps its slot taken, and no
// look sees it. Take makes a pause, as Await would return at once.
//
// There is no second node here. The broker only forgets that the queue runs, as it does with those of a
// node that goes down, and gives the same answer.
func TestPauseWhileTheNodeOfAHolderIsDown(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	if _, err := v.Server.Eval(t.Context(), "undefined = whereis(mnesia_tm)."); err == nil {
		t.Skip("this broker keeps its queues in Khepri, out of which none can be taken like this")
	}
	if version, err := v.Server.Eval(t.Context(), "rabbit_misc:version()."); err != nil || strings.Contains(version, `"3.8.`) {
		t.Skipf("to those who look, this broker shows such a queue (version %s, %v)", version, err)
	}
	s := start(t, config(t, v))
	if err := s.Create(t.Context(), "k", 1); err != nil {
		t.Fatal(err)
	}
	if err := declareDurable(channel(t, plain(t, v)), s.cfg.names("k").d(1)); err != nil {
		t.Fatal(err)
	}
	name := fmt.Sprintf(`N = rabbit_misc:r(<<"%s">>, queue, <<"%s">>), `, v.Name, s.cfg.names("k").d(1))
	down := name + `{ok, Q} = rabbit_amqqueue:lookup(N), persistent_term:put(N, Q), ok = mnesia:dirty_delete(rabbit_queue, N).`
	up := name + `Q = persistent_term:get(N), ok = mnesia:dirty_write(rabbit_queue, Q),
		{ok, _} = rabbit_amqqueue:delete(Q, false, false, <<"operator">>).`
	if _, err := v.Server.Eval(t.Context(), down); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	_, err := s.Take(t.Context(), "k", 1, nil)
	took := time.Since(began)
	if !errors.Is(err, lock.ErrDelayed) || !nodeDown(err) {
		t.Errorf("take: got error %v, want %v for a node that is down", err, lock.ErrDelayed)
	}
	if took < nodeDownPause {
		t.Errorf("take returned after %v, without a pause", took)
	}
	ctx, cancel := context.WithTimeout(t.Context(), maxWait)
	defer cancel()
	if err := s.Await(ctx, "k"); err != nil {
		t.Errorf("await: %v; it was to see room, or there was no need for a pause", err)
	}
	if _, err := v.Server.Eval(t.Context(), up); err != nil {
		t.Fatal(err)
	}
	if err := takeSoon(t, s, "k").Release(t.Context()); err != nil {
		t.Error(err)
	}
}
