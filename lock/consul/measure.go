package consul

import "time"

// Measure says what a measurement is about, see Config.Measure.
type Measure int

const (
	// MeasureHeartbeat is a heartbeat that the agent acknowledged, and how long that took.
	MeasureHeartbeat Measure = iota

	// MeasureRenewal is a renewal of the session that a server acknowledged, and how long
	// that took.
	MeasureRenewal

	// MeasureAcquire is locks that were asked for together: how many, and how long the
	// answer took.
	MeasureAcquire

	// MeasureRelease is locks that were released together.
	MeasureRelease

	// MeasureLost is a session that was lost.
	MeasureLost
)

func (l *Locker) measure(what Measure, count int, took time.Duration) {
	if l.cfg.Measure != nil {
		l.cfg.Measure(what, count, took)
	}
}

// LeaseLeft returns how long leases will last if no further heartbeat is acknowledged, and
// zero while there is no session.
func (l *Locker) LeaseLeft() time.Duration {
	t := l.current()
	if t == nil {
		return 0
	}
	return max(0, t.deadline().Until())
}
