package lifecycle

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"
)

// now is the moment of the step that an example is about.
const now Time = 1_700_000_000_000_000

const (
	second = Time(1_000_000)
	minute = 60 * second
)

// config is of a run whose replicas are called a and b, and whose handlers decide nothing.
var config = Config{Replica: func(by string) bool { return by == "a" || by == "b" }, Named: true, MaxCrashes: 3,
	RetryBase: time.Second, RetryMax: time.Hour, LockDelay: 3 * time.Second, Keep: time.Minute}

// An example is a row, what happened to it before, and one step.
type example struct {
	before []Step
	step   Step
	config Config
}

// pendingRow is a task that has been tried twice.
func pendingRow() Row {
	return Row{Status: Pending, Kind: "exec", Queue: "default", RunAt: now - minute, CreatedAt: now - minute, Attempt: 2, MaxAttempts: 5,
		Crashes: 1, Fence: 10, StartedAt: now - minute, Error: "it broke"}
}

func step(by string, was, is Row) Step {
	return Step{Task: 7, By: by, At: now, Began: now, Statement: now + 1, Noted: now + 3, Was: was, Is: is}
}

// claimOf is the step that makes a row running on replica a, some seconds ago.
func claimOf(r Row) Step {
	is := r
	is.Status, is.Attempt, is.Fence, is.Session, is.Replica = Running, r.Attempt+1, r.Fence+1, "s", "a"
	s := step("a", r, is)
	s.At, s.Began, s.Statement, s.Noted = now-5*second, now-5*second, now-5*second, now-5*second+3
	s.Is.StartedAt = s.Began + 2
	return s
}

// running is an example of a row that a has claimed; change makes the step.
func running(by string, change func(r *Row)) example {
	c := claimOf(pendingRow())
	is := c.Is
	change(&is)
	return example{[]Step{c}, step(by, c.Is, is), config}
}

// claimOfTheSameKey is the claim of another task, whose lock_key is the first one's id.
var claimOfTheSameKey = Step{Task: 8, By: "b", Was: Row{Status: Pending, LockKey: "7"}, Is: Row{Status: Running, LockKey: "7", Fence: 100}}

func release(status string) func(r *Row) {
	return func(r *Row) {
		r.Status, r.Session, r.Replica = status, "", ""
		if r.Final() {
			r.FinishedAt = now + 1
		}
	}
}

// with makes one change of several.
func with(changes ...func(r *Row)) func(r *Row) {
	return func(r *Row) {
		for _, f := range changes {
			f(r)
		}
	}
}

func fails(text string) func(r *Row) { return func(r *Row) { r.Error = text } }
func requeued(r *Row)                { r.Attempt-- }
func crashed(r *Row)                 { r.Crashes++ }

// last makes the attempt of an example the last one.
func last(e example) example {
	for _, r := range []*Row{&e.before[0].Was, &e.before[0].Is, &e.step.Was, &e.step.Is} {
		r.MaxAttempts = 3
	}
	return e
}

// asked lets somebody ask for a cancel before the step.
func asked(e example) example {
	c := e.before[0].Is
	c.CancelRequested = true
	e.before = append(e.before, step("operator", e.before[0].Is, c))
	e.step.Was.CancelRequested, e.step.Is.CancelRequested = true, true
	return e
}

// pardoned lets b call a dead before the step, which is a's.
func pardoned(status string, change func(r *Row)) example {
	e := running("b", with(release(Pending), fails("replica a died during attempt 3 of 5"), crashed))
	e.before = append(e.before, e.step)
	r := e.step.Is
	if status == Running {
		c := claimOf(r)
		c.By, c.Is.Replica, c.Is.Session = "b", "b", "t"
		e.before = append(e.before, c)
		r = c.Is
	}
	is := r
	change(&is)
	e.step = step("a", r, is)
	return e
}

