//go:build !linux

package worker

import (
	"context"
	"errors"
	"fmt"
	"os"

	"go.uber.org/zap"
)

var errLinux = errors.New("worker: the supervisor needs Linux; use Worker.Run without one to develop on another system")

// Supervise needs Linux. On other systems it says so on stderr and returns 2.
func Supervise(*zap.Logger, func(context.Context, *Process) error) (exitCode int) {
	fmt.Fprintln(os.Stderr, errLinux)
	return 2
}

// Process is the working process of a supervisor, which needs Linux.
type Process struct{}

// Reporting returns false.
func (*Process) Reporting() bool { return false }

// Run returns an error.
func (*Process) Run(context.Context, Config) error { return errLinux }
