package schedule

import "time"

// Ahead is a schedule that was worked on at a time which Postgres' clock has yet
// to reach.
type Ahead struct {
	ID               int64
	Name, Cron, Zone string
	Next             time.Time // due time
	Now              time.Time // by Postgres' clock
}
