package worker_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"
	"syscall"

	"go.uber.org/zap"

	"onejob/internal/servers"
	"onejob/lock/consul"
	"onejob/store"
	"onejob/tasks"
	"onejob/worker"
)

// The main of a replica that runs Go handlers. Consul is found by its own
// environment, CONSUL_HTTP_ADDR and so on.
func Example() {
	defer exampleServers()()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()

	kinds := tasks.Kinds{}
	tasks.Handle(kinds, "greet", func(ctx context.Context, a *tasks.Attempt, p struct{ Name string }) (string, error) {
		fmt.Println("hello", p.Name)
		stop() // a replica runs until SIGTERM, but an example has to end
		return "greeted", nil
	})
	db, err := store.Open(store.Config{DSN: os.Getenv("ONEJOB_POSTGRES_DSN")})
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	if err := db.Migrate(ctx, nil); err != nil {
		log.Fatal(err)
	}
	locks, err := consul.New(consul.Config{})
	if err != nil {
		log.Fatal(err)
	}
	if _, err := db.Pool().Exec(ctx, `INSERT INTO onejob.tasks (kind, payload) VALUES ('greet', '{"Name": "Zoë"}')`); err != nil {
		log.Fatal(err)
	}
	replica, err := worker.New(worker.Config{Store: db, Locks: locks, Kinds: kinds, Replica: "one"})
	if err != nil {
		log.Fatal(err)
	}
	if err := replica.Run(ctx); err != nil {
		log.Fatal(err)
	}
	// Output: hello Zoë
}

// The whole main of such a program under a supervisor, which takes care of crashes.
func ExampleSupervise() {
	logger := zap.Must(zap.NewProduction())
	os.Exit(worker.Supervise(logger, func(ctx context.Context, p *worker.Process) error {
		kinds := tasks.Kinds{}
		tasks.Handle(kinds, "greet", func(ctx context.Context, a *tasks.Attempt, p struct{ Name string }) (string, error) {
			return "hello " + p.Name, nil
		})
		db, err := store.Open(store.Config{DSN: os.Getenv("ONEJOB_POSTGRES_DSN")})
		if err != nil {
			return err
		}
		defer db.Close()
		if !p.Reporting() { // a death is made known whatever the schema is
			if err := db.Migrate(ctx, nil); err != nil {
				return err
			}
		}
		locks, err := consul.New(consul.Config{Log: logger})
		if err != nil {
			return err
		}
		return p.Run(ctx, worker.Config{Store: db, Locks: locks, Kinds: kinds, Replica: "one", Log: logger})
	}))
}

// exampleServers starts a Postgres and a Consul, and tells of them in the
// environment. It returns what ends them.
func exampleServers() func() {
	pg, err := servers.StartPostgres(context.Background(), servers.PostgresConfig{})
	if err != nil {
		log.Fatal(err)
	}
	kv, err := servers.StartConsul(context.Background(), servers.ConsulConfig{})
	if err != nil {
		log.Fatal(err)
	}
	os.Setenv("ONEJOB_POSTGRES_DSN", pg.DSN("postgres"))
	os.Setenv("CONSUL_HTTP_ADDR", kv.Addr())
	return func() {
		os.Unsetenv("ONEJOB_POSTGRES_DSN")
		os.Unsetenv("CONSUL_HTTP_ADDR")
		_ = kv.Close()
		_ = pg.Close()
	}
}