// examples have one for each rule, by its name.
func examples() map[string]example {
	all := map[string]example{
		"schedule: a task is made": {nil, step("a", Row{}, Row{Status: Pending, Kind: "noop", Queue: "default", RunAt: now, CreatedAt: now, MaxAttempts: 5, ScheduleID: 3}), config},
		Claim: func() example {
			s := claimOf(pendingRow())
			s.Began, s.Statement, s.Noted = now, now+1, now+3
			s.Is.StartedAt = now + 2
			return example{nil, s, config}
		}(),
		ClaimLow: func() example {
			s := claimOf(pendingRow())
			s.Began, s.Statement, s.Noted = now, now+1, now+3
			s.Is.StartedAt = now + 2
			return example{[]Step{claimOfTheSameKey}, s, config}
		}(),
		"claim: Postgres refuses the row": {nil, step("a", pendingRow(), func() Row {
			r := pendingRow()
			r.Status, r.FinishedAt, r.Error = Failed, now+1, "Postgres refuses to make this task running: no"
			return r
		}()), config},
		"begin is noted":          running("a", func(r *Row) { r.BegunAt = now + 2 }),
		Success:                   running("a", with(release(Succeeded), fails(""), func(r *Row) { r.HasResult = true })),
		FailUsedUp:                last(running("a", with(release(Failed), fails("no")))),
		Retry:                     running("a", with(release(Pending), fails("no"), func(r *Row) { r.RunAt = now + 1 + 3500*second/1000 })),
		CompleteRequeue:           running("a", with(release(Pending), fails("lost"), requeued, func(r *Row) { r.RunAt = now + 1 + 3*second })),
		"completion: cancelled":   asked(running("a", with(release(Cancelled), fails("cancelled")))),
		Requeue:                   running("a", with(release(Pending), requeued, func(r *Row) { r.StartedAt, r.RunAt = 0, now+second })),
		"requeue: cancelled":      asked(running("a", with(release(Cancelled), requeued, func(r *Row) { r.StartedAt = 0 }))),
		"takeover: cancelled":     asked(running("b", with(release(Cancelled), fails("replica a died during attempt 3 of 5"), crashed))),
		TakeOverFree:              running("b", with(release(Pending), fails("replica a lost its session during attempt 3 of 5"), requeued)),
		TakeOverCharged:           running("b", with(release(Pending), fails("replica a died during attempt 3 of 5"), crashed)),
		TakeOverUsedUp:            last(running("b", with(release(Failed), fails("replica a died during attempt 3 of 3"), crashed))),
		"pardon of a pending row": pardoned(Pending, func(r *Row) { r.Crashes--; r.Attempt-- }),
		"pardon of a running row": pardoned(Running, func(r *Row) { r.Crashes--; r.Attempt-- }),
		"due at once": func() example {
			r := pendingRow()
			r.RunAt, r.CreatedAt = now+minute, now+minute
			is := r
			is.RunAt = now + 1
			return example{nil, step("b", r, is), config}
		}(),
		"cancel of a pending task": {nil, step("operator", pendingRow(), func() Row {
			r := pendingRow()
			r.Status, r.CancelRequested, r.FinishedAt = Cancelled, true, now
			return r
		}()), config},
		"cancel of a running task": running("operator", func(r *Row) { r.CancelRequested = true }),
	}
	// What is decided by counts of before.
	stalled := running("a", with(release(Failed), fails("quarantined: 3 replicas"), func(r *Row) { r.Stalls = 1 }))
	for _, r := range []*Row{&stalled.before[0].Was, &stalled.before[0].Is, &stalled.step.Was, &stalled.step.Is} {
		r.Crashes = 2
	}
	all[FailStalled] = stalled
	quarantined := running("b", with(release(Failed), fails("quarantined: 3 replicas"), crashed))
	for _, r := range []*Row{&quarantined.before[0].Was, &quarantined.before[0].Is, &quarantined.step.Was, &quarantined.step.Is} {
		r.Crashes++
	}
	all[TakeOverQuarantine] = quarantined
	final := running("a", with(release(Failed), fails("it says that this is final")))
	final.config.HandlersDecide = func(task int64) bool { return task == 7 }
	all[FailFinal] = final
	for _, status := range []string{Pending, Succeeded, Failed, Cancelled} {
		r := pendingRow()
		if r.Status = status; status != Pending {
			r.FinishedAt = now - 2*minute
		}
		is := r
		is.Status, is.RunAt, is.Attempt, is.Crashes, is.FinishedAt, is.StartedAt = Pending, now, 0, 0, 0, 0
		all["retry of a "+status+" task"] = example{nil, step("operator", r, is), config}
		if status != Pending {
			all["retention: "+status] = example{nil, step("b", r, Row{}), config}
		}
	}
	return all
}

