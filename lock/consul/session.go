package consul

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/boottime"
	"onejob/internal/retry"
	"onejob/lock"
	"onejob/lock/internal/hold"
)

// A ttlSession is one session in Consul, which ends unless it is renewed.
type ttlSession struct {
	*hold.Session
	*client
	id   string
	kind string      // what errors call it
	lost func(error) // is called, once, when it is lost; nil for nothing
}

func checkID(service string) string { return "service:" + service }

// create creates the session, with the check of a service unless that is empty. The agent
// tells the servers of a new check in its own time, so the first request may come too early.
func (s *ttlSession) create(ctx context.Context, name, service string) error {
	entry := map[string]any{
		"Name":      name,
		"Behavior":  api.SessionBehaviorDelete,
		"TTL":       s.cfg.SessionTTL.String(),
		"LockDelay": s.cfg.LockDelay.String(),
		// The default would tie the session to gossip's idea of the node, which
		// has false alarms of its own. The library leaves an empty list out, so
		// the request is written here.
		"NodeChecks": []string{},
	}
	if service != "" {
		entry["ServiceChecks"] = []api.ServiceCheck{{ID: checkID(service)}}
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	for {
		sent := boottime.Now()
		var out struct{ ID string }
		_, err := s.heartbeats.Raw().Write("/v1/session/create", entry, &out, s.write(ctx))
		if err == nil {
			s.id = out.ID
			s.Begin(hold.TTL, s.cfg.session(), sent)
			return nil
		}
		if !strings.Contains(err.Error(), "Missing check") && !strings.Contains(err.Error(), "critical state") {
			return err
		}
		retry.Pause(ctx, 20*time.Millisecond)
		if ctx.Err() != nil {
			return err
		}
	}
}

// renew renews the session, at the servers, and returns how long that took. It returns
// lock.ErrLost if the session has ended.
func (s *ttlSession) renew(ctx context.Context) (took time.Duration, err error) {
	timing := s.cfg.session()
	ctx, cancel := context.WithTimeout(ctx, max(time.Second, timing.Slack()/2))
	defer cancel()
	sent := boottime.Now()
	entry, _, err := s.heartbeats.Session().Renew(s.id, s.write(ctx))
	took = boottime.Now().Sub(sent)
	switch {
	case err != nil:
		return took, fmt.Errorf("renew %s %s: %w", s.kind, s.id, err)
	case entry == nil:
		s.lose(fmt.Errorf("%s %s had ended before it was renewed", s.kind, s.id))
		return took, s.Lost()
	}
	s.extend(hold.TTL, timing, sent)
	return took, nil
}

// extend moves one of the deadlines after a request that was sent then was
// acknowledged. If that came too late the session is lost, whatever Consul says.
func (s *ttlSession) extend(sign hold.Sign, timing lock.Timing, sent boottime.Instant) {
	if !s.Extend(sign, timing, sent) {
		s.lose(errors.New("the deadline passed before a heartbeat was acknowledged"))
	}
}

// lives asks Consul whether the session still lives. If it has ended, it is lost. If
// Consul cannot tell, or may not because the token was narrowed, that is an error.
func (s *ttlSession) lives(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	entry, err := s.lookAt(ctx, s.heartbeats, s.id)
	if err == nil && entry == nil {
		s.lose(fmt.Errorf("%s %s was ended from outside", s.kind, s.id))
	}
	return entry != nil, err
}

// lose ends the session: from now on nobody believes in it.
func (s *ttlSession) lose(why error) {
	if s.Lose(fmt.Errorf("%w: %w", lock.ErrLost, why)) && s.lost != nil {
		s.lost(why)
	}
}

// destroy ends the session at Consul, if it still has it.
func (s *ttlSession) destroy(ctx context.Context) error {
	_, err := s.heartbeats.Session().Destroy(s.id, s.write(ctx))
	return err
}
