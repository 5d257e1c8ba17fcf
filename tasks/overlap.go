package tasks

import "time"

// Overlap is a pair of attempts on one lock key that were at work at once, as
// onejob.overlaps has it.
type Overlap struct {
	LockKey           string
	Task, OtherTask   int64
	Fence, OtherFence int64 // that of the other is higher
	Replica           string
	OtherReplica      string
	Began, Ended      time.Time     // by Postgres' clock
	Age               time.Duration // since Ended, by that clock, when it was found
}