// replay returns the rule of an example's step, and why there is none.
func (e example) replay() (rule, why string) {
	t := e.config.Replay(append(slices.Clone(e.before), e.step))
	for _, i := range t.Illegal {
		if i.Step == e.step {
			why = i.Why
		}
	}
	return t.Rules[len(t.Rules)-1], why
}

func TestEachRuleHasALegalStep(t *testing.T) {
	all := examples()
	for _, r := range Rules {
		e, ok := all[r.Name]
		if !ok {
			t.Errorf("%s has no example", r.Name)
			continue
		}
		if rule, why := e.replay(); rule != r.Name {
			t.Errorf("the example of %s went by %q: %s", r.Name, rule, why)
		}
	}
	if len(all) != len(Rules) {
		t.Errorf("%d examples for %d rules", len(all), len(Rules))
	}
}

// A replica that was killed and started again takes over from itself: that is no completion.
func TestTakeoverByTheNameOfTheDead(t *testing.T) {
	for name, e := range examples() {
		if !strings.HasPrefix(name, "takeover:") {
			continue
		}
		e.step.By = e.step.Was.Replica
		if rule, why := e.replay(); rule != name {
			t.Errorf("%s went by %q: %s", name, rule, why)
		}
	}
}

// breaks are changes of an example by which one of its conditions does not hold any more.
var breaks = map[string]func(e *example){
	due.what:               func(e *example) { e.step.Was.RunAt = now + 3; e.step.Is.RunAt = now + 3 },
	attemptsLeft.what:      func(e *example) { e.step.Was.MaxAttempts, e.step.Is.MaxAttempts = 2, 2 },
	lastAttempt.what:       func(e *example) { e.each(func(r *Row) { r.MaxAttempts = 4 }) },
	notLastAttempt.what:    func(e *example) { e.each(func(r *Row) { r.MaxAttempts = 3 }) },
	lastOfRow.what:         func(e *example) { e.each(func(r *Row) { r.MaxAttempts = 4 }) },
	notLastOfRow.what:      func(e *example) { e.each(func(r *Row) { r.MaxAttempts = 3 }) },
	isSuspect.what:         func(e *example) { e.each(func(r *Row) { r.Crashes = 0 }) },
	wouldQuarantine.what:   func(e *example) { e.config.MaxCrashes = 4 },
	cancelRequested.what:   func(e *example) { e.each(func(r *Row) { r.CancelRequested = false }); e.before = e.before[:1] },
	askedFor.what:          func(e *example) { e.each(func(r *Row) { r.CancelRequested = false }); e.before = e.before[:1] },
	handlersDecide.what:    func(e *example) { e.config.HandlersDecide = nil },
	wasCharged.what:        func(e *example) { e.step.By = "b" },
	wasDueWhenCreated.what: func(e *example) { e.step.Was.CreatedAt--; e.step.Is.CreatedAt-- },
	aheadOfTheClock.what:   func(e *example) { e.step.Was.RunAt = now - 1; e.step.Is.RunAt = now + 1 },
	keptForLong.what:       func(e *example) { e.config.Keep = time.Hour },

	isNew.what:          func(e *example) { e.step.Is.Attempt = 1 },
	hasSchedule.what:    func(e *example) { e.step.Is.ScheduleID = 0 },
	attemptCounted.what: func(e *example) { e.step.Is.Attempt-- },
	fenceRises.what: func(e *example) {
		e.before = []Step{claimOf(pendingRow()), step("operator", claimOf(pendingRow()).Is, e.step.Was)}
	},
	heldByItsMaker.what:            func(e *example) { e.step.Is.Replica = "b" },
	startedNow.what:                func(e *example) { e.step.Is.StartedAt = now - 1 },
	begunNow.what:                  func(e *example) { e.step.Is.BegunAt = now - 1 },
	released.what:                  func(e *example) { e.step.Is.Session = "s" },
	finishedNow.what:               func(e *example) { e.step.Is.FinishedAt = now - 1 },
	notStarted.what:                func(e *example) { e.step.Is.StartedAt = now - 1 },
	noError.what:                   func(e *example) { e.step.Is.Error = "no" },
	someError.what:                 func(e *example) { e.step.Is.Error = "" },
	attemptRequeued.what:           func(e *example) { e.step.Is.Attempt-- },
	attemptRequeuedButOne.what:     func(e *example) { e.step.Is.Attempt-- },
	attemptSameOrRequeued.what:     func(e *example) { e.step.Is.Attempt -= 2 },
	crashCounted.what:              func(e *example) { e.step.Is.Crashes++ },
	crashesAtMostOneMore.what:      func(e *example) { e.step.Is.Crashes += 2 },
	crashForgiven.what:             func(e *example) { e.step.Is.Crashes-- },
	stallCounted.what:              func(e *example) { e.step.Is.Stalls++ },
	stallsAtMostOneMore.what:       func(e *example) { e.step.Is.Stalls = 2 },
	crashesReachLimit.what:         func(e *example) { e.config.MaxCrashes = 4 },
	namesTheDead.what:              func(e *example) { e.step.Is.Error = "replica c died during attempt 3 of 5" },
	retryDelay.what:                func(e *example) { e.step.Is.RunAt = now + 1 + second },
	requeueDelay.what:              func(e *example) { e.step.Is.RunAt = now + 1 + 20*second },
	shortDelay.what:                func(e *example) { e.step.Is.RunAt = now + 2*minute },
	dueNow.what:                    func(e *example) { e.step.Is.RunAt = now + minute/2 },
	nowCancelRequested.what:        func(e *example) { e.step.Is.CancelRequested = false },
	isAsNew.what:                   func(e *example) { e.step.Is.Attempt = 1 },
	errorSays("quarantined:").what: func(e *example) { e.step.Is.Error = "replica b died" },
	errorSays("Postgres refuses to make this task running").what: func(e *example) { e.step.Is.Error = "no" },
}

