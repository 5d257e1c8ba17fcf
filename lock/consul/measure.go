package consul

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
