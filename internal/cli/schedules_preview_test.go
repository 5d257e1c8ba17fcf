package cli

import (
	"testing"
	"time"

	"onejob/tasks/schedule"
)

// An interval goes on from the next due time of the row, however long ago a person has put that.
func TestPreviewOfAnIntervalFromLongAgo(t *testing.T) {
	t.Parallel()
	start := time.Date(2026, 3, 1, 12, 0, 0, 500, time.UTC)
	for _, test := range []struct{ line, known, want string }{
		{"@every 1s", "0001-01-01T00:00:00Z", "2026-03-01T12:00:01Z"},
		{"@every 7s", "2026-03-01T11:59:50.25Z", "2026-03-01T12:00:04Z"},
		{"@every 24h", "1700-01-01T06:00:00Z", "2026-03-02T06:00:00Z"},
		{"@every 1h", "2026-03-01T13:30:00Z", "2026-03-01T13:30:00Z"},
	} {
		s, err := schedule.Parse(test.line, "UTC")
		if err != nil {
			t.Fatal(err)
		}
		known, err := time.Parse(time.RFC3339, test.known)
		if err != nil {
			t.Fatal(err)
		}
		got := make(chan []dueTime, 1)
		go func() { got <- nextDueTimes(s, test.line, "UTC", start, &known, 1) }()
		select {
		case dues := <-got:
			if len(dues) == 0 {
				t.Fatalf("%s from %s has no due time", test.line, test.known)
			}
			if at := dues[0].DueAt.At.Format(time.RFC3339Nano); at != test.want {
				t.Errorf("%s from %s is due at %s, want %s", test.line, test.known, at, test.want)
			}
		case <-time.After(time.Minute):
			t.Errorf("%s from %s: no answer within a minute", test.line, test.known)
		}
	}
}
