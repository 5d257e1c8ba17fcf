package lifecycle

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Rule is one way that a row may go.
type Rule struct {
	Name     string
	From, To string // statuses; empty where there is no row
	Who      who
	May      string      // the columns that it may change, besides status
	Guard    []condition // what must hold before
	Effect   []condition // what the row must show after
	Source   string      // where the product does it
}

// who may go by a rule.
type who int

const (
	holder  who = iota // the replica that the row names
	replica            // any replica
	person             // anybody but a replica
)

// A condition has the words that follow "it is not so that".
type condition struct {
	what  string
	holds func(s *Step, p *past, c *Config) bool
}

// judged are the conditions that a worker sees to. Tests of the store hand it completions
// that no worker would.
var judged = []string{lastAttempt.what, notLastAttempt.what, handlersDecide.what, wouldQuarantine.what, askedFor.what, isSuspect.what,
	noError.what, someError.what, retryDelay.what, requeueDelay.what, shortDelay.what}

// The names of rules that others ask for.
const (
	Claim              = "claim"
	ClaimLow           = "claim: under a fence that is too low, so it must be requeued"
	Success            = "completion: succeeded"
	FailUsedUp         = "completion: failed, its attempts are used up"
	FailFinal          = "completion: failed for good, as its handler said"
	FailStalled        = "completion: quarantined after a stall"
	Retry              = "completion: retry"
	CompleteRequeue    = "completion: requeued"
	Requeue            = "requeue: it had not begun"
	RequeueCancelled   = "requeue: cancelled"
	TakeOverFree       = "takeover: not charged"
	TakeOverCharged    = "takeover: the attempt is used up"
	TakeOverUsedUp     = "takeover: failed, its attempts are used up"
	TakeOverQuarantine = "takeover: quarantined"
	ByHand             = "by hand"
)

// Charges reports whether a step by the rule of this name ends an attempt and leaves it
// used up, without a success.
func Charges(rule string) bool {
	return slices.Contains([]string{FailUsedUp, FailFinal, FailStalled, Retry, TakeOverCharged, TakeOverUsedUp, TakeOverQuarantine}, rule)
}

