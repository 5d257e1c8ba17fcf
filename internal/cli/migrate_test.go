package cli

import (
	"bytes"
	"os"
	"strings"
	"testing"
)

// A part of the SQL is no success: it is piped into psql.
func TestRolesThatCannotBeWrittenAreNoSuccess(t *testing.T) {
	t.Parallel()
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	var stderr bytes.Buffer
	if code := run(t.Context(), Program{}, []string{"migrate", "roles"}, strings.NewReader(""), full, &stderr); code != exitFailure {
		t.Errorf("it exits with %d: %s", code, &stderr)
	}
}
