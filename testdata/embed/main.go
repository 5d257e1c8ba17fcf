package main

import (
	"context"
	"fmt"

	"onejob"
)

type Greeting struct {
	Name string `json:"name"`
}

func greet(ctx context.Context, a *onejob.Attempt, p Greeting) (string, error) {
	fmt.Fprintf(a.Output, "attempt %d under fence %d\n", a.Attempt, a.Fence)
	return "hello " + p.Name, ctx.Err()
}

func main() {
	onejob.Main(onejob.Handle("greet", greet))
}
