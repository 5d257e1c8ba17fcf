package store

// TurnStuck reports whether the next claim will wait for its turn for a moment only.
func (s *Store) TurnStuck() bool { return s.turnStuck.Load() }

// ErrLocked is what Complete gives up with while another transaction has the row.
var ErrLocked = errLocked

// Forget lets the next claim begin at the first row of each lane.
func (s *Store) Forget() {
	s.remember.mu.Lock()
	defer s.remember.mu.Unlock()
	s.remember.sort = nil
}

// Duration is what a row's timeout is for Go.
var Duration = duration
