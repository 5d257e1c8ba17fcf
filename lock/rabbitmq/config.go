package rabbitmq

import (
	"cmp"
	"crypto/tls"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"go.uber.org/zap"

	"onejob/internal/logging"
	"onejob/internal/quiet"
	"onejob/lock"
)

// Config says how to reach RabbitMQ and how long things may take. The zero value
// of every field means its default.
//
// The user needs the right to configure and to read queues below the prefix, and
// to write to the default exchange: `^onejob/`, `^onejob/` and `^amq\.default$`.
type Config struct {
	URL string      // amqp:// or amqps://; default amqp://guest:guest@127.0.0.1:5672/
	TLS *tls.Config // for amqps

	Prefix string // of all queues; default onejob

	// Names are the semaphores that List asks for: AMQP has no way to list
	// queues. SetNames replaces them.
	Names []string

	Heartbeat time.Duration // after how long of silence the broker may give up on us; whole seconds; default 10 s
	Verify    time.Duration // how often held slots are looked at; default 3 s

	// Margin is how much earlier than the heartbeat the holder gives up; default
	// 2 s. What is killed at the end of a lease must be dead within it.
	Margin time.Duration

	Name string      // of the connections, as management shows them; default onejob
	Log  *zap.Logger // default: JSON on stderr, from level info on
}

// WithDefaults returns the configuration with every zero field filled.
func (c Config) WithDefaults() Config {
	c.URL = cmp.Or(c.URL, "amqp://guest:guest@127.0.0.1:5672/")
	c.Prefix = cmp.Or(c.Prefix, "onejob")
	c.Name = cmp.Or(c.Name, "onejob")
	c.Heartbeat = cmp.Or(c.Heartbeat, 10*time.Second)
	c.Verify = cmp.Or(c.Verify, 3*time.Second)
	c.Margin = cmp.Or(c.Margin, 2*time.Second)
	c.Log = cmp.Or(c.Log, logging.Stderr())
	return c
}

// timing is the arithmetic of a lease. The broker gives up after two heartbeats
// at the earliest; that the TTL is but one leaves room for versions that do not.
func (c Config) timing() lock.Timing {
	return lock.Timing{TTL: c.Heartbeat, Heartbeat: c.Verify, Margin: c.Margin}
}

// delay is how long a slot stays taken after its holder is gone without having
// given it back. The holder's lease ends at most TTL - Margin after that, counted on
// its own clock, and the Margin is for what must be killed then.
func (c Config) delay() time.Duration { return c.timing().TTL }

// Validate returns everything that is wrong with the configuration, with the
// arithmetic where durations cannot be safe together.
func (c Config) Validate() error {
	c = c.WithDefaults()
	var errs []error
	add := func(format string, a ...any) { errs = append(errs, fmt.Errorf(format, a...)) }
	// The errors do not repeat the URL, which has a password in it.
	switch u, err := url.Parse(c.URL); {
	case err != nil:
		add("rabbitmq.url: %w; write it as amqp://USER:PASSWORD@HOST:PORT/VHOST, and %%-encode what is special in the password, such as / as %%2F", quiet.URL(err))
	case u.Fragment != "" || u.User == nil && strings.Contains(c.URL, "@"):
		add("rabbitmq.url: the password seems to have a #, / or ? in it; write that as %%23, %%2F or %%3F")
	case u.Query().Has("heartbeat"):
		add("rabbitmq.url: take heartbeat=%s out of it: leases are counted by a heartbeat of %v, and would outlast a shorter one or leave dead holders in for a longer one",
			u.Query().Get("heartbeat"), c.Heartbeat)
	default:
		if _, err := amqp.ParseURI(c.URL); err != nil {
			add("rabbitmq.url: %w", err)
		}
	}
	switch {
	case len(c.Prefix) > 100:
		add("rabbitmq.prefix: it is %d bytes long, more than 100", len(c.Prefix))
	case strings.HasPrefix(c.Prefix, "/") || strings.HasSuffix(c.Prefix, "/"):
		add("rabbitmq.prefix: %q must neither begin nor end with a slash", c.Prefix)
	case strings.HasPrefix(c.Prefix, "amq."):
		add("rabbitmq.prefix: %q begins with amq., which the broker keeps for itself", c.Prefix)
	}
	for _, name := range c.Names {
		if err := lock.CheckSemaphore(name, 0); err != nil {
			add("rabbitmq.names: %w", err)
		}
	}
	errs = append(errs, c.timing().Check("rabbitmq.heartbeat"))
	if c.Heartbeat%time.Second != 0 || c.Heartbeat < time.Second || c.Heartbeat > time.Hour {
		add("rabbitmq.heartbeat: %v is not whole seconds from 1s to 1h, as AMQP wants it", c.Heartbeat)
	}
	if c.Verify < 50*time.Millisecond {
		add("rabbitmq.verify: %v is below 50ms, which would keep the broker busy", c.Verify)
	}
	return errors.Join(errs...)
}