// Rules is the state machine. Of several rules for a step the first one counts that fits.
var Rules = []Rule{
	// A row begins.
	{Name: "schedule: a task is made", From: none, To: Pending, Who: replica, May: strings.Join(columns, " "), Source: "store/schedules.go insertTasks",
		Effect: []condition{isNew, hasSchedule}},

	// An attempt begins.
	{Name: Claim, From: Pending, To: Running, Who: replica, May: "attempt fence session replica started_at", Source: "store/claim.go takeSQL",
		Guard:  []condition{due, attemptsLeft},
		Effect: []condition{attemptCounted, fenceRises, heldByItsMaker, startedNow}},
	{Name: ClaimLow, From: Pending, To: Running, Who: replica, May: "attempt fence session replica started_at", Source: "worker/attempt.go errFenceBack",
		Guard:  []condition{due, attemptsLeft},
		Effect: []condition{attemptCounted, heldByItsMaker, startedNow}},
	{Name: "claim: Postgres refuses the row", From: Pending, To: Failed, Who: replica, May: "finished_at error", Source: "store/claim.go refuse",
		Effect: []condition{finishedNow, errorSays("Postgres refuses to make this task running")}},
	{Name: "begin is noted", From: Running, To: Running, Who: holder, May: "begun_at", Source: "store/takeover.go Begin",
		Guard:  []condition{isSuspect},
		Effect: []condition{begunNow}},

	// Its replica is dead. These come before the ends that a replica writes itself: one that was
	// started again has the name of the dead one.
	{Name: "takeover: cancelled", From: Running, To: Cancelled, Who: replica, May: "attempt crashes finished_at error session replica", Source: "store/takeover.go takeOverSQL",
		Guard:  []condition{cancelRequested},
		Effect: []condition{released, finishedNow, namesTheDead, attemptSameOrRequeued, crashesAtMostOneMore}},
	{Name: TakeOverFree, From: Running, To: Pending, Who: replica, May: "attempt error session replica", Source: "store/takeover.go takeOverSQL",
		Effect: []condition{released, namesTheDead, attemptRequeued}},
	{Name: TakeOverCharged, From: Running, To: Pending, Who: replica, May: "crashes error session replica", Source: "store/takeover.go takeOverSQL",
		Guard:  []condition{notLastOfRow},
		Effect: []condition{released, namesTheDead, crashesAtMostOneMore}},
	{Name: TakeOverQuarantine, From: Running, To: Failed, Who: replica, May: "crashes finished_at error session replica", Source: "store/takeover.go takeOverSQL",
		Effect: []condition{released, finishedNow, crashCounted, crashesReachLimit, errorSays("quarantined:")}},
	{Name: TakeOverUsedUp, From: Running, To: Failed, Who: replica, May: "crashes finished_at error session replica", Source: "store/takeover.go takeOverSQL",
		Guard:  []condition{lastOfRow},
		Effect: []condition{released, finishedNow, namesTheDead, crashesAtMostOneMore}},

	// It ends, as its replica writes.
	{Name: Success, From: Running, To: Succeeded, Who: holder, May: "finished_at error has_result session replica", Source: "store/complete.go completeSQL",
		Effect: []condition{released, finishedNow, noError}},
	{Name: FailUsedUp, From: Running, To: Failed, Who: holder, May: "finished_at error has_result session replica", Source: "worker/attempt.go judge",
		Guard:  []condition{lastAttempt},
		Effect: []condition{released, finishedNow, someError}},
	{Name: FailStalled, From: Running, To: Failed, Who: holder, May: "finished_at error has_result session replica stalls", Source: "worker/attempt.go judge",
		Guard:  []condition{wouldQuarantine},
		Effect: []condition{released, finishedNow, stallCounted, errorSays("quarantined:")}},
	{Name: FailFinal, From: Running, To: Failed, Who: holder, May: "finished_at error has_result session replica", Source: "worker/attempt.go judge",
		Guard:  []condition{handlersDecide},
		Effect: []condition{released, finishedNow, someError}},
	{Name: Retry, From: Running, To: Pending, Who: holder, May: "run_at error has_result session replica", Source: "worker/attempt.go judge",
		Guard:  []condition{notLastAttempt},
		Effect: []condition{released, someError, retryDelay}},
	{Name: CompleteRequeue, From: Running, To: Pending, Who: holder, May: "run_at attempt error has_result session replica stalls", Source: "worker/attempt.go judge",
		Effect: []condition{released, someError, attemptRequeued, stallsAtMostOneMore, requeueDelay}},
	{Name: "completion: cancelled", From: Running, To: Cancelled, Who: holder, May: "run_at attempt finished_at error has_result session replica stalls", Source: "store/complete.go completeSQL",
		Guard:  []condition{askedFor},
		Effect: []condition{released, finishedNow, attemptSameOrRequeued, stallsAtMostOneMore}},

	// It had not begun.
	{Name: Requeue, From: Running, To: Pending, Who: holder, May: "run_at attempt session replica started_at", Source: "store/complete.go commitReturns",
		Effect: []condition{released, attemptRequeued, notStarted, shortDelay}},
	{Name: RequeueCancelled, From: Running, To: Cancelled, Who: holder, May: "run_at attempt finished_at session replica started_at", Source: "store/complete.go commitReturns",
		Guard:  []condition{cancelRequested},
		Effect: []condition{released, attemptRequeued, notStarted, finishedNow}},

	// The dead replica lives.
	{Name: "pardon of a pending row", From: Pending, To: Pending, Who: replica, May: "crashes attempt stalls", Source: "store/complete.go settleSQL",
		Guard:  []condition{wasCharged},
		Effect: []condition{crashForgiven, attemptRequeued, stallsAtMostOneMore}},
	{Name: "pardon of a running row", From: Running, To: Running, Who: replica, May: "crashes attempt stalls", Source: "store/complete.go settleSQL",
		Guard:  []condition{wasCharged},
		Effect: []condition{crashForgiven, attemptRequeuedButOne, stallsAtMostOneMore}},

	// Postgres' clock was set back.
	{Name: "due at once", From: Pending, To: Pending, Who: replica, May: "run_at", Source: "store/clock.go dueAtOnceSQL",
		Guard:  []condition{wasDueWhenCreated, aheadOfTheClock},
		Effect: []condition{dueNow}},

	// People ask for something.
	{Name: "cancel of a pending task", From: Pending, To: Cancelled, Who: person, May: "cancel_requested finished_at", Source: "migrations/001 cancel_waiting",
		Effect: []condition{nowCancelRequested, finishedNow}},
	{Name: "cancel of a running task", From: Running, To: Running, Who: person, May: "cancel_requested", Source: "migrations/001 cancel",
		Effect: []condition{nowCancelRequested}},
	{Name: "retry of a pending task", From: Pending, To: Pending, Who: person, May: retryMay, Source: "migrations/007 retry", Effect: retryEffect},
	{Name: "retry of a succeeded task", From: Succeeded, To: Pending, Who: person, May: retryMay, Source: "migrations/007 retry", Effect: retryEffect},
	{Name: "retry of a failed task", From: Failed, To: Pending, Who: person, May: retryMay, Source: "migrations/007 retry", Effect: retryEffect},
	{Name: "retry of a cancelled task", From: Cancelled, To: Pending, Who: person, May: retryMay, Source: "migrations/007 retry", Effect: retryEffect},

	// A row ends.
	{Name: "retention: succeeded", From: Succeeded, To: none, Who: replica, May: strings.Join(columns, " "), Source: "store/schedules.go purge", Guard: []condition{keptForLong}},
	{Name: "retention: failed", From: Failed, To: none, Who: replica, May: strings.Join(columns, " "), Source: "store/schedules.go purge", Guard: []condition{keptForLong}},
	{Name: "retention: cancelled", From: Cancelled, To: none, Who: replica, May: strings.Join(columns, " "), Source: "store/schedules.go purge", Guard: []condition{keptForLong}},
}

