package worker

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

func TestReportedNamesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r reported
		round := func() (told, more int) {
			for i := range 20000 {
				logOutcome, tellMore := r.first(fmt.Sprint("name", i))
				if logOutcome {
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
			if logOutcome, more := r.first("name"); logOutcome != want || more {
				t.Errorf("call %d: %v, %v", i, logOutcome, more)
			}
			time.Sleep(10 * reportedAgain)
		}
	})
}

func TestRequeueDelayGrows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r requeues
		for _, want := range []int{1, 2, 4, 8, 16, 30, 30} {
			if got := r.next(7); got != time.Duration(want)*time.Second {
				t.Errorf("it waits %v, want %d s", got, want)
			}
			time.Sleep(time.Minute)
		}
		time.Sleep(requeueForgotten)
		if got := r.next(7); got != requeueMin {
			t.Errorf("after it has not come back for long it waits %v", got)
		}
		if got := r.next(8); got != requeueMin {
			t.Errorf("another task waits %v", got)
		}
	})
}

func TestRequeuedTasksAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r requeues
		round := func(from int64) (last time.Duration) {
			for id := from; id < from+20000; id++ {
				last = r.next(id)
			}
			if len(r.tasks) != maxRequeued {
				t.Errorf("%d tasks are remembered, want %d", len(r.tasks), maxRequeued)
			}
			return last
		}
		if got := round(0); got != requeueMax {
			t.Errorf("a task beyond those that are remembered waits %v", got)
		}
		time.Sleep(requeueForgotten + time.Second)
		if got := r.next(50000); got != requeueMin {
			t.Errorf("a new task waits %v, although the old ones are gone", got)
		}
		round(100000)
	})
}
