package store

// TurnStuck reports whether the next claim will wait for its turn for a moment only.
func (s *Store) TurnStuck() bool { return s.turnStuck.Load() }

// ErrLocked is what Complete gives up with while another transaction has the row.
var ErrLocked = errLocked
