// Package consul keeps the locks of onejob in Consul's KV store: package lock's
// promises on top of sessions and transactions.
//
// A [Locker] holds one session at a time, with delete behaviour, and every lock
// is a key under it. Locks are taken and given back in transactions for all who
// ask at the same moment, up to 122 locks or 128 releases in each. A transaction
// costs Consul one Raft entry.
//
// Consul would grant a key twice within one session, so a Locker keeps a list of
// its leases, and a key on it is refused here. In return a lock whose answer was
// lost can simply be asked for again. A key stays on the list for some seconds
// after its release if a request about it may be applied late; a key that turns
// up then is deleted. An operator who releases or deletes a key ends that lease
// alone, within Config.Verify.
//
// It uses none of the client library's own Lock, Semaphore and RenewPeriodic:
// they take no context, may hang on a connection that went dead, count from the
// reply instead of the request, and mistake a busy server for a lost lock.
//
// # Liveness
//
// With [Check], the replica registers itself as a service with a TTL check at
// its agent, and the session ends when that check fails. Heartbeats go to the
// agent and cost no Raft write. The session's own TTL stays as the backstop for
// the loss of a whole host, agent and replica together. With [TTL] there is the
// session's TTL alone: it needs no stable agent, but Consul lets a session live
// for up to twice its TTL, and no TTL may be below 10 s.
//
// Other replicas do not wait for either. They end the session of a replica that has
// given no sign of life for lock.Silence, neither to the cluster's list nor here.
//
// # Keys
//
//	<prefix>/tasks/<lock key>       a lock
//	<prefix>/running/<n>            a lock of a task that shares it with nothing else; n is
//	                                the task's id modulo a constant, the value says whose it is
//	<prefix>/overflow/<group>       says that tasks of this group of names use tasks/<id>
//	<prefix>/limits/<name>/...      a limit, in the format of consul lock -n
//	<prefix>/limit-settings/<name>  its slots, as somebody has set them
//	<prefix>/leader                 the leader's lock, for everybody to read
//	<prefix>/replicas/<session>     a living replica; its watch shows who died
//	<prefix>/stopped/<session>      a replica that stopped while its list was unavailable
//	<prefix>/cluster                the cluster's id, which its list has too
//	<prefix>/database               the record of the database, see lock.Locker.Database
package consul

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/hashicorp/consul/api"
	"go.uber.org/zap"

	"onejob/internal/logging"
	"onejob/lock"
)

// Liveness is what a session's life hangs on.
type Liveness string

// The two ways.
const (
	Check Liveness = "check"
	TTL   Liveness = "ttl"
)

// Config says how to reach Consul and how long things may take. The zero value
// of every field means its default.
type Config struct {
	// Client is how to reach Consul; nil means api.DefaultConfig, which honours
	// CONSUL_HTTP_ADDR, CONSUL_HTTP_TOKEN, CONSUL_CACERT and the rest of Consul's
	// environment. Its TLSConfig, unless empty, replaces what its Transport has. New
	// refuses one with an HttpClient: set its Transport instead.
	Client *api.Config

	Prefix   string   // of all keys; default service/onejob
	Service  string   // the name to register as; default onejob
	Liveness Liveness // default Check

	CheckTTL   time.Duration // of the check; default 10 s
	Heartbeat  time.Duration // how often the check is fed; default 1 s
	SessionTTL time.Duration // at least 10 s, Consul's own bound; default 15 s
	Renew      time.Duration // how often the session is renewed; default 3 s
	Margin     time.Duration // how much earlier than Consul the holder gives up; default 1 s
	LockDelay  time.Duration // how long the keys of a dead session stay locked; default lock.DefaultLockDelay
	Verify     time.Duration // how often held keys are looked at; default 3 s

	Replica Replica     // who we are
	Log     *zap.Logger // default: JSON on stderr, from level info on

	// Measure is called with what the Locker does, for metrics; nil for none. It is called by
	// many goroutines at once and must not block.
	Measure func(what Measure, count int, took time.Duration)

	// RoundTripper, if not nil, carries all requests in place of connections of the
	// Locker's own. It is for simulations.
	RoundTripper http.RoundTripper
}

// slotDelay is Locker.SlotDelay.
func (c *Config) slotDelay() time.Duration {
	if c.Liveness == TTL {
		return max(c.Verify+c.LockDelay, c.SessionTTL)
	}
	return max(c.Verify+c.LockDelay, c.CheckTTL)
}

// Replica is what a living replica tells about itself, in its key.
type Replica struct {
	Name    string    `json:"name"`
	Process string    `json:"process,omitempty"` // the working process: the same for all its sessions; empty without a cluster, as of "onejob lock"
	Host    string    `json:"host"`
	PID     int       `json:"pid"`
	Version string    `json:"version"`
	HTTP    string    `json:"http"`
	Started time.Time `json:"started"`

	// Names is how many reused names it shares locks under; zero if it locks every task
	// under its own name, as versions before them do. A Locker sets it itself.
	Names int `json:"names,omitempty"`
}

