package worker

import (
	"maps"
	"slices"
	"sync"

	"onejob/boottime"
	"onejob/tasks"
)

// suspects are tasks that the next crash would quarantine. A crash tells which of them
// is the cause if only one has begun a short while before. But a host that lost its power
// twice makes suspects of many innocent tasks, which must not wait for each other for
// long. So they begin in batches that double as long as nothing happens and some wait, from one on. If a
// crash meets several, those are counted beyond the limit, and from then on begin one by
// one. The zero value is ready.
type suspects struct {
	mu    sync.Mutex
	began map[int64]boottime.Instant // by fence
	lost  map[int64]boottime.Instant // by task: when those began that ended because their lease was lost
	batch int                        // how many may begin in this window
	left  int                        // of them
	since boottime.Instant           // when the window began
	alone bool                       // who began in it must be the only one
}

// enter reports whether a suspect may begin; a prime one is past the limit. What became of an
// earlier attempt of the same task says nothing against it.
func (s *suspects) enter(task, fence int64, prime bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := boottime.Now()
	if s.began == nil {
		s.began = map[int64]boottime.Instant{}
	}
	maps.DeleteFunc(s.lost, func(of int64, at boottime.Instant) bool { return of == task || now.Sub(at) >= 2*tasks.SuspectTime })
	if now.Sub(s.since) >= 4*tasks.SuspectTime { // suspects that wait come back sooner; these are others
		s.batch = 0
	}
	if s.batch == 0 || now.Sub(s.since) >= tasks.SuspectTime {
		s.batch = max(1, min(2*s.batch, 1024))
		s.left, s.since, s.alone = s.batch, now, false
	}
	switch {
	case s.left == 0, s.alone, prime && s.left < s.batch:
		return false
	}
	s.left--
	s.alone = prime
	s.began[fence] = now
	return true
}

// only reports whether the attempt is the only suspect that began lately.
func (s *suspects) only(fence int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := boottime.Now()
	recent := 0
	for _, at := range slices.Concat(slices.Collect(maps.Values(s.began)), slices.Collect(maps.Values(s.lost))) {
		if now.Sub(at) < 2*tasks.SuspectTime {
			recent++
		}
	}
	at, entered := s.began[fence]
	return entered && now.Sub(at) < 2*tasks.SuspectTime && recent == 1
}

// leave is called when it has ended. One that ended because its lease was lost counts as if it had
// not: all leases of a replica are lost together, and the handler that returns last is not the only
// suspect.
func (s *suspects) leave(task, fence int64, lost bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if at, entered := s.began[fence]; entered && lost {
		if s.lost == nil {
			s.lost = map[int64]boottime.Instant{}
		}
		s.lost[task] = at
	}
	delete(s.began, fence)
}
