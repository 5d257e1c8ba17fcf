package store

import (
	"encoding/json"
	"errors"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

// Time is a timestamptz as people see it: a moment, or one of the two infinities
// that Postgres has. A run_at of infinity parks a row.
type Time struct {
	At       time.Time
	Infinite pgtype.InfinityModifier // pgtype.Finite for a moment
}

// ScanTimestamptz implements [pgtype.TimestamptzScanner].
func (t *Time) ScanTimestamptz(v pgtype.Timestamptz) error {
	if !v.Valid {
		return errors.New("cannot scan NULL into a store.Time; use a pointer to one")
	}
	*t = Time{v.Time, v.InfinityModifier}
	return nil
}

// String returns the time as RFC 3339 has it, "infinity" or "-infinity".
func (t Time) String() string {
	if t.Infinite != pgtype.Finite {
		return t.Infinite.String()
	}
	return t.At.Format(time.RFC3339Nano)
}

// MarshalJSON returns a string. Years beyond 9999, which Postgres has and
// time.Time refuses here, have more digits.
func (t Time) MarshalJSON() ([]byte, error) { return json.Marshal(t.String()) }

// Sub returns the duration t-u, and false unless both are moments.
func (t Time) Sub(u Time) (d time.Duration, ok bool) {
	if t.Infinite != pgtype.Finite || u.Infinite != pgtype.Finite {
		return 0, false
	}
	return t.At.Sub(u.At), true
}
