package cli

import (
	"bytes"
	"context"
	"strings"
	"testing"
)

// A command that was interrupted before it had an answer has not succeeded.
func TestInterruptedLooksAreNoSuccess(t *testing.T) {
	t.Setenv("CONSUL_HTTP_ADDR", "127.0.0.1:1")
	t.Setenv("ONEJOB_POSTGRES_DSN", "postgres://onejob@127.0.0.1:1/onejob")
	ctx, interrupt := context.WithCancel(t.Context())
	interrupt()
	for _, args := range []string{"leader", "leader -o json", "status", "status -o json", "tasks list", "limits list"} {
		var out, errs bytes.Buffer
		if code := run(ctx, Program{}, strings.Fields(args), strings.NewReader(""), &out, &errs); code != exitFailure {
			t.Errorf("onejob %s exits with %d: %s%s", args, code, &out, &errs)
		}
	}
}
