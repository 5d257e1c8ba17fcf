package worker

import (
	"sync"
	"time"

	"onejob/internal/boottime"
)

// suspectTime is for how long a suspect has this replica's other suspects wait. One
// that has run for longer is not what ends a process at once.
const suspectTime = time.Minute

// suspects are tasks that the next crash would quarantine. They begin one at a time,
// so that a crash tells which of them was the cause. The zero value is ready.
type suspects struct {
	mu    sync.Mutex
	began map[int64]boottime.Instant // by fence
}

// enter reports whether a suspect may begin.
func (s *suspects) enter(fence int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := boottime.Now()
	for _, at := range s.began {
		if now.Sub(at) < suspectTime {
			return false
		}
	}
	if s.began == nil {
		s.began = map[int64]boottime.Instant{}
	}
	s.began[fence] = now
	return true
}

// leave is called when it has ended.
func (s *suspects) leave(fence int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.began, fence)
}
