package worker

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/robfig/cron/v3"
	"go.uber.org/zap"

	"onejob/internal/logging"
	"onejob/lock"
	"onejob/tasks"
)

// Config says what a [Worker] works with. The first three fields are required; the zero
// value of any other one means its default.
type Config struct {
	Store Store
	Locks lock.Locker
	Kinds tasks.Kinds

	Replica       string        // name of this replica in rows and logs
	Version       string        // of the program, for people
	Process       string        // UUID of this process, the same for all its sessions; default a new one
	Concurrency   int           // how many tasks run at once; default 32
	PayloadMemory int           // bytes of payloads held in memory at once; default 128 MiB, at least MaxPayload
	Queues        []string      // queues to serve; default all
	Poll          string        // cron spec for polling the table; default @every 1s
	PollOnly      bool          // do not LISTEN
	Timeout       time.Duration // of an attempt whose row has none; default none
	MaxCrashes    int           // replicas that may die or stall during a task before it is quarantined; default 3
	RetryBase     time.Duration // wait before the second attempt, doubled for each further one; default 1 s
	RetryMax      time.Duration // longest wait before an attempt; default 1 h
	LockDelay     time.Duration // wait before a lock whose holder died is requested again; default lock.DefaultLockDelay
	ShutdownGrace time.Duration // how long running work may continue after ctx ended; default 30 s
	Log           *zap.Logger   // default: JSON on stderr, from level info on; zap.NewNop() for none. Attempts wait for it, so it must not block

	// Measure is called with what the replica does, for metrics; nil for none. It is called
	// on the hot path by many goroutines at once, and must not block.
	Measure func(Measurement)

	// Tracer follows tasks for distributed tracing; nil for none.
	Tracer Tracer

	// Limits serves rows with a limit; if it is nil, those rows wait. A limit that
	// does not exist is created with its LimitSlots; if it has none, its rows wait.
	// A row without a limit has the one of its kind in KindLimits, if there is one.
	//
	// LimitsBackend names where Limits are kept, such as consul. A replica takes no slots
	// while one lives that began before it and names another backend: of two backends,
	// each would let in as many as the limit says. Empty means that nobody compares.
	Limits        lock.Semaphores
	LimitsBackend string
	LimitSlots    map[string]int
	KindLimits    map[string]string

	// The leader deletes tasks that finished longer ago than this. Default 7 days
	// for succeeded tasks, 30 for failed and cancelled ones. A row's keep_for
	// overrides both.
	KeepSucceeded  time.Duration
	KeepFailed     time.Duration
	RetentionEvery time.Duration // how often the leader deletes; default 1 min

	// The leader logs transactions that have held back vacuum for longer; default 5 min.
	SnapshotAge time.Duration

	// OverlapsEvery is how often the leader searches for overlapping attempts and logs
	// them. Default 1 minute.
	OverlapsEvery time.Duration
}

// MaxPayload is the longest payload of a task, in bytes.
const MaxPayload = 4 << 20

// ParsePoll parses when to poll the table: a cron spec with optional seconds, or a
// descriptor such as @every 5s. It is about the zone of the machine: a zone in the spec is an error.
func ParsePoll(spec string) (cron.Schedule, error) {
	if strings.HasPrefix(spec, "TZ=") || strings.HasPrefix(spec, "CRON_TZ=") {
		return nil, errors.New("it has a time zone: write it without, for the zone of the machine")
	}
	return cron.NewParser(cron.SecondOptional | cron.Minute | cron.Hour | cron.Dom | cron.Month | cron.Dow | cron.Descriptor).Parse(spec)
}

// WithDefaults returns the configuration with every zero field filled.
func (c Config) WithDefaults() Config {
	c.Concurrency = cmp.Or(c.Concurrency, 32)
	c.PayloadMemory = cmp.Or(c.PayloadMemory, 128<<20)
	c.Poll = cmp.Or(c.Poll, "@every 1s")
	c.MaxCrashes = cmp.Or(c.MaxCrashes, 3)
	c.RetryBase = cmp.Or(c.RetryBase, time.Second)
	c.RetryMax = cmp.Or(c.RetryMax, time.Hour)
	c.LockDelay = cmp.Or(c.LockDelay, lock.DefaultLockDelay)
	c.ShutdownGrace = cmp.Or(c.ShutdownGrace, 30*time.Second)
	c.KeepSucceeded = cmp.Or(c.KeepSucceeded, 7*24*time.Hour)
	c.KeepFailed = cmp.Or(c.KeepFailed, 30*24*time.Hour)
	c.RetentionEvery = cmp.Or(c.RetentionEvery, time.Minute)
	c.SnapshotAge = cmp.Or(c.SnapshotAge, 5*time.Minute)
	c.OverlapsEvery = cmp.Or(c.OverlapsEvery, time.Minute)
	c.Log = cmp.Or(c.Log, logging.Stderr())
	if c.Process == "" {
		c.Process = uuid.NewString()
	}
	return c
}

// validate returns what is wrong with a configuration whose defaults are filled in.
func (c Config) validate() error {
	if c.Store == nil || c.Locks == nil || len(c.Kinds) == 0 {
		return errors.New("worker: Store, Locks and at least one of Kinds are required")
	}
	if err := noneIsNil(c.Kinds); err != nil {
		return err
	}
	if _, err := ParsePoll(c.Poll); err != nil {
		return fmt.Errorf("worker: poll %q: %w", c.Poll, err)
	}
	if c.Concurrency < 0 || c.MaxCrashes < 0 {
		return fmt.Errorf("worker: Concurrency %d or MaxCrashes %d is below zero", c.Concurrency, c.MaxCrashes)
	}
	for name, d := range map[string]time.Duration{
		"Timeout": c.Timeout, "RetryBase": c.RetryBase, "RetryMax": c.RetryMax, "LockDelay": c.LockDelay, "ShutdownGrace": c.ShutdownGrace,
		"KeepSucceeded": c.KeepSucceeded, "KeepFailed": c.KeepFailed, "RetentionEvery": c.RetentionEvery, "SnapshotAge": c.SnapshotAge, "OverlapsEvery": c.OverlapsEvery,
	} {
		if d < 0 {
			return fmt.Errorf("worker: %s %v is below zero", name, d)
		}
	}
	if c.PayloadMemory < MaxPayload {
		return fmt.Errorf("worker: PayloadMemory %d is below %d, the longest payload", c.PayloadMemory, MaxPayload)
	}
	return nil
}

// noneIsNil returns an error that names a kind that is there and nil: nobody could run its tasks, and
// this replica would take them from others that can.
func noneIsNil(kinds tasks.Kinds) error {
	for _, name := range kinds.Names() {
		if kinds[name] == nil {
			return fmt.Errorf("worker: kind %q is nil", name)
		}
	}
	return nil
}

// enableKinds lets those kinds prepare themselves that need it, as commands do, or refuse times of
// the locks with which their work could go on beside that of a successor.
func (c Config) enableKinds(kinds tasks.Kinds) error {
	var margin, lockDelay time.Duration // zero if the locks do not say
	if locks, ok := c.Locks.(lock.Timed); ok {
		margin, lockDelay = locks.Times()
	}
	for _, name := range kinds.Names() {
		k, ok := kinds[name].(interface {
			Enable(margin, lockDelay time.Duration) error
		})
		if !ok {
			continue
		}
		if err := k.Enable(margin, lockDelay); err != nil {
			return fmt.Errorf("worker: kind %s: %w", name, err)
		}
	}
	return nil
}
