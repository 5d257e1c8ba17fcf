package worker

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

// A lookup that fails on and on is logged once, and once more when it does not; nothing is logged
// of an outage, nor right after it, nor of one that is cut short.
func TestLookupsThatFail(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, events := observer.New(zap.DebugLevel)
		l := lookups{log: zap.New(core)}
		broken := errors.New("no index")
		logged := func(what string, want ...string) {
			t.Helper()
			var got []string
			for _, e := range events.TakeAll() {
				got = append(got, e.Message+" "+fmt.Sprint(e.ContextMap()["lookup"]))
			}
			if fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("%s: logged %q, want %q", what, got, want)
			}
		}
		fail := func(d time.Duration) {
			for end := time.Now().Add(d); !time.Now().After(end); time.Sleep(time.Second) {
				l.saw("clock", broken)
				l.saw("sessions", nil)
			}
		}
		fail(lookupPatience / 2)
		l.saw("clock", nil)
		fail(lookupPatience / 2)
		l.saw("clock", fmt.Errorf("look: %w", context.Canceled))
		logged("a short while")
		fail(lookupPatience)
		logged("for long", "lookup_failed clock")
		fail(time.Hour)
		logged("again")
		l.saw("clock", nil)
		l.saw("clock", nil)
		logged("no more", "lookup_recovered clock")

		l.claimed(broken)
		fail(time.Hour)
		l.claimed(nil)
		fail(lookupPatience / 2)
		logged("an outage")
		fail(lookupPatience)
		logged("after it", "lookup_failed clock")
	})
}