const (
	million    = 1_000_000 // the highest count in a row
	maxRequeue = 30 * time.Second

	retryMay = "run_at attempt crashes stalls finished_at started_at cancel_requested has_result"
)

var retryEffect = []condition{isAsNew}

// Conditions about what was before. Counts that a hand has written are as they are: the
// replica may have read others when it claimed the row.
var (
	due = condition{"it was due", func(s *Step, _ *past, _ *Config) bool { return s.Was.RunAt <= s.Is.StartedAt }}

	attemptsLeft = condition{"it had attempts left", func(s *Step, p *past, _ *Config) bool {
		return p.byHand || s.Was.Attempt < s.Was.MaxAttempts
	}}
	lastAttempt = condition{"it was claimed for its last attempt", func(s *Step, p *past, _ *Config) bool {
		r := p.read(s)
		return r.Attempt >= r.MaxAttempts
	}}
	notLastAttempt = condition{"it was not claimed for its last attempt", func(s *Step, p *past, _ *Config) bool {
		r := p.read(s)
		return r.Attempt < r.MaxAttempts
	}}
	lastOfRow    = condition{"its attempts are used up", func(s *Step, _ *past, _ *Config) bool { return s.Was.Attempt >= s.Was.MaxAttempts }}
	notLastOfRow = condition{"it has attempts left", func(s *Step, _ *past, _ *Config) bool { return s.Was.Attempt < s.Was.MaxAttempts }}

	isSuspect = condition{"a crash or a stall was counted before", func(s *Step, p *past, c *Config) bool {
		r := p.read(s)
		return s.Was.Crashes+s.Was.Stalls > 0 || r.Crashes+r.Stalls > 0 || c.MaxCrashes <= 1
	}}
	wouldQuarantine = condition{"one more crash or stall reached the limit", func(s *Step, p *past, c *Config) bool {
		r := p.read(s)
		return c.MaxCrashes == 0 || max(r.Crashes+r.Stalls, s.Was.Crashes+s.Was.Stalls)+1 >= c.MaxCrashes
	}}
	cancelRequested = condition{"somebody asked for that", func(s *Step, _ *past, _ *Config) bool { return s.Was.CancelRequested }}
	askedFor        = condition{"its handler was told to end by a cancel", func(s *Step, _ *past, _ *Config) bool { return s.Was.CancelRequested }}
	handlersDecide  = condition{"its handler can say that a failure is final", func(s *Step, _ *past, c *Config) bool { return c.handlersDecide(s.Task) }}
	wasCharged      = condition{"this replica was called dead in an attempt at it, and has not taken that back yet", func(s *Step, p *past, c *Config) bool {
		if c.Named {
			return p.charged[s.By] > 0
		}
		sum := 0
		for _, n := range p.charged {
			sum += n
		}
		return sum > 0 || p.byHand
	}}
	wasDueWhenCreated = condition{"it was to be due at once", func(s *Step, _ *past, _ *Config) bool { return s.Was.RunAt <= s.Was.CreatedAt }}
	aheadOfTheClock   = condition{"the clock had yet to reach its run_at", func(s *Step, _ *past, _ *Config) bool { return s.Was.RunAt > s.Began }}
	keptForLong       = condition{"it was kept for long enough", func(s *Step, _ *past, c *Config) bool {
		return s.Was.KeepFor != "" && s.Was.FinishedAt <= s.Began || s.Was.FinishedAt.Add(c.Keep) <= s.Began
	}}
)

