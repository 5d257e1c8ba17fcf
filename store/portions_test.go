package store

import (
	"testing"
	"time"
)

// passPortions looks at all portions once, and returns what the dearest look and all together cost.
func passPortions(t *testing.T, p *portions, now time.Time, cost func(from, to place) time.Duration) (most time.Duration, looks int, total time.Duration) {
	t.Helper()
	var last place
	for {
		from, to := p.next()
		if from != last {
			t.Fatalf("after %v comes %v", last, from)
		}
		if !to.at.IsZero() && (to.at.Before(from.at) || to.at.Equal(from.at) && to.id <= from.id) {
			t.Fatalf("a portion from %v to %v", from, to)
		}
		if to.ofAMoment() && !to.at.Equal(from.at) {
			t.Fatalf("a portion from %v ends among rows of one time, at %v", from, to)
		}
		last = to
		c := cost(from, to)
		most = max(most, c)
		looks++
		if total, all := p.looked(c, now); all {
			if !last.at.IsZero() {
				t.Fatalf("the last one ends at %v", last)
			}
			return most, looks, total
		}
	}
}

// Rows that one statement inserted have one time. They are divided by their IDs, however high these
// are and however long ago that was.
func TestPortionsOfOneMoment(t *testing.T) {
	t.Parallel()
	const rows = 20_000_000
	now := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	for _, at := range []time.Time{
		now.Add(-time.Second), now.Add(-20*time.Minute + 123456*time.Microsecond), now.AddDate(0, -1, 0), now.AddDate(-3, 0, 0),
	} {
		for _, first := range []int64{1, 5_000_000_000, 1 << 60} {
			// rowsBefore is how many are before a place.
			rowsBefore := func(p place) int64 {
				switch {
				case p.at.Before(at):
					return 0
				case p.at.After(at):
					return rows
				}
				return min(rows, max(0, max(p.id, first)-first))
			}
			var p portions
			cost := func(from, to place) time.Duration {
				n := int64(rows)
				if !to.at.IsZero() {
					n = rowsBefore(to)
				}
				return time.Duration(n-rowsBefore(from)) * time.Microsecond
			}
			passes := 0
			for most := time.Hour; most > 2*p.long(); passes++ {
				if passes == 60 {
					t.Errorf("rows of %v from ID %d on: the dearest look still takes %v", at, first, most)
					break
				}
				most, _, _ = passPortions(t, &p, now, cost)
			}
			if n := len(p.bounds); n > maxPortions {
				t.Errorf("rows of %v from ID %d on: %d portions", at, first, n+1)
			}
		}
	}
}

// Whatever looks cost, the portions are all of time, one after the other, and none stays
// so large, or so small, that it matters.
func TestPortions(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	began := now.Add(-20 * time.Minute)
	var p portions
	// 2 s for what came in the last twenty minutes, and nothing for all before it.
	cost := func(from, to time.Time) time.Duration {
		if from.Before(began) {
			from = began
		}
		if to.IsZero() || to.After(now) {
			to = now
		}
		return max(0, to.Sub(from)) / 600
	}
	cycle := func() (most time.Duration, looks int, total time.Duration) {
		return passPortions(t, &p, now, func(from, to place) time.Duration { return cost(from.at, to.at) })
	}
	if most, looks, total := cycle(); looks != 1 || most != 2*time.Second || total != most {
		t.Errorf("the first time: %d looks of up to %v, %v in all", looks, most, total)
	}
	for range 4 {
		cycle()
	}
	if most, looks, total := cycle(); looks < 200 || looks > 1000 || most > 2*longPortion || total < 1990*time.Millisecond || total > 2*time.Second {
		t.Errorf("later: %d looks of up to %v, %v in all", looks, most, total)
	}
	began = now // the old snapshot has ended
	for range 10 {
		cycle()
	}
	if _, looks, total := cycle(); looks > 2 || total > 0 {
		t.Errorf("in the end: %d looks, %v", looks, total)
	}
}

// One look that takes long, as on a machine that does not get to run, puts no other off. Two do.
func TestRestAfterLongLooks(t *testing.T) {
	l := &lanes{}
	due := func() bool {
		_, due := l.toLookBehind(time.Now(), true)
		return due
	}
	l.looked(l.look(10), chosen{took: 2 * time.Second})
	l.lookBehind()()
	if !l.expensive || !due() {
		t.Error("a claim that took long puts off the look behind")
	}
	l.lookedBehind(lookBehind{took: 2 * time.Second, looks: 1}, nil)
	if due() {
		t.Error("there is no rest after two looks that took long")
	}
	l.since = l.since.Add(-restFactor * maxCharge)
	if !due() {
		t.Error("the rest does not end")
	}
	l.lookedBehind(lookBehind{looks: 1}, nil)
	if !due() {
		t.Error("the look before the last one took long, and puts off the next one")
	}
}

// Looks that are slow because they wait for a processor, for minutes, do not leave so many
// portions behind that those of a machine that is quick again take minutes. The newest portion is
// looked at in each call.
func TestPortionsAfterABusyTime(t *testing.T) {
	t.Parallel()
	l := &lanes{expensive: true}
	call := func(took time.Duration) (portions int, all bool) {
		l.since = time.Time{} // it has rested
		began := time.Now()
		for ; portions < 2 && !all; portions++ {
			p, due := l.toLookBehind(began, portions == 0)
			if !due {
				t.Fatal("it is not time")
			}
			if portions == 0 && !p.to.at.IsZero() {
				t.Fatalf("the first portion ends at %v", p.to)
			}
			p.took, p.looks = took, slowLooks
			all = l.lookedBehind(p, nil)
		}
		return portions, all
	}
	for range 1000 {
		call(300 * time.Millisecond)
	}
	if n := len(l.behind.bounds); n > maxPortions {
		t.Errorf("there are %d portions", n+1)
	}
	calls := 0
	for l.expensive && calls < 2*maxPortions+10 {
		call(2 * time.Millisecond)
		calls++
	}
	if l.expensive {
		t.Errorf("after %d calls claims still do not look themselves", calls)
	}
}

// What LookBehind finds while a claim is on its way is not forgotten when that ends further on.
func TestAClaimOnItsWayForgetsNoFind(t *testing.T) {
	t.Parallel()
	at := func(second int) mark { return mark{runAt: time.Unix(int64(second), 0), busy: map[string]bool{}} }
	for name, before := range map[string]map[int64]mark{"with marks": {7: at(10)}, "without": nil} {
		l := &lanes{expensive: true, marks: before}
		l.lookBehind()()
		k := l.look(10)
		l.marks = map[int64]mark{7: at(15)} // another claim has been quicker
		l.lookedBehind(lookBehind{looks: 1, newest: true}, map[int64]mark{7: at(5)})
		l.looked(k, chosen{picked: 10, took: time.Second, ends: map[int64]mark{7: at(20)}})
		if got := l.look(10).marks[7]; !got.runAt.Equal(at(5).runAt) {
			t.Errorf("%s: the next claim begins at %v", name, got.runAt)
		}
		l.looked(l.look(10), chosen{picked: 10, ends: map[int64]mark{7: at(21)}})
		if got := l.look(10).marks[7]; !got.runAt.Equal(at(21).runAt) {
			t.Errorf("%s: after that one claims go on at %v", name, got.runAt)
		}
	}
}
