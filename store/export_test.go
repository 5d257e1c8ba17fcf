package store

// TurnStuck reports whether the next claim will wait for its turn for a moment only.
func (s *Store) TurnStuck() bool { return s.turnStuck.Load() }