// Conditions about what is after.
var (
	isNew = condition{"it is as a new task is", func(s *Step, _ *past, _ *Config) bool {
		r := s.Is
		return r.Attempt == 0 && r.Crashes == 0 && r.Stalls == 0 && r.Fence == 0 && r.Session == "" && r.Replica == "" && r.StartedAt == 0 &&
			r.BegunAt == 0 && r.FinishedAt == 0 && r.Error == "" && !r.HasResult && !r.CancelRequested
	}}
	hasSchedule = condition{"it belongs to a schedule", func(s *Step, _ *past, _ *Config) bool { return s.Is.ScheduleID != 0 }}

	attemptCounted = condition{"the attempt is counted", func(s *Step, _ *past, _ *Config) bool { return s.Is.Attempt == min(s.Was.Attempt+1, million) }}
	fenceRises     = condition{"its fence is above all that were given out for its lock key", func(s *Step, p *past, _ *Config) bool {
		return s.Is.Fence > p.fence && s.Is.Fence > *p.keyFence
	}}
	heldByItsMaker = condition{"it names its session and replica", func(s *Step, _ *past, c *Config) bool {
		return s.Is.Session != "" && s.Is.Replica != "" && (!c.Named || s.Is.Replica == s.By)
	}}
	startedNow = condition{"it started now", func(s *Step, _ *past, _ *Config) bool { return s.Began <= s.Is.StartedAt && s.Is.StartedAt <= s.Noted }}
	begunNow   = condition{"it began now", func(s *Step, _ *past, _ *Config) bool { return s.Began <= s.Is.BegunAt && s.Is.BegunAt <= s.Noted }}
	released   = condition{"it names no session and no replica any more", func(s *Step, _ *past, _ *Config) bool { return s.Is.Session == "" && s.Is.Replica == "" }}

	finishedNow = condition{"it finished now", func(s *Step, _ *past, _ *Config) bool {
		return s.Is.FinishedAt == s.Began || s.Is.FinishedAt == s.Statement
	}}
	notStarted = condition{"it has not started", func(s *Step, _ *past, _ *Config) bool { return s.Is.StartedAt == 0 }}
	noError    = condition{"it has no error", func(s *Step, _ *past, _ *Config) bool { return s.Is.Error == "" }}
	someError  = condition{"it says why", func(s *Step, _ *past, _ *Config) bool { return s.Is.Error != "" }}

	attemptRequeued = condition{"the attempt is not charged", func(s *Step, _ *past, _ *Config) bool { return s.Is.Attempt == max(s.Was.Attempt-1, 0) }}

	attemptRequeuedButOne = condition{"the attempt before is not charged", func(s *Step, _ *past, _ *Config) bool {
		return s.Is.Attempt == max(s.Was.Attempt-1, 1)
	}}
	attemptSameOrRequeued = condition{"the attempt is charged or not", func(s *Step, _ *past, _ *Config) bool {
		return s.Is.Attempt == s.Was.Attempt || s.Is.Attempt == max(s.Was.Attempt-1, 0)
	}}
	crashCounted         = condition{"the crash is counted", func(s *Step, _ *past, _ *Config) bool { return s.Is.Crashes == min(s.Was.Crashes+1, million) }}
	crashesAtMostOneMore = condition{"one crash at most is counted", func(s *Step, _ *past, _ *Config) bool {
		return s.Is.Crashes == s.Was.Crashes || s.Is.Crashes == min(s.Was.Crashes+1, million)
	}}
	crashForgiven = condition{"a crash is taken back", func(s *Step, _ *past, _ *Config) bool { return s.Is.Crashes == s.Was.Crashes-1 }}
	stallCounted  = condition{"the stall is counted", func(s *Step, _ *past, _ *Config) bool { return s.Is.Stalls == min(s.Was.Stalls+1, million) }}

	stallsAtMostOneMore = condition{"one stall at most is counted", func(s *Step, _ *past, _ *Config) bool {
		return s.Is.Stalls == s.Was.Stalls || s.Is.Stalls == min(s.Was.Stalls+1, million)
	}}
	crashesReachLimit = condition{"crashes and stalls have reached the limit", func(s *Step, _ *past, c *Config) bool {
		return c.MaxCrashes == 0 || s.Is.Crashes+s.Is.Stalls >= c.MaxCrashes
	}}
	namesTheDead = condition{"it names the replica that died or lost its session", func(s *Step, _ *past, _ *Config) bool {
		return strings.HasPrefix(s.Is.Error, fmt.Sprintf("replica %s died during attempt ", s.Was.Replica)) ||
			strings.HasPrefix(s.Is.Error, fmt.Sprintf("replica %s lost its session during attempt ", s.Was.Replica))
	}}

	retryDelay = condition{"it waits for the delay of a retry", func(s *Step, p *past, c *Config) bool {
		return c.isRetryDelay(s.waits(), p.read(s).Attempt, c.handlersDecide(s.Task))
	}}
	requeueDelay = condition{"it waits for the delay of a requeue", func(s *Step, _ *past, c *Config) bool {
		d := s.waits()
		if strings.HasPrefix(s.Is.Error, shutdown) && !strings.Contains(s.Is.Error, leaseEnded) {
			return d == 0 // a stop loses no time
		}
		return c.handlersDecide(s.Task) || d == 0 || c.LockDelay == 0 || d == c.LockDelay || s.Was.Kind == "sql" && d <= maxRequeue // whose Postgres was unavailable
	}}
	shortDelay = condition{"it waits for 30 s at most", func(s *Step, _ *past, c *Config) bool { return s.waits() <= max(maxRequeue, c.LockDelay) }}
	dueNow     = condition{"it is due now", func(s *Step, _ *past, _ *Config) bool { return s.Is.RunAt == s.Statement }}

	nowCancelRequested = condition{"the request is noted", func(s *Step, _ *past, _ *Config) bool { return s.Is.CancelRequested }}
	isAsNew            = condition{"it is due now, with all its attempts", func(s *Step, _ *past, _ *Config) bool {
		r := s.Is
		return r.RunAt == s.Began && r.Attempt == 0 && r.Crashes == 0 && r.Stalls == 0 && r.FinishedAt == 0 && r.StartedAt == 0 && !r.CancelRequested && !r.HasResult
	}}
)