// Measure says what a measurement is about, see Config.Measure.
type Measure int

const (
	// MeasureHeartbeat is a heartbeat that the agent acknowledged, and how long that took.
	MeasureHeartbeat Measure = iota

	// MeasureRenewal is a renewal of the session that a server acknowledged, and how long
	// that took.
	MeasureRenewal

	// MeasureAcquire is locks that were asked for together: how many, and how long the
	// answer took.
	MeasureAcquire

	// MeasureRelease is locks that were released together.
	MeasureRelease

	// MeasureLost is a session that was lost.
	MeasureLost
)

// WithDefaults returns the configuration with every zero field filled.
func (c Config) WithDefaults() Config {
	if c.Client == nil {
		c.Client = api.DefaultConfig()
	}
	c.Prefix = cmp.Or(c.Prefix, "service/onejob")
	c.Service = cmp.Or(c.Service, "onejob")
	c.Liveness = cmp.Or(c.Liveness, Check)
	c.CheckTTL = cmp.Or(c.CheckTTL, 10*time.Second)
	c.Heartbeat = cmp.Or(c.Heartbeat, time.Second)
	c.SessionTTL = cmp.Or(c.SessionTTL, 15*time.Second)
	c.Renew = cmp.Or(c.Renew, 3*time.Second)
	c.Margin = cmp.Or(c.Margin, time.Second)
	c.LockDelay = cmp.Or(c.LockDelay, lock.DefaultLockDelay)
	c.Verify = cmp.Or(c.Verify, 3*time.Second)
	if c.Replica.Host == "" {
		c.Replica.Host, _ = os.Hostname()
	}
	c.Replica.Name = cmp.Or(c.Replica.Name, c.Replica.Host)
	c.Replica.PID = cmp.Or(c.Replica.PID, os.Getpid())
	if c.Replica.Started.IsZero() {
		c.Replica.Started = time.Now()
	}
	c.Log = cmp.Or(c.Log, logging.Stderr())
	return c
}

// Slack returns for how long a process may stand still, or go unheard, before its leases
// end: the shortest of what the check, the session and [lock.Silence] allow.
func (c Config) Slack() time.Duration {
	c = c.WithDefaults()
	slack := min(c.session().Slack(), c.silence().Slack())
	if c.Liveness == Check {
		slack = min(slack, c.check().Slack())
	}
	return slack
}

func (c *Config) measure(what Measure, count int, took time.Duration) {
	if c.Measure != nil {
		c.Measure(what, count, took)
	}
}

// check is the arithmetic of the health check; session that of the session.
func (c Config) check() lock.Timing {
	return lock.Timing{TTL: c.CheckTTL, Heartbeat: c.Heartbeat, Margin: c.Margin}
}

// silence is the arithmetic of the signs of life that others watch for.
func (c Config) silence() lock.Timing {
	return lock.Timing{TTL: lock.Silence, Heartbeat: time.Second, Margin: c.Margin}
}

func (c Config) session() lock.Timing {
	return lock.Timing{TTL: c.SessionTTL, Heartbeat: c.Renew, Margin: c.Margin}
}

// Validate returns everything that is wrong with the configuration, with the
// arithmetic where durations cannot be safe together.
func (c Config) Validate() error {
	c = c.WithDefaults()
	errs := []error{checkClient(c.Client)}
	add := func(format string, a ...any) { errs = append(errs, fmt.Errorf(format, a...)) }
	switch {
	case strings.HasPrefix(c.Prefix, "/") || strings.HasSuffix(c.Prefix, "/"):
		add("consul.prefix: %q must neither begin nor end with a slash", c.Prefix)
	case !plain(c.Prefix):
		add("consul.prefix: %q must not have //, /./ or /../ in it, nor what cannot be printed: Consul reads another key then", c.Prefix)
	}
	switch c.Liveness {
	case Check:
		errs = append(errs, c.check().Check("consul.check_ttl"))
	case TTL:
	default:
		add("consul.liveness: %q is neither check nor ttl", c.Liveness)
	}
	errs = append(errs, c.session().Check("consul.session_ttl"),
		c.silence().Check("consul.margin: other replicas wait for a sign of life"))
	if c.SessionTTL < 10*time.Second || c.SessionTTL > 24*time.Hour {
		add("consul.session_ttl: %v is outside what Consul accepts, 10s to 24h", c.SessionTTL)
	}
	if c.LockDelay < time.Millisecond || c.LockDelay > time.Minute {
		add("consul.lock_delay: %v is outside 1ms to 1m; Consul cuts off what is above", c.LockDelay)
	}
	if c.Verify < 100*time.Millisecond {
		add("consul.verify: %v is below 100ms, which would keep Consul busy", c.Verify)
	}
	if c.Renew < 100*time.Millisecond {
		add("consul.renew: %v is below 100ms, which would keep Consul's servers busy", c.Renew)
	}
	if c.Heartbeat < 50*time.Millisecond {
		add("consul.heartbeat: %v is below 50ms, which would keep the agent busy", c.Heartbeat)
	}
	return errors.Join(errs...)
}
