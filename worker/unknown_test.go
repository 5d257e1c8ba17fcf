package worker

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"onejob/tasks"
)

func TestReportedNamesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r reported
		round := func() (told, more int) {
			for i := range 20000 {
				tell, tellMore := r.first(fmt.Sprint("name", i))
				if tell {
					told++
				}
				if tellMore {
					more++
				}
			}
			return told, more
		}
		want := func(what string, wantTold, wantMore int) {
			t.Helper()
			if told, more := round(); told != wantTold || more != wantMore || len(r.names) > maxReported {
				t.Errorf("%s: %d names and %d times that there are more, want %d and %d; %d are kept", what, told, more, wantTold, wantMore, len(r.names))
			}
		}
		want("at first", maxReported, 1)
		want("again", 0, 0)
		time.Sleep(reportedAgain + time.Second)
		want("an hour later", maxReported, 1)
	})
}

func TestNamesAreReportedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r reported
		for i, want := range []bool{true, false, false} {
			if tell, more := r.first("name"); tell != want || more {
				t.Errorf("call %d: %v, %v", i, tell, more)
			}
			time.Sleep(10 * reportedAgain)
		}
	})
}

func TestRequeueDelayGrowsWithTheAge(t *testing.T) {
	now := time.Now()
	for age, want := range map[time.Duration]time.Duration{
		-time.Hour:       time.Second, // the clocks disagree
		0:                time.Second,
		10 * time.Second: time.Second,
		50 * time.Second: 5 * time.Second,
		time.Hour:        30 * time.Second,
	} {
		if got := requeueDelay(&tasks.Task{CreatedAt: now.Add(-age)}, now); got != want {
			t.Errorf("a task that is %v old waits %v, want %v", age, got, want)
		}
	}
	if got := requeueDelay(&tasks.Task{}, now); got != 30*time.Second {
		t.Errorf("a task of unknown age waits %v", got)
	}
}
