package harness

import (
	"context"
	"fmt"
	"time"

	"onejob/internal/retry"
)

// Eventually calls f until it returns nil, or ctx ends, or maxWait is over.
func Eventually(ctx context.Context, maxWait time.Duration, what string, f func() error) error {
	deadline := time.Now().Add(maxWait)
	for {
		err := f()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("not within %v: %s: %w", maxWait, what, err)
		}
		retry.Pause(ctx, 100*time.Millisecond)
	}
}
