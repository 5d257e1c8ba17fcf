package cli

import (
	"math"
	"os"
	"runtime/debug"
	"testing"

	"go.uber.org/zap"
)

// A replica bounds its heap by itself, unless the environment says how.
func TestServeLimitsItsMemory(t *testing.T) {
	limit, percent := debug.SetMemoryLimit(-1), debug.SetGCPercent(100)
	t.Cleanup(func() { debug.SetMemoryLimit(limit); debug.SetGCPercent(percent) })
	for _, name := range []string{"GOMEMLIMIT", "AUTOMEMLIMIT", "GOGC"} {
		t.Setenv(name, "") // so that it is put back
		os.Unsetenv(name)
	}
	debug.SetMemoryLimit(math.MaxInt64)
	limitMemory(zap.NewNop())
	if got := debug.SetMemoryLimit(-1); got <= 0 || got == math.MaxInt64 {
		t.Errorf("the limit is %d bytes, which is none", got)
	}
	if got := debug.SetGCPercent(100); got != gcPercent {
		t.Errorf("the heap may grow by %d %%, want %d", got, gcPercent)
	}

	t.Setenv("GOMEMLIMIT", "1GiB")
	debug.SetMemoryLimit(1 << 30) // as the runtime did when the process started
	limitMemory(zap.NewNop())
	if got := debug.SetMemoryLimit(-1); got != 1<<30 {
		t.Errorf("with GOMEMLIMIT=1GiB the limit is %d bytes", got)
	}
}
