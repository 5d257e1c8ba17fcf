package testenv

import (
	"testing"
	"time"
)

// Pauses between the tries of Tries. They grow, as what a test waits for for long may cost a
// server more to ask for than to do, where many tests ask at once.
const (
	firstPause   = 5 * time.Millisecond
	longestPause = 50 * time.Millisecond
)

// Tries is for a loop that looks for something again and again, with a pause after each
// look, until it is left or the timeout is over. It looks at least once:
//
//	for range testenv.Tries(time.Minute) {
//		if done() {
//			return
//		}
//	}
//	t.Fatal("not within a minute")
func Tries(timeout time.Duration) func(yield func() bool) {
	return func(yield func() bool) {
		deadline := time.Now().Add(timeout)
		for pause := firstPause; yield() && time.Now().Before(deadline); pause = min(pause*5/4, longestPause) {
			time.Sleep(pause)
		}
	}
}

// Go runs f beside a test, which does not end before f has, however it ends: to report something
// after that would end the whole program, and all other tests with it. The test's context ends
// before the test waits for f.
func Go(t testing.TB, f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	t.Cleanup(func() { <-done })
}

// Eventually waits until condition holds, and fails the test when that takes
// longer than timeout. It reads as a sentence: eventually, within 5 s, "the task
// is done". The condition is called on the test's goroutine.
func Eventually(t testing.TB, timeout time.Duration, what string, condition func() bool) {
	t.Helper()
	for range Tries(timeout) {
		if condition() {
			return
		}
	}
	t.Fatalf("not within %v: %s", timeout, what)
}
