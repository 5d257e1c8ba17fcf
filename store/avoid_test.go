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
	type step struct {
		ID   int64
		For  time.Duration
		What string
	}
	steps := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) step {
		return step{
			rapid.Int64Range(1, 3).Draw(t, "id"),
			time.Duration(rapid.IntRange(1, 400).Draw(t, "s")) * time.Second,
			rapid.SampledFrom([]string{"add", "pass", "wait"}).Draw(t, "what"),
		}
	}), 1, 30)
	rapid.Check(t, func(rt *rapid.T) {
		list := steps.Draw(rt, "steps")
		var got, want []int64
		synctest.Test(t, func(*testing.T) { // which a panic of rt's must not leave
			var s idSet
			waits, until := map[int64]time.Duration{}, map[int64]time.Time{}
			for _, step := range list {
				switch id := step.ID; step.What {
				case "add":
					waits[id] = min(max(step.For, 2*waits[id]), avoidFor)
					until[id] = time.Now().Add(waits[id])
					s.add(id, step.For)
				case "pass":
					until[id] = time.Now().Add(step.For)
					s.pass(id, step.For)
				case "wait":
					time.Sleep(step.For)
				}
				want = nil
				for id, u := range until {
					if time.Since(u) > avoidFor {
						delete(waits, id)
						delete(until, id)
					} else if time.Now().Before(u) {
						want = append(want, id)
					}
				}
				slices.Sort(want)
				if got = s.list(); !slices.Equal(got, want) {
					return
				}
			}
		})
		if !slices.Equal(got, want) {
			rt.Fatalf("%v are avoided, want %v", got, want)
		}
	})
}

// Of more rows than are remembered, any are forgotten. One that goes through all in order finds most of those
// that it begins with avoided, the next time.
func TestMostAvoidedRows(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var s idSet
		for id := range int64(maxAvoided + 10) {
			s.add(id, time.Minute+time.Duration(id)*time.Millisecond)
		}
		ids := s.list()
		if len(ids) != maxAvoided {
			t.Errorf("%d rows are avoided", len(ids))
		}
		if first := slices.IndexFunc(ids, func(id int64) bool { return id >= 100 }); first < 80 {
			t.Errorf("of the first 100 only %d are", first)
		}
	})
}