// each changes all rows of an example.
func (e *example) each(change func(r *Row)) {
	e.before = slices.Clone(e.before)
	for i := range e.before {
		change(&e.before[i].Was)
		change(&e.before[i].Is)
	}
	change(&e.step.Was)
	change(&e.step.Is)
}

// A step that lacks one of the conditions of its rule does not go by it. A replica's is
// illegal, or goes by another rule that is meant for it; a person's is by hand.
func TestEachConditionIsNeeded(t *testing.T) {
	for _, r := range Rules {
		for _, c := range slices.Concat(r.Guard, r.Effect) {
			f, ok := breaks[c.what]
			if !ok {
				t.Errorf("%s: nothing breaks the condition that %s", r.Name, c.what)
				continue
			}
			e := examples()[r.Name]
			f(&e)
			rule, why := e.replay()
			switch {
			case rule == r.Name:
				t.Errorf("%s: the step is legal though it is not so that %s", r.Name, c.what)
			case c.what == fenceRises.what && rule == ClaimLow:
			case r.Who == person && rule != ByHand, r.Who != person && rule != "":
				t.Errorf("%s: the step goes by %q though it is not so that %s", r.Name, rule, c.what)
			case r.Who != person && !strings.Contains(why, r.Name+": it is not so that "+c.what):
				t.Errorf("%s: that it is not so that %s is not why the step is illegal: %s", r.Name, c.what, why)
			}
		}
	}
}

// A step may change no other columns, and be made by nobody else.
func TestARuleAllowsNothingElse(t *testing.T) {
	for _, r := range Rules {
		if r.Who == person || r.From == none || r.To == none {
			continue
		}
		for _, c := range columns {
			if slices.Contains(strings.Fields(r.May+" status"), c) {
				continue
			}
			e := examples()[r.Name]
			spoil(&e.step.Is, c)
			if rule, _ := e.replay(); rule != "" {
				t.Errorf("%s: the step changes %s, and goes by %q", r.Name, c, rule)
			}
		}
		if e := examples()[r.Name]; r.Who == holder {
			e.step.By = "b"
			if rule, _ := e.replay(); rule != "" {
				t.Errorf("%s: the step is not the holder's, and goes by %q", r.Name, rule)
			}
		}
	}
	for name, e := range examples() {
		if strings.HasPrefix(name, "cancel of") || strings.HasPrefix(name, "retry of") {
			e.step.By = "a"
			if rule, _ := e.replay(); rule != "" {
				t.Errorf("%s: a replica does it, by %q", name, rule)
			}
		}
	}
}

