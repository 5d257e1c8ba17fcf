package cli

import (
	"bytes"
	"context"
	"io"
	"strings"
	"testing"
	"testing/synctest"
)

// A payload that never comes is waited for until a signal ends the command.
func TestWaitForThePayloadIsInterrupted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stdin, writer := io.Pipe()
		ctx, interrupt := context.WithCancel(t.Context())
		var stdout, stderr bytes.Buffer
		ended := make(chan int, 1)
		go func() {
			ended <- run(ctx, Program{}, []string{"enqueue", "noop", "--payload", "-"}, stdin, &stdout, &stderr)
		}()
		synctest.Wait()
		interrupt()
		if code, want := <-ended, "onejob: interrupted; nothing was enqueued\n"; code != exitFailure || stdout.Len() > 0 || stderr.String() != want {
			t.Errorf("it ended with %d, %q %q; want %q", code, stdout.String(), stderr.String(), want)
		}
		_ = writer.Close()
	})
}

// The error names the flag, and not the field of the Go package that it becomes.
func TestANegativeDelayIsRefused(t *testing.T) {
	t.Parallel()
	var stdout, stderr bytes.Buffer
	code := run(t.Context(), Program{}, []string{"enqueue", "noop", "--in", "-5m"}, strings.NewReader(""), &stdout, &stderr)
	if want := "onejob: --in: -5m0s is below zero\n"; code != exitUsage || stderr.String() != want {
		t.Errorf("it ended with %d, %q; want %q", code, stderr.String(), want)
	}
}
