package main

import (
	"os"
	"strings"
	"testing"
)

// TestMain lets the test binary be what the bench binary is: subjects are this
// program, started again, with a command for its first argument.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && !strings.HasPrefix(os.Args[1], "-") {
		main()
		return
	}
	os.Exit(m.Run())
}
