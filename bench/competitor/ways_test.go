package main

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/bench/apilock"
	"onejob/internal/servers"
)

// Each way on a real Consul: it lets one in, hands on work's error, and leaves no
// session. Only apilock tells work that its key is gone.
func TestWays(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	consul, err := servers.StartConsul(ctx, servers.ConsulConfig{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer consul.Close()
	client := consul.Client()
	for name, w := range ways {
		t.Run(name, func(t *testing.T) {
			tells, patience := name == "apilock", 2*time.Second
			if tells {
				patience = time.Minute
			}
			wrong := errors.New("work failed")
			mine, err := w.hold(ctx, client, name, func(context.Context) error {
				mine, err := w.hold(ctx, client, name, func(context.Context) error { return nil })
				if mine || err != nil {
					t.Errorf("the second: %v, %v", mine, err)
				}
				return wrong
			})
			if !mine || !errors.Is(err, wrong) {
				t.Errorf("the first: %v, %v", mine, err)
			}
			mine, err = w.hold(ctx, client, name+" again", func(ctx context.Context) error {
				if _, err := client.KV().Delete(name+" again", (&api.WriteOptions{}).WithContext(ctx)); err != nil {
					return err
				}
				select {
				case <-ctx.Done():
					return context.Cause(ctx)
				case <-time.After(patience):
					return nil
				}
			})
			if lost := errors.Is(err, apilock.ErrLost); !mine || lost != tells {
				t.Errorf("when its key was deleted: %v, %v", mine, err)
			}
			for { // the lock of Consul's client destroys its session by and by
				sessions, _, err := client.Session().List((&api.QueryOptions{}).WithContext(ctx))
				if err != nil {
					t.Fatalf("sessions are left, or cannot be listed: %v", err)
				}
				if len(sessions) == 0 {
					break
				}
				time.Sleep(20 * time.Millisecond)
			}
		})
	}
}
