package lock

import (
	"context"
	"errors"
)

// ErrOtherCluster says that the backend, as it is reached now, belongs to another cluster,
// or that nobody can tell. No session begins there.
var ErrOtherCluster = errors.New("this is not the cluster's own lock service")

// A Cluster is the replicas that share tasks. It knows which backend they share, and
// keeps a list of them beside the backend's own: a second witness of who is alive.
//
// The id of the cluster is kept in both places. A backend that was reached by mistake,
// or was rebuilt, has another one or none. To a replica there, all others would seem
// dead: their sessions are unknown.
type Cluster interface {
	// Process returns the identity of the process whose sessions these are, a uuid.
	Process() string

	// ID returns the id that the list has; empty if there is none yet.
	ID(ctx context.Context) (string, error)

	// Adopt makes a backend that does not have the id the cluster's own, if it is
	// certain that no replica works under another one: every replica that may be
	// alive is among known. It calls write with the new id, which is made durable in
	// the backend first, and after that in the list. It returns an error that wraps
	// ErrOtherCluster if it is not certain, and does nothing if the list's id is no longer
	// the one that the caller has read.
	Adopt(ctx context.Context, id string, known Known, write func(ctx context.Context, id string) error) error

	// Join puts a new session on the list, unless the id there is another one by now,
	// which it reports as ErrOtherCluster.
	Join(ctx context.Context, id, session string) error

	// Leave says that nobody works under a session any more: it was lost, or ended in
	// order.
	Leave(ctx context.Context, session string, lost bool) error

	// Silent reports whether the list, asked anew, has heard no heartbeat of a session for
	// [Silence]. A backend asks for that when its own silence is long enough: a heartbeat that
	// came before has prolonged leases, and one that comes later finds none. It returns an error
	// if the list cannot be had.
	Silent(ctx context.Context, session string) (bool, error)
}

// Known is what a backend knows when it does not have the cluster's id.
type Known struct {
	Sessions []string // that are alive
	Foreign  bool     // it has another cluster's id
}
