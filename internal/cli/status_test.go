package cli

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"onejob/internal/snapshot"
	"onejob/internal/testenv"
	"onejob/internal/watch"
)

// A database without the schema, such as another one, is no empty cluster. Not parallel: the command reads
// the environment.
func TestStatusWithoutTheSchema(t *testing.T) {
	db, kv := testenv.Postgres(t), testenv.Consul(t)
	t.Setenv("ONEJOB_POSTGRES_DSN", db.DSN)
	t.Setenv("CONSUL_HTTP_ADDR", kv.Addr)
	t.Setenv("ONEJOB_CONSUL_PREFIX", kv.Prefix)
	t.Setenv("ONEJOB_CONFIG", "")
	for _, args := range [][]string{{"status"}, {"status", "-o", "json"}} {
		var stdout, stderr bytes.Buffer
		code := run(t.Context(), Program{}, args, strings.NewReader(""), &stdout, &stderr)
		const want = `relation "onejob.replicas" does not exist; check that this is the right database, then run onejob migrate up`
		if code != exitFailure || stdout.Len() > 0 || !strings.Contains(stderr.String(), want) {
			t.Errorf("%v exits with %d and says %q and %q, want %q", args, code, stdout.String(), stderr.String(), want)
		}
	}
}

func TestStatusSaysHowManyReplicasItDoesNotList(t *testing.T) {
	t.Parallel()
	for want, left := range map[string]int{"REPLICAS": 0, "REPLICAS: 2 of 62": 60} {
		s := &snapshot.Snapshot{Replicas: []snapshot.Replica{{Name: "a"}, {Name: "b"}}, ReplicasLeftOut: left}
		if !slices.ContainsFunc(statusBlocks(s), func(b watch.Block) bool { return b.Title == want && len(b.Rows) == 2 }) {
			t.Errorf("with %d that are not listed, no block is called %s", left, want)
		}
	}
}
