package store

import (
	"fmt"
	"math"
	"testing"
	"time"
)

// Postgres 13 reads 32 bits of each field of an interval.
func TestIntervalsHaveSmallFields(t *testing.T) {
	for _, d := range []time.Duration{0, time.Microsecond, 36 * time.Hour, -36*time.Hour - time.Microsecond, math.MaxInt64, math.MinInt64} {
		var hours, seconds, microseconds int32
		if _, err := fmt.Sscanf(interval(d), "%d hours %d seconds %d microseconds", &hours, &seconds, &microseconds); err != nil {
			t.Fatalf("%s: %v", interval(d), err)
		}
		got := time.Duration(hours)*time.Hour + time.Duration(seconds)*time.Second + time.Duration(microseconds)*time.Microsecond
		if want := d.Truncate(time.Microsecond); got != want {
			t.Errorf("%v is %s, which is %v", d, interval(d), got)
		}
	}
}
