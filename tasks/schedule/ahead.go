package schedule

import "time"

// Ahead is a schedule that was worked on at a time which Postgres' clock has yet
// to reach.
type Ahead struct {
	ID               int64
	Name, Cron, Zone string
	Next             time.Time  // due time
	Now              time.Time  // by Postgres' clock
	Paused           *time.Time // no due times before this; nil if it was not paused
}

// From returns the first due time after now that no pause leaves out.
func (a Ahead) From(c Cron) time.Time { return c.after(a.Now, a.Paused) }
