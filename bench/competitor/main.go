// Command competitor works on onejob's tasks in another way, for whoever wants to see
// what that way does under the faults of "make chaos":
//
//	competitor naive      as the post about mutually exclusive workers does
//	competitor apilock    with the lock of Consul's own Go client
//
// Where things are it reads from the variables that a replica of onejob gets,
// and from those that the harness adds; see place.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"os"
	"os/signal"
	"syscall"

	"github.com/hashicorp/consul/api"
	"github.com/jackc/pgx/v5/pgxpool"

	"onejob/bench/apilock"
	"onejob/bench/naive"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Getenv); err != nil {
		fmt.Fprintln(os.Stderr, "competitor:", err)
		os.Exit(1)
	}
}

// way is how a key is held while work is done. It reports whether it got the
// key.
type way struct {
	hold  func(ctx context.Context, consul *api.Client, key string, work func(context.Context) error) (mine bool, err error)
	looks bool // it looks again whether the task is still to be done, once it has the key
}

var ways = map[string]way{
	"naive":   {hold: naive.Hold},
	"apilock": {hold: apilock.Hold, looks: true},
}

func run(ctx context.Context, args []string, getenv func(string) string) error {
	if len(args) != 1 || ways[args[0]].hold == nil {
		return errors.New("it takes one argument, naive or apilock")
	}
	p, err := readPlace(getenv)
	if err != nil {
		return err
	}
	config, err := pgxpool.ParseConfig(p.dsn)
	if err != nil {
		return err
	}
	config.MaxConns = maxConns
	pool, err := pgxpool.NewWithConfig(context.WithoutCancel(ctx), config) // for longer than ctx: what runs has a grace
	if err != nil {
		return err
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.Proxy = nil
	transport.MaxIdleConnsPerHost, transport.MaxIdleConns = 2*workers, 2*workers
	client, err := api.NewClient(&api.Config{Address: p.consul, Transport: transport})
	if err != nil {
		return err
	}
	log.SetFlags(log.Ltime | log.Lmicroseconds | log.LUTC)
	log.Print("rival_started")
	newRunner(p, ways[args[0]], pool, client).run(ctx)
	return nil
}

// place says where everything is.
type place struct {
	replica  string // its name
	dsn      string // of Postgres
	consul   string // host and port of the agent
	observer string // host and port
	command  string // the program that exec tasks run, which has one argument
	effect   string // the statement of sql tasks; $1 is for how many seconds it sleeps
}

// readPlace returns everything that is missing as one error.
func readPlace(getenv func(string) string) (p place, err error) {
	var missing []error
	for name, into := range map[string]*string{
		"ONEJOB_REPLICA": &p.replica, "ONEJOB_POSTGRES_DSN": &p.dsn, "ONEJOB_CONSUL_ADDRESS": &p.consul,
		"CHAOS_WITNESS": &p.observer, "CHAOS_COMMAND": &p.command, "CHAOS_EFFECT": &p.effect,
	} {
		if *into = getenv(name); *into == "" {
			missing = append(missing, fmt.Errorf("%s is not set", name))
		}
	}
	return p, errors.Join(missing...)
}
