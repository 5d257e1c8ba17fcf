package testenv

import (
	"testing"
	"time"
)

// Eventually waits until condition holds, and fails the test when that takes
// longer than timeout. It reads as a sentence: eventually, within 5 s, "the task
// is done". The condition is called on the test's goroutine.
func Eventually(t testing.TB, timeout time.Duration, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(timeout); !condition(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", timeout, what)
		}
	}
}
