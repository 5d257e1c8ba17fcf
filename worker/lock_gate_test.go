package worker

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"onejob/lock"
)

// While locks fail, one task is claimed now and then, and not all again and again.
func TestClaimsPauseWhileLocksFail(t *testing.T) {
	var d lockGate
	broken := errors.New("Consul is unavailable")
	if n := d.pass(10); n != 10 {
		t.Errorf("%d of 10 pass", n)
	}
	if d.seen(nil) || d.seen(broken) || !d.close() || d.close() {
		t.Error("it closes once, at the first failure")
	}
	if n := d.pass(10); n != 0 {
		t.Errorf("%d pass at once", n)
	}
	d.next = time.Now() // its time has come
	if first, second := d.pass(10), d.pass(10); first != 1 || second != 0 {
		t.Errorf("%d pass, and then %d", first, second)
	}
	d.unused()
	if first, second := d.pass(10), d.pass(10); first != 1 || second != 0 {
		t.Errorf("after a claim that found nothing %d pass, and then %d", first, second)
	}
	if d.seen(broken) || d.seen(fmt.Errorf("17: %w", lock.ErrHeldHere)) {
		t.Error("it opens, and Consul has not answered")
	}
	if !d.seen(lock.ErrHeld) || d.seen(nil) {
		t.Error("it opens once, when Consul answers")
	}
	if n := d.pass(10); n != 10 {
		t.Errorf("%d of 10 pass after that", n)
	}
}