// spoil changes a column.
func spoil(r *Row, column string) {
	b, err := json.Marshal(r)
	if err != nil {
		panic(err)
	}
	var m map[string]any
	if err := json.Unmarshal(b, &m); err != nil {
		panic(err)
	}
	switch column {
	case "run_at", "started_at", "begun_at", "finished_at", "created_at":
		m[column] = "2020-01-01T00:00:00Z"
	case "priority", "attempt", "max_attempts", "crashes", "stalls", "fence", "schedule_id":
		m[column] = 77
	case "has_result", "cancel_requested":
		was, _ := m[column].(bool)
		m[column] = !was
	default:
		m[column] = "damaged"
	}
	if b, err = json.Marshal(m); err == nil {
		err = json.Unmarshal(b, r)
	}
	if err != nil {
		panic(err)
	}
}

func TestStepsThatNoRuleKnows(t *testing.T) {
	row := func(status string) Row {
		r := pendingRow()
		if r.Status = status; r.Final() {
			r.FinishedAt = now
		}
		return r
	}
	statuses := []string{Pending, Succeeded, Failed, Cancelled}
	for _, from := range statuses {
		for _, to := range append(statuses, none) {
			is := row(to)
			if to == none {
				is = Row{}
			}
			if rule := config.Replay([]Step{step("a", row(from), is)}).Rules[0]; rule != "" {
				t.Errorf("%s to %s goes by %q", from, to, rule)
			}
			if rule := config.Replay([]Step{step("operator", row(from), is)}).Rules[0]; rule != ByHand {
				t.Errorf("%s to %s by an operator goes by %q", from, to, rule)
			}
		}
	}
}

// A change that was not noted shows in the next one.
func TestAGapIsIllegal(t *testing.T) {
	e := examples()[Success]
	e.step.Was.Fence++
	e.step.Is.Fence++
	if rule, why := e.replay(); rule != "" || !strings.Contains(why, "nobody noted that: [fence]") {
		t.Errorf("it goes by %q: %s", rule, why)
	}
}

// Replicas go by what they read when they claimed a row, whatever hands do to it then.
func TestHandsChangeWhatIsLegal(t *testing.T) {
	edit := func(e example, change func(r *Row)) example {
		edited := e.step.Was
		change(&edited)
		e.before = append(e.before, step("operator", e.step.Was, edited))
		e.step.Was = edited
		change(&e.step.Is)
		return e
	}
	for name, e := range map[string]example{
		FailUsedUp: edit(examples()[FailUsedUp], func(r *Row) { r.MaxAttempts = 9 }),
		Retry:      edit(examples()[Retry], func(r *Row) { r.MaxAttempts = 1 }),
		Claim:      edit(examples()[Claim], func(r *Row) { r.MaxAttempts = 1 }),
	} {
		if rule, why := e.replay(); rule != name {
			t.Errorf("%s went by %q: %s", name, rule, why)
		}
	}
}

// A failover may bring back the claim of a replica that another one has taken over from since.
// It goes by what it read, not by what the other one did.
func TestFailoverBringsAClaimBack(t *testing.T) {
	first := claimOf(pendingRow())
	takenOver := step("b", first.Is, first.Is)
	takenOver.Is = examples()[TakeOverCharged].step.Is
	again := claimOf(takenOver.Is)
	again.Is.MaxAttempts = 1
	back := step("operator", again.Is, first.Is)
	for name, e := range map[string]example{
		Retry:   examples()[Retry],
		Success: examples()[Success],
	} {
		if e.step.Was != first.Is {
			t.Fatalf("%s begins with %v, want %v", name, e.step.Was, first.Is)
		}
		e.before = []Step{first, takenOver, again, back}
		if rule, why := e.replay(); rule != name {
			t.Errorf("%s goes by %q: %s", name, rule, why)
		}
	}
}