// How the errors of tasks.ErrShutdown and tasks.ErrLeaseEnded read.
const (
	shutdown   = "the replica is shutting down"
	leaseEnded = "the lease ran out"
)

// errorSays is the condition that the row's error begins so.
func errorSays(text string) condition {
	return condition{fmt.Sprintf("its error begins with %q", text), func(s *Step, _ *past, _ *Config) bool { return strings.HasPrefix(s.Is.Error, text) }}
}

// waits returns how long a pending row waits from the statement that made it so. Zero means
// that its run_at was left as it was.
func (s *Step) waits() time.Duration {
	if s.Is.RunAt == s.Was.RunAt {
		return 0
	}
	return s.Is.RunAt.Sub(s.Statement)
}

// isRetryDelay reports whether a retry after so many attempts may wait for so long: it
// doubles with each, up to a maximum, and is shortened by up to a fifth. A handler that
// may ask for a delay of its own may have asked for more.
func (c *Config) isRetryDelay(d time.Duration, attempts int, orMore bool) bool {
	if c.RetryBase == 0 {
		return d >= 0
	}
	full := c.RetryMax
	if shift := attempts - 1; shift < 40 && c.RetryBase<<max(shift, 0) > 0 {
		full = min(full, c.RetryBase<<max(shift, 0))
	}
	return d >= full-full/5-time.Microsecond && (d <= full || orMore)
}
