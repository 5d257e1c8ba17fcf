package schedule

import "time"

// Ahead is a schedule whose next due time is in the future.
type Ahead struct {
	ID               int64
	Name, Cron, Zone string
	Next             time.Time  // due time
	Now              time.Time  // by Postgres' clock
	Paused           *time.Time // no due times before this; nil if it was not paused
	Begin            *time.Time // nor up to this: the last edit, or the last one that was made; nil if that is not known
}

// From returns the first due time after now that no pause leaves out.
func (a Ahead) From(c Cron) time.Time { return c.after(a.Now, a.Paused) }

// ByTheZone returns the next due time by the rules that the zone has here: Next, if it was worked out
// by the same ones.
func (a Ahead) ByTheZone(c Cron) time.Time {
	if a.Begin == nil {
		return a.Next
	}
	next := c.believed(a.Next, a.Begin)
	if !next.Equal(a.Next) {
		next = c.notBefore(next, a.Paused)
	}
	return next
}