// Fences go back when somebody sets the sequence, or when Postgres forgets. What was claimed
// under such a one is put back, and nothing else may come of it.
func TestNothingBeginsUnderALowFence(t *testing.T) {
	for name, e := range examples() {
		if len(e.before) == 0 || e.before[0].Is.Status != Running || e.step.Was.Status != Running || len(e.before) > 1 {
			continue
		}
		e.before = append([]Step{claimOfTheSameKey}, e.before...)
		rule, why := e.replay()
		allowed := name == Requeue || strings.HasPrefix(name, "takeover:") || strings.HasPrefix(name, "cancel of")
		if allowed && rule != name || !allowed && rule != "" {
			t.Errorf("%s goes by %q: %s", name, rule, why)
		}
	}
}

func TestRetryDelays(t *testing.T) {
	for _, c := range []struct {
		attempts int
		delay    time.Duration
		orMore   bool
		legal    bool
	}{
		{1, time.Second, false, true}, {1, 800 * time.Millisecond, false, true}, {1, 799 * time.Millisecond, false, false}, {1, 1001 * time.Millisecond, false, false},
		{2, 2 * time.Second, false, true}, {2, time.Second, false, false}, {5, 16 * time.Second, false, true}, {5, time.Second, false, false},
		{13, time.Hour, false, true}, {13, 48 * time.Minute, false, true}, {13, 47 * time.Minute, false, false}, {100, time.Hour, false, true},
		{1, time.Minute, true, true}, {2, time.Second, true, false},
	} {
		if got := config.isRetryDelay(c.delay, c.attempts, c.orMore); got != c.legal {
			t.Errorf("%v after %d attempts: legal %v, want %v", c.delay, c.attempts, got, c.legal)
		}
	}
}

// After a TRUNCATE another row may have the same id. Fences rise beyond it.
func TestTruncate(t *testing.T) {
	truncate := Step{By: "operator", At: now, Began: now, Statement: now, Noted: now}
	first, again := claimOf(pendingRow()), claimOf(pendingRow())
	if trace := config.Replay([]Step{first, truncate, again}); trace.Rules[1] != ByHand || trace.Rules[2] != ClaimLow {
		t.Errorf("a fence that is used again: %v", trace)
	}
	again.Is.Fence++
	if trace := config.Replay([]Step{first, truncate, again}); len(trace.Illegal) != 0 || trace.Rules[2] != Claim {
		t.Errorf("a row that begins anew: %v", trace)
	}
	truncate.By = "a"
	if trace := config.Replay([]Step{truncate}); len(trace.Illegal) != 1 {
		t.Error("a replica may do it")
	}
}

func TestStepsSurviveJSON(t *testing.T) {
	for name, e := range examples() {
		e.step.Is.RunAt, e.step.Is.CreatedAt = Infinity, negInfinity
		b, err := json.Marshal(e.step)
		if err != nil {
			t.Fatal(err)
		}
		var s Step
		if err := json.Unmarshal(b, &s); err != nil || s != e.step {
			t.Errorf("%s: %v, want %v; %v", name, s, e.step, err)
		}
	}
}

// A stop loses no time. A lease that ended during one does.
func TestStopLosesNoTime(t *testing.T) {
	for _, c := range []struct {
		error string
		wait  Time
		rule  string
	}{
		{"the replica is shutting down: stopped: exit code 143", 0, CompleteRequeue},
		{"the replica is shutting down: stopped: exit code 143", 3 * second, ""},
		{"the replica is shutting down: the lease ran out: exit code 137", 3 * second, CompleteRequeue},
	} {
		e := running("a", with(release(Pending), fails(c.error), requeued, func(r *Row) { r.RunAt = now + 1 + c.wait }))
		if rule, why := e.replay(); rule != c.rule {
			t.Errorf("%q and a wait of %d s: the step goes by %q, want %q: %s", c.error, c.wait/second, rule, c.rule, why)
		}
	}
}
