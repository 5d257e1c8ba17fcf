package batch_test

import (
	"sync"
	"testing"
	"testing/synctest"

	"onejob/internal/batch"
)

func TestGroup(t *testing.T) {
	t.Run("AloneAtOnce", func(t *testing.T) {
		var sizes []int
		g := batch.Group[*int]{Max: 8, Commit: func(vs []*int) { sizes = append(sizes, len(vs)) }}
		for range 3 {
			g.Do(new(int))
		}
		if len(sizes) != 3 || sizes[0] != 1 || sizes[1] != 1 || sizes[2] != 1 {
			t.Errorf("three callers one after another made commits of %v, want three of 1", sizes)
		}
	})

	t.Run("TogetherWhatArrivesMeanwhile", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			release := make(chan struct{})
			var sizes []int
			g := batch.Group[*int]{Max: 4, Commit: func(vs []*int) {
				<-release
				sizes = append(sizes, len(vs))
				for _, v := range vs {
					*v = len(sizes)
				}
			}}
			values := make([]int, 10)
			var wg sync.WaitGroup
			for i := range values {
				wg.Go(func() { g.Do(&values[i]) })
				synctest.Wait() // the first one commits, the others queue up in order
			}
			close(release)
			wg.Wait()
			if want := []int{1, 4, 4, 1}; len(sizes) != 4 || sizes[0] != want[0] || sizes[1] != want[1] || sizes[2] != want[2] || sizes[3] != want[3] {
				t.Errorf("ten callers with at most 4 a commit made commits of %v, want %v", sizes, want)
			}
			for i, v := range values {
				if v == 0 {
					t.Errorf("caller %d got no answer", i)
				}
			}
		})
	})

	t.Run("NoMoreThanParallel", func(t *testing.T) {
		var mu sync.Mutex
		var now, most, total int
		g := batch.Group[*int]{Max: 3, Parallel: 2, Commit: func(vs []*int) {
			mu.Lock()
			now++
			most = max(most, now)
			total += len(vs)
			mu.Unlock()
			mu.Lock()
			now--
			mu.Unlock()
		}}
		var wg sync.WaitGroup
		for range 64 {
			wg.Go(func() {
				for range 100 {
					g.Do(new(int))
				}
			})
		}
		wg.Wait()
		if total != 6400 || most > 2 {
			t.Errorf("committed %d values with up to %d commits at once, want 6400 and at most 2", total, most)
		}
	})

	t.Run("PanicDoesNotStrandTheOthers", func(t *testing.T) {
		calls := 0
		g := batch.Group[*int]{Max: 1, Commit: func([]*int) {
			if calls++; calls == 1 {
				panic("boom")
			}
		}}
		func() {
			defer func() { _ = recover() }()
			g.Do(new(int))
		}()
		g.Do(new(int))
		if calls != 2 {
			t.Errorf("after a panic, %d commits were made, want 2", calls)
		}
	})
}

func BenchmarkGroup(b *testing.B) {
	g := batch.Group[*int]{Max: 128, Parallel: 2, Commit: func([]*int) {}}
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			g.Do(new(int))
		}
	})
}
