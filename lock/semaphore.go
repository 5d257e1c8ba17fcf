package lock

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"
)

// Errors of semaphores that callers branch on.
var (
	// ErrFull says that all slots are taken. It is an ordinary answer.
	ErrFull = errors.New("all slots are taken")

	// ErrNoSemaphore says that there is no semaphore of that name.
	ErrNoSemaphore = errors.New("there is no such semaphore")

	// ErrCannotList says that List has no names to look for, of a backend that cannot be asked which
	// semaphores there are.
	ErrCannotList = errors.New("the server cannot be asked for its limits: name them in the configuration")

	// ErrExists says that a semaphore of that name is there already.
	ErrExists = errors.New("the semaphore is there already")

	// ErrForeign says that what stands where the semaphore should be was written
	// by somebody else, for another purpose. It is never overwritten.
	ErrForeign = errors.New("what is there is no semaphore")

	// ErrInUse says that a semaphore whose slots are held was not destroyed.
	ErrInUse = errors.New("slots are held")
)

// MaxSlots is the highest limit that a semaphore may have, and MaxTake the most
// slots that one call of Take may ask for.
const (
	MaxSlots = 10_000
	MaxTake  = 100
)

// Semaphores are named limits: of each, at most so many slots are held at once,
// across all replicas and all others who take part. Its methods may be called by
// many goroutines at once.
//
// A semaphore outlives those who hold its slots. It is there until Destroy.
type Semaphores interface {
	// Create makes a semaphore, or returns ErrExists, or ErrForeign.
	Create(ctx context.Context, name string, slots int) error

	// Resize changes the limit, for all at once. A higher limit takes effect
	// immediately. After a lower one, Take succeeds only when fewer slots are held
	// than the new limit; held slots are not revoked. With zero slots nobody enters.
	Resize(ctx context.Context, name string, slots int) error

	// Inspect returns how a semaphore stands.
	Inspect(ctx context.Context, name string) (Semaphore, error)

	// List returns the names of all semaphores, sorted.
	List(ctx context.Context) ([]string, error)

	// Drain waits until no more slots are held than the limit says.
	Drain(ctx context.Context, name string) error

	// Destroy removes a semaphore. It returns ErrInUse while slots are held,
	// unless force says to revoke them.
	Destroy(ctx context.Context, name string, force bool) error

	// Take asks once for n slots, all or none, under the present session. Its
	// errors are ErrFull, ErrNoSemaphore, ErrForeign, ErrDelayed and ErrLost, or
	// the backend's own, in which case nothing is held. The value says who holds the
	// slots, for people who look. More than MaxTake slots are refused.
	Take(ctx context.Context, name string, n int, value []byte) ([]Lease, error)

	// Await returns nil when a slot may be free, immediately if one is. Waiters
	// poll rarely and at different moments.
	Await(ctx context.Context, name string) error
}

// Semaphore is how a semaphore stands.
type Semaphore struct {
	Name    string
	Slots   int
	Holders []SlotHolder
	Waiting int // how many have shown that they want a slot and hold none; -1 if the backend cannot tell
}

// SlotHolder is who holds a slot.
type SlotHolder struct {
	Session string    // or what the backend knows a holder by
	Value   []byte    // what the holder says of itself
	Since   time.Time // zero if the backend does not tell
}

// inspectAtOnce is how many semaphores InspectAll asks for at once.
const inspectAtOnce = 8

// InspectAll returns what Inspect says of each name, in the same order. It asks for 8 at a time:
// one whose holders do not answer takes long.
func InspectAll(ctx context.Context, s Semaphores, names []string) ([]Semaphore, []error) {
	list, errs := make([]Semaphore, len(names)), make([]error, len(names))
	busy := make(chan struct{}, inspectAtOnce)
	var wg sync.WaitGroup
	for i, name := range names {
		busy <- struct{}{}
		wg.Go(func() {
			list[i], errs[i] = s.Inspect(ctx, name)
			<-busy
		})
	}
	wg.Wait()
	return list, errs
}

// unfit are the characters that a semaphore's name may not have, besides slashes:
// control characters, white space, and what nobody sees or what turns the direction
// of text. The list is fixed, as Postgres has the same one; see migrations.
var unfit = &unicode.RangeTable{
	R16: []unicode.Range16{
		{0x0000, 0x0020, 1}, {0x007f, 0x00a0, 1}, {0x00ad, 0x00ad, 1}, {0x061c, 0x061c, 1}, {0x1680, 0x1680, 1}, {0x180e, 0x180e, 1},
		{0x2000, 0x200f, 1}, {0x2028, 0x202f, 1}, {0x205f, 0x206f, 1}, {0x3000, 0x3000, 1}, {0xfeff, 0xfeff, 1}, {0xfff9, 0xfffb, 1},
	},
	R32:         []unicode.Range32{{0xe0000, 0xe007f, 1}},
	LatinOffset: 3,
}

// CheckSemaphore returns an error if no semaphore can have that name or so many
// slots. Names are 1 to 100 bytes of UTF-8 without slashes, white space, control
// characters and invisible ones, and do not begin with a dot.
func CheckSemaphore(name string, slots int) error {
	switch {
	case name == "" || len(name) > 100:
		return fmt.Errorf("the name %.20q... of a limit has %d bytes, not 1 to 100", name, len(name))
	case !utf8.ValidString(name):
		return fmt.Errorf("the name %q of a limit is not valid UTF-8", name)
	case name[0] == '.':
		return fmt.Errorf("the name %q of a limit begins with a dot", name)
	case slots < 0 || slots > MaxSlots:
		return fmt.Errorf("limit %s: %d slots are not between 0 and %d", name, slots, MaxSlots)
	}
	for _, r := range name {
		if r == '/' || unicode.Is(unfit, r) {
			return fmt.Errorf("the name %q of a limit has %q in it; no slashes, white space, control characters or invisible ones", name, r)
		}
	}
	return nil
}
