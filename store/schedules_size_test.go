package store

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"onejob/tasks"
	"onejob/tasks/schedule"
)

// How many rows a statement of retention deletes comes down when it takes too long, and goes
// up again from there.
func TestSizeOfRetention(t *testing.T) {
	t.Parallel()
	var k kept
	const s = tasks.StatusFailed
	var got []int
	look := func() { got = append(got, k.most(s, 1000)) }
	k.grow(s, 8)
	look()
	k.shrink(s, 4)
	look()
	k.grow(s, 8)
	look()
	k.grow(s, 2)
	look()
	k.grow(s, 4000)
	look()
	if want := "[1000 4 8 8 1000]"; fmt.Sprint(got) != want {
		t.Errorf("%v, want %s", got, want)
	}
	if n := k.most(tasks.StatusSucceeded, 1000); n != 1000 {
		t.Errorf("%d of another status", n)
	}
}

// How many due times a statement makes comes down when it takes too long, and goes up again. What was
// planned before counts only for the plan that follows it.
func TestSizeOfPlans(t *testing.T) {
	t.Parallel()
	var parts dueParts
	next, other := time.Unix(100, 0), time.Unix(200, 0)
	var got []string
	look := func(d schedule.Due) {
		d.ID = 1
		parts.bound(&d)
		got = append(got, fmt.Sprint(d.Most, d.Part.Missed))
	}
	more := func(n, missed int) schedule.Plan {
		return schedule.Plan{Occurrences: make([]schedule.Occurrence, n), More: true, Next: next, Part: schedule.Part{Planned: n, Missed: missed}}
	}
	parts.made(1, more(1000, 5), false)
	look(schedule.Due{Next: &next})
	parts.shrink(1, 1000)
	look(schedule.Due{Next: &next})
	parts.made(1, more(125, 7), false)
	look(schedule.Due{Next: &next})
	look(schedule.Due{Next: &other}) // another leader was here
	look(schedule.Due{})
	parts.made(1, more(125, 8), true)
	look(schedule.Due{Next: &next})
	cut := more(250, 9)
	cut.Cut, cut.CutNext = 3, other
	parts.made(1, cut, false)
	look(schedule.Due{Next: &next})
	look(schedule.Due{Next: &next, Former: []schedule.Former{{ID: 3, Next: &other}}})
	parts.shrink(1, 250)
	look(schedule.Due{Former: []schedule.Former{{ID: 3, Next: &other}}})
	parts.shrink(1, 7)
	look(schedule.Due{})
	parts.made(1, schedule.Plan{Next: next}, false)
	look(schedule.Due{Next: &next})
	if want := "[0 0 125 0 125 7 125 0 125 0 250 8 250 0 250 9 31 9 1 0 0 0]"; fmt.Sprint(got) != want {
		t.Errorf("%v, want %s", got, want)
	}
}

// A row that cannot be deleted is passed over, and others of its time are not, until they are too many.
func TestRowsThatArePassedOver(t *testing.T) {
	t.Parallel()
	var k kept
	const s = tasks.StatusFailed
	var got []string
	look := func() {
		until, skip := k.until(s)
		got = append(got, fmt.Sprint(until, len(skip)))
	}
	k.until(s)
	k.passedOver(s, 1, 10)
	k.passedOver(s, 2, 10)
	look()
	k.passed(s, 9) // others of that time were deleted
	look()
	k.passedOver(s, 3, 11)
	look()
	k.passed(s, 20)
	look()
	for id := range int64(maxSkipped) {
		k.passedOver(s, id, 30)
	}
	look()
	k.passedOver(s, maxSkipped, 30)
	look()
	if want := "[9 2 9 2 10 1 20 0 29 1000 30 0]"; fmt.Sprint(got) != want {
		t.Errorf("%v, want %s", got, want)
	}
}

// What cannot be deleted is tried again after an hour, and later if finding it took long. Occurrences do
// not wait for that.
func TestRetentionBeginsAgain(t *testing.T) {
	t.Parallel()
	for waste, hours := range map[time.Duration]int{0: 1, 6 * time.Minute: 2, 10 * time.Hour: 24} {
		synctest.Test(t, func(t *testing.T) {
			var k kept
			const s = tasks.StatusFailed
			k.until(s)
			k.madeAt()
			k.passedOver(s, 1, 10)
			k.passedMadeAt(time.Unix(1, 0))
			k.wasted(waste)
			for hour := range hours + 1 {
				_, skip := k.until(s)
				if passed := len(skip) == 1; passed != (hour < hours) {
					t.Errorf("%v were wasted: after %d h the row is passed over: %t", waste, hour, passed)
				}
				if again := k.madeAt().IsZero(); again != (hour > 0) {
					t.Errorf("%v were wasted: after %d h occurrences begin again: %t", waste, hour, again)
				}
				time.Sleep(time.Hour + time.Second)
			}
		})
	}
}
