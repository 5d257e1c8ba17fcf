package onejob_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"onejob"
	"onejob/internal/servers"
	"onejob/store"
)

type Greeting struct {
	Name string `json:"name"`
}

func greet(ctx context.Context, a *onejob.Attempt, p Greeting) (string, error) {
	fmt.Fprintf(a.Output, "attempt %d under fence %d\n", a.Attempt, a.Fence)
	return "hello " + p.Name, ctx.Err()
}

// The whole main of a program with a handler of its own. Run it with "serve --config FILE".
func ExampleMain() {
	onejob.Main(onejob.Handle("greet", greet))
}

// A task exists if the transaction commits, and never otherwise.
func ExampleEnqueueTx() {
	ctx := context.Background()
	pool, stop := exampleDatabase(ctx)
	defer stop()
	for _, problem := range []error{nil, errors.New("out of stock")} {
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if _, err := onejob.EnqueueTx(ctx, tx, onejob.NewTask{Kind: "greet", Payload: Greeting{Name: "Zoë"}}); err != nil {
				return err
			}
			return problem // or what else the transaction does
		})
		fmt.Println("transaction:", err)
	}
	var n int
	if err := pool.QueryRow(ctx, `SELECT count(*) FROM onejob.tasks WHERE kind = 'greet'`).Scan(&n); err != nil {
		log.Fatal(err)
	}
	fmt.Println("tasks:", n)
	// Output:
	// transaction: <nil>
	// transaction: out of stock
	// tasks: 1
}

// exampleDatabase returns a database with the tables of onejob, on a server of its own.
func exampleDatabase(ctx context.Context) (pool *pgxpool.Pool, stop func()) {
	server, err := servers.StartPostgres(ctx, servers.PostgresConfig{})
	if err != nil {
		log.Fatal(err)
	}
	db, err := store.Open(store.Config{DSN: server.DSN("postgres")})
	if err != nil {
		log.Fatal(err)
	}
	if err := db.Migrate(ctx, nil); err != nil {
		log.Fatal(err)
	}
	return db.Pool(), func() { db.Close(); _ = server.Close() }
}
