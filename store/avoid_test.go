package store

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

// Rows are avoided for as long as they were added for, twice as long each time, and are passed over
// without growing more so.
func TestAvoidedRows(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		synctest.Test(t, func(*testing.T) {
			var s idSet
			waits, until := map[int64]time.Duration{}, map[int64]time.Time{}
			for range rapid.IntRange(1, 30).Draw(rt, "steps") {
				id := rapid.Int64Range(1, 3).Draw(rt, "id")
				d := time.Duration(rapid.IntRange(1, 400).Draw(rt, "s")) * time.Second
				switch rapid.IntRange(0, 2).Draw(rt, "what") {
				case 0:
					waits[id] = min(max(d, 2*waits[id]), avoidFor)
					until[id] = time.Now().Add(waits[id])
					s.add(id, d)
				case 1:
					until[id] = time.Now().Add(d)
					s.pass(id, d)
				case 2:
					time.Sleep(d)
				}
				var want []int64
				for id, u := range until {
					if time.Since(u) > avoidFor {
						delete(waits, id)
						delete(until, id)
					} else if time.Now().Before(u) {
						want = append(want, id)
					}
				}
				slices.Sort(want)
				if got := s.list(); !slices.Equal(got, want) {
					rt.Fatalf("%v are avoided, want %v", got, want)
				}
			}
		})
	})
}

// Of more rows than are remembered, those that would be tried first are forgotten.
func TestMostAvoidedRows(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var s idSet
		for id := range int64(maxAvoided + 10) {
			s.add(id, time.Minute+time.Duration(id)*time.Millisecond)
		}
		if ids := s.list(); len(ids) != maxAvoided || ids[0] != 10 {
			t.Errorf("%d rows are avoided, from row %d on", len(ids), ids[0])
		}
	})
}
