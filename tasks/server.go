package tasks

import (
	"errors"
	"fmt"
	"time"
)

// ErrOtherServer says that the connection led to another Postgres server than the one
// that the caller knows, or to one that was restarted. Nothing was done.
var ErrOtherServer = errors.New("this is another Postgres server, or it was restarted")

// A Server is a Postgres server, by what tells it from others.
type Server struct {
	System   string    `json:"system"`   // the system identifier, which copies of a data folder share
	Timeline int       `json:"timeline"` // rises when a copy becomes the primary, and when a backup is recovered to a point in time
	Started  time.Time `json:"started"`  // when it was started, in µs of its own clock: no two servers have the same
	Address  string    `json:"address"`  // where it listens, as it says itself; for people
	Standby  bool      `json:"-"`        // it follows a primary, and takes no writes
}

// UnknownSystem is the System of a server that does not tell, as where a provider keeps
// that to itself. Its Timeline is 0.
const UnknownSystem = "unknown"

// Same reports whether both are one server, which was not restarted.
func (s Server) Same(o Server) bool {
	return s.System == o.System && s.Timeline == o.Timeline && s.Started.Equal(o.Started)
}

// A ServerReport is what a server says of itself.
type ServerReport struct {
	Server
	Now       time.Time // by its clock
	LastFence int64     // the last number of onejob.fences; zero if none was given out

	// Sequence tells onejob.fences from one of another database, and from one that was dropped and made
	// again, as when a dump is loaded. Empty if the server does not tell.
	Sequence string

	// FencesFrom is what the database knows was added to these numbers last; -1 if it was
	// never on record.
	FencesFrom int64
}

func (s Server) String() string { return fmt.Sprintf("timeline %d at %s", s.Timeline, s.Address) }
