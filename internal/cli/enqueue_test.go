package cli

import (
	"bytes"
	"context"
	"io"
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
