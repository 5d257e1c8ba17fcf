package checker

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"onejob/chaos/observer"
)

// at is a moment of a handmade history, in seconds since it began.
func at(seconds float64) observer.Time {
	return observer.At(time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)).Add(time.Duration(seconds * float64(time.Second)))
}

// story is a history that is told one attempt at a time.
type story struct{ Evidence }

func newStory() *story {
	return &story{Evidence{Final: map[int64]Final{}, Limits: map[string]int{"narrow": 2}}}
}

// enqueue adds a row.
func (s *story) enqueue(task int64, kind string) {
	s.Enqueued = append(s.Enqueued, Enqueued{Task: task, Kind: kind})
	s.Final[task] = Final{Status: pending}
}

// claim is a row that becomes running.
func (s *story) claim(c observer.Claim, when float64) {
	s.change(c, pending, running, when, "")
}

// change is any change of a row's status.
func (s *story) change(c observer.Claim, from, to string, when float64, by string) {
	s.Transitions = append(s.Transitions, Transition{Task: c.Task, Kind: c.Kind, Key: c.Key, From: from, To: to, Fence: c.Fence, Replica: c.Replica, At: at(when), By: by})
	s.Final[c.Task] = Final{Status: to}
}

// touch is a change of a row by hand.
func (s *story) touch(task int64, what string) {
	s.Touched = append(s.Touched, Touched{Task: task, What: what})
}

func (s *story) stay(c observer.Claim, begin, end float64, how string) {
	if c.Kind == kindHTTP {
		c.Replica = ""
	}
	s.Stays = append(s.Stays, observer.Stay{Claim: c, Begin: at(begin), End: at(end), How: how})
}

// works is an attempt from the claim to the row's next status.
func (s *story) works(c observer.Claim, begin, end float64, how, to string) {
	s.claim(c, begin-0.1)
	s.stay(c, begin, end, how)
	s.change(c, running, to, end+0.1, "")
}

func (s *story) froze(replica string, begin, end float64) {
	s.Marks = append(s.Marks, observer.Mark{ID: len(s.Marks) + 1, Kind: Frozen, Target: replica, Begin: at(begin), End: at(end)})
}

// suspended is froze, of its guards and commands too.
func (s *story) suspended(replica string, begin, end float64) {
	s.froze(replica, begin, end)
	s.Marks = append(s.Marks, observer.Mark{ID: len(s.Marks) + 1, Kind: Suspended, Target: replica, Begin: at(begin), End: at(end)})
}

func claim(task, fence int64, kind, key, replica string) observer.Claim {
	return observer.Claim{Task: task, Attempt: 1, Fence: fence, Kind: kind, Key: key, Replica: replica}
}

// good is a history in which nothing is wrong, though much has happened.
func good() *story {
	s := newStory()
	for id, kind := range map[int64]string{1: "exec", 2: "go", 3: "http", 4: "sql", 5: "noop", 6: "exec"} {
		s.enqueue(id, kind)
	}
	// Three of one key, one after the other.
	s.works(claim(1, 1, "exec", "k", "a"), 1, 2, observer.Succeeded, succeeded)
	s.works(claim(2, 2, "go", "k", "b"), 2.5, 3, observer.Failed, pending)
	s.works(claim(2, 3, "go", "k", "b"), 4, 5, observer.Succeeded, succeeded)
	// A replica was killed, and its http task taken over.
	s.works(claim(3, 4, "http", "3", "a"), 6, 7, observer.Gone, pending)
	s.Marks = append(s.Marks, observer.Mark{ID: 100, Kind: Kill, Target: "a", Alone: true, Begin: at(7), End: at(8)})
	s.works(claim(3, 5, "http", "3", "b"), 14, 15, observer.Succeeded, succeeded)
	// An sql task.
	c := claim(4, 6, "sql", "k", "a")
	s.claim(c, 15.9)
	s.Effects = append(s.Effects, Effect{Task: 4, Fence: 6, Key: "k", Began: at(16)})
	s.change(c, running, succeeded, 17, "")
	// One that nobody sees at work.
	c = claim(5, 7, "noop", "5", "a")
	s.claim(c, 17)
	s.change(c, running, succeeded, 17.1, "")
	// A command whose replica was frozen: its guard ended it in time.
	s.froze("a", 18, 40)
	s.works(claim(6, 8, "exec", "6", "a"), 17.5, 22, observer.Gone, pending)
	s.works(claim(6, 9, "exec", "6", "b"), 26, 27, observer.Succeeded, succeeded)

	s.Schedules = []Schedule{{Name: "s", Every: time.Second, First: at(0), Last: at(2)}}
	for i := range 3 {
		o := Occurrence{Schedule: "s", Due: at(float64(i)), Task: int64(50 + i)}
		s.Final[o.Task] = Final{Status: succeeded, Schedule: "s"}
		s.Occurrences = append(s.Occurrences, o)
	}
	return s
}

func TestNothingIsFoundWhereNothingIs(t *testing.T) {
	v := Check(good().Evidence)
	if v.Violated() || len(v.Violations) > 0 {
		t.Errorf("the checker found %+v", v)
	}
	if v.Stays != 8 {
		t.Errorf("%d attempts, want 8", v.Stays)
	}
}

// numbers are those of a report that are not zero, by their names in the report.
func numbers(t *testing.T, v *Report) map[string]int {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	var all map[string]any
	if err := json.Unmarshal(b, &all); err != nil {
		t.Fatal(err)
	}
	found := map[string]int{}
	for name, value := range all {
		if n, ok := value.(float64); ok && n != 0 && name != "stays" && !strings.HasSuffix(name, "_judged") {
			found[name] = int(n)
		}
	}
	return found
}

// Each case spoils the good history in one way, and the checker must see that, and
// nothing else.
func TestEveryViolationIsFound(t *testing.T) {
	type spoil struct {
		how  func(s *story)
		want map[string]int
	}
	for name, c := range map[string]spoil{
		"two commands of one key": {func(s *story) {
			s.enqueue(7, "exec")
			s.works(claim(7, 20, "exec", "k2", "a"), 50, 52, observer.Succeeded, succeeded)
			s.enqueue(8, "exec")
			// The rows were not running at once: only the observer can tell.
			s.stay(claim(8, 21, "exec", "k2", "b"), 51, 51.5, observer.Stopped)
			s.Final[8] = Final{Status: failed}
		}, map[string]int{"overlaps": 1, "stale_accepted": 1}}, // the first succeeded although the second had begun
		"two attempts at one task, whose lock key is its id": {func(s *story) {
			s.stay(claim(6, 30, "exec", "6", "b"), 26.5, 28, observer.Stopped)
		}, map[string]int{"overlaps": 1, "stale_accepted": 1}},
		"a process that a command left behind": {func(s *story) {
			c := claim(6, 8, "exec", "6", "a")
			c.Part = "child"
			s.stay(c, 17.6, 26.5, observer.Gone)
		}, map[string]int{"overlaps": 1, "stale_accepted": 1}}, // it was inside when the row was given up, too
		"a command of a frozen replica, beside its successor": {func(s *story) {
			s.Stays[slices.IndexFunc(s.Stays, func(s observer.Stay) bool { return s.Fence == 8 })].End = at(26.2)
			s.Transitions[slices.IndexFunc(s.Transitions, func(t Transition) bool { return t.Fence == 8 && t.To == pending })].At = at(26.1)
		}, map[string]int{"overlaps": 1}},
		"a handler that was not frozen, beside its successor": {func(s *story) {
			s.enqueue(7, "go")
			s.works(claim(7, 20, "go", "7", "b"), 50, 59.5, observer.Stopped, pending)
			s.stay(claim(7, 21, "go", "7", "a"), 59, 60, observer.Stopped)
			s.Final[7] = Final{Status: failed}
		}, map[string]int{"overlaps": 1}},
		"a handler that thawed, and went on for too long": {func(s *story) {
			s.froze("b", 51, 60)
			s.enqueue(7, "go")
			s.claim(claim(7, 20, "go", "7", "b"), 49)
			s.stay(claim(7, 20, "go", "7", "b"), 50, 63, observer.Stopped)
			s.change(claim(7, 20, "go", "7", "b"), running, pending, 59, "")
			s.works(claim(7, 21, "go", "7", "a"), 59.5, 64, observer.Succeeded, succeeded)
		}, map[string]int{"overlaps": 1}},
		"a handler that was frozen, beside a successor that came after 2 s": {func(s *story) { frozenFor(s, 2) }, map[string]int{"overlaps": 1}},
		"a handler that was frozen, beside a successor that came after 2 s, while others were harmed": {func(s *story) {
			frozenFor(s, 2)
			s.Hosts = map[string][]string{"host-1": {"a"}, "host-2": {"b"}, "host-3": {"c"}}
			s.harm("agent-loss", "host-3", 45, 60)
			s.harm(Kill, "a", 48, 50)
			s.harm("cut-both", "c", 40, 60)
			s.froze("c", 40, 60)
			s.harm(ClaimFreeze, "a", 50, 60)
			s.harm(OutsiderKill, "outsider-1", 50, 60)
		}, map[string]int{"overlaps": 1}},
		"a handler that was frozen, beside a successor that came after 2 s, long after another fault": {func(s *story) {
			frozenFor(s, 2)
			s.harm(SessionDestroy, "b", 20, 20.1)
		}, map[string]int{"overlaps": 1}},
		"a handler that was frozen, beside a successor that came after 2 s, on a machine that stood still long before": {func(s *story) {
			frozenFor(s, 2)
			s.Delays = []Delay{{at(40), 3 * time.Second}}
		}, map[string]int{"overlaps": 1}},
		"a suspended command, beside a successor that came after 2 s": {func(s *story) {
			s.suspended("b", 51, 60)
			s.enqueue(7, "exec")
			s.claim(claim(7, 20, "exec", "7", "b"), 49)
			s.stay(claim(7, 20, "exec", "7", "b"), 50, 60.4, observer.Stopped)
			s.change(claim(7, 20, "exec", "7", "b"), running, pending, 52.9, "")
			s.works(claim(7, 21, "exec", "7", "a"), 53, 64, observer.Succeeded, succeeded)
		}, map[string]int{"overlaps": 1}},
		"a request of a frozen replica whose successor's fence was lower": {func(s *story) {
			s.froze("b", 51, 70)
			s.enqueue(7, "http")
			s.claim(claim(7, 21, "http", "7", "b"), 49)
			s.stay(claim(7, 21, "http", "7", "b"), 50, 61, observer.Gone)
			s.stay(claim(7, 20, "http", "7", "a"), 60, 62, observer.Gone)
			s.Final[7] = Final{Status: failed}
		}, map[string]int{"overlaps": 1}},
		"somebody with a lower fence, whose replica was not frozen": {func(s *story) {
			s.Stale = append(s.Stale, observer.Stale{Claim: claim(2, 2, "go", "k", "b"), At: at(4.5)})
		}, map[string]int{"overlaps": 1}},
		"somebody with a lower fence, whose replica was frozen for a moment": {func(s *story) {
			s.froze("b", 3.6, 4.4)
			s.Stale = append(s.Stale, observer.Stale{Claim: claim(2, 2, "http", "k", ""), At: at(4.5)})
		}, map[string]int{"overlaps": 1}},
		"somebody with a lower fence, whose successor came 2 s after its replica was frozen": {func(s *story) {
			turnedAway(s, 51, 53, 60)
		}, map[string]int{"overlaps": 1}},
		"somebody with a lower fence, whose successor came before its replica was frozen": {func(s *story) {
			turnedAway(s, 54, 53, 60)
		}, map[string]int{"overlaps": 1}},
		"three inside a limit of two": {func(s *story) {
			for i := range int64(3) {
				c := claim(7+i, 20+i, "exec", "x"+string('0'+rune(i)), "a")
				c.Limit = "narrow"
				s.enqueue(c.Task, "exec")
				s.works(c, 50+float64(i), 55+float64(i), observer.Succeeded, succeeded)
			}
		}, map[string]int{"limit_excesses": 1}},
		"three inside a limit of two, one of which was frozen for a moment before": {func(s *story) {
			s.froze("a", 51, 52)
			for i := range int64(3) {
				c := claim(7+i, 20+i, "go", "x"+string('0'+rune(i)), string('a'+rune(i)))
				c.Limit = "narrow"
				s.enqueue(c.Task, "go")
				s.works(c, 50+3*float64(i), 58, observer.Succeeded, succeeded)
			}
		}, map[string]int{"limit_excesses": 1}},
		"a task that is not there": {func(s *story) { delete(s.Final, 1) }, map[string]int{"lost": 1}},
		"a task that is still running": {func(s *story) {
			s.enqueue(7, "exec")
			s.claim(claim(7, 20, "exec", "7", "a"), 50)
		}, map[string]int{"lost": 1}},
		"a task that is still pending": {func(s *story) { s.enqueue(7, "exec") }, map[string]int{"lost": 1}},
		"a task that is cancelled without a request": {func(s *story) {
			s.enqueue(7, "exec")
			s.change(claim(7, 0, "exec", "7", ""), pending, cancelled, 50, "")
		}, map[string]int{"lost": 1}},
		"a task of a schedule that is still pending": {func(s *story) { s.Final[52] = Final{Status: pending, Schedule: "s"} }, map[string]int{"lost": 1}},
		"a success that was accepted twice": {func(s *story) {
			s.works(claim(1, 20, "exec", "k", "b"), 50, 51, observer.Succeeded, succeeded)
		}, map[string]int{"double_success": 1, "repeated": 1}},
		"a success of a row that has succeeded": {func(s *story) {
			s.stay(claim(6, 20, "exec", "6", "a"), 50, 51, observer.Succeeded)
			s.change(claim(6, 20, "exec", "6", "a"), succeeded, succeeded, 51.1, "")
		}, map[string]int{"double_success": 1, "repeated": 1}},
		"a stale success of a row that has succeeded": {func(s *story) {
			s.change(claim(6, 8, "exec", "6", "a"), succeeded, succeeded, 50, "")
		}, map[string]int{"double_success": 1, "stale_accepted": 1}},
		"a row that was pending all the time, and succeeded by one who was not the newest": {func(s *story) {
			s.enqueue(7, "go")
			s.stay(claim(7, 20, "go", "7", "a"), 50, 51, observer.Succeeded)
			s.stay(claim(7, 21, "go", "7", "b"), 52, 53, observer.Stopped)
			s.change(claim(7, 20, "go", "7", "a"), pending, succeeded, 54, "")
		}, map[string]int{"stale_accepted": 1}},
		"an effect whose success was written apart from it, after somebody newer had begun": {func(s *story) {
			s.enqueue(7, "sql")
			s.enqueue(8, "go")
			s.Effects = append(s.Effects, Effect{Task: 7, Fence: 20, Key: "k4", Began: at(50), Ended: at(51)})
			s.stay(claim(8, 21, "go", "k4", "b"), 51.5, 51.8, observer.Succeeded)
			s.change(claim(8, 21, "go", "k4", "b"), pending, succeeded, 51.9, "")
			s.change(claim(7, 20, "sql", "k4", "a"), pending, succeeded, 52, "")
		}, map[string]int{"stale_accepted": 1}}, // and no overlap: the effect was over
		"an effect that is there twice": {func(s *story) {
			s.Effects = append(s.Effects, s.Effects[0])
		}, map[string]int{"double_effect": 1}},
		"an effect without a success": {func(s *story) {
			s.enqueue(7, "sql")
			s.claim(claim(7, 20, "sql", "7", "a"), 50)
			s.change(claim(7, 20, "sql", "7", "a"), running, failed, 51, "")
			s.Effects = append(s.Effects, Effect{Task: 7, Fence: 20, Key: "7", Began: at(50.5)})
		}, map[string]int{"double_effect": 1}},
		"two rows of one key running": {func(s *story) {
			for i := range int64(2) {
				s.enqueue(7+i, "noop")
				s.claim(claim(7+i, 20+i, "noop", "k9", "a"), 50)
			}
			for i := range int64(2) {
				s.change(claim(7+i, 20+i, "noop", "k9", "a"), running, succeeded, 51, "")
			}
		}, map[string]int{"double_running": 1}},
		"a success that nobody saw": {func(s *story) {
			s.enqueue(7, "exec")
			s.claim(claim(7, 20, "exec", "7", "a"), 50)
			s.change(claim(7, 20, "exec", "7", "a"), running, succeeded, 51, "")
		}, map[string]int{"stale_accepted": 1}},
		"a success of a stale holder, written while the new one works": {func(s *story) {
			s.enqueue(7, "exec")
			s.works(claim(7, 20, "exec", "7", "a"), 50, 51, observer.Succeeded, pending)
			s.claim(claim(7, 21, "exec", "7", "b"), 52)
			s.stay(claim(7, 21, "exec", "7", "b"), 52.1, 60, observer.Stopped)
			s.change(claim(7, 21, "exec", "7", "b"), running, succeeded, 53, "")
		}, map[string]int{"stale_accepted": 1}},
		"a failure of a stale holder, written while the new one works": {func(s *story) {
			s.enqueue(7, "exec")
			s.claim(claim(7, 21, "exec", "7", "b"), 52)
			s.stay(claim(7, 21, "exec", "7", "b"), 52.1, 60, observer.Stopped)
			s.change(claim(7, 21, "exec", "7", "b"), running, failed, 53, "")
		}, map[string]int{"stale_accepted": 1}},
		"a success under a fence of which a higher one had begun": {func(s *story) {
			s.enqueue(7, "exec")
			s.enqueue(8, "exec")
			s.claim(claim(7, 20, "exec", "k3", "a"), 50)
			s.stay(claim(7, 20, "exec", "k3", "a"), 50.1, 51, observer.Succeeded)
			s.stay(claim(8, 21, "exec", "k3", "b"), 52, 53, observer.Stopped)
			s.change(claim(7, 20, "exec", "k3", "a"), running, succeeded, 54, "")
			s.Final[8] = Final{Status: failed}
		}, map[string]int{"stale_accepted": 1}},
		"a row that was reset, begun by the same replica": {func(s *story) {
			handsOn(s, SessionUnheard, "a")
		}, map[string]int{"overlaps": 1}},
		"a row that was reset, and no session ended": {func(s *story) {
			handsOn(s, "freeze-thaw", "b")
		}, map[string]int{"overlaps": 1}},
		"a task that somebody else than the operator deleted": {func(s *story) {
			s.enqueue(7, "exec")
			s.change(claim(7, 0, "exec", "7", ""), pending, Deleted, 50, "daemon-1")
			delete(s.Final, 7)
		}, map[string]int{"lost": 1}},
		"a task that is cancelled, where only its priority was edited": {func(s *story) {
			s.enqueue(7, "exec")
			s.touch(7, Edited)
			s.change(claim(7, 0, "exec", "7", ""), pending, cancelled, 50, "")
		}, map[string]int{"lost": 1}},
		"a task that is still pending after a retry by hand": {func(s *story) {
			s.touch(1, Retried)
			s.change(claim(1, 1, "exec", "k", "a"), succeeded, pending, 50, Operator)
		}, map[string]int{"lost": 1}},
		"two successes after one retry by hand": {func(s *story) {
			s.touch(5, Retried)
			s.change(claim(5, 7, "noop", "5", ""), succeeded, pending, 50, Operator)
			for fence := range int64(2) {
				c := claim(5, 20+fence, "noop", "5", "a")
				s.claim(c, 51+float64(fence))
				s.change(c, running, succeeded, 51.5+float64(fence), "")
			}
		}, map[string]int{"double_success": 1}},
		"three effects after one retry by hand": {func(s *story) {
			retryEffect(s)
			s.Effects = append(s.Effects, s.Effects[1])
		}, map[string]int{"double_effect": 1, "repeated": 1}},
		"a command whose row was deleted, beside the next of its key": {func(s *story) {
			deletedWhileRunning(s, 59)
		}, map[string]int{"overlaps": 1}},
		"a due task that nobody claimed while a transaction was open": {func(s *story) {
			starve(s, OpenTransaction)
			s.works(claim(7, 20, "exec", "7", "a"), 70, 71, observer.Succeeded, succeeded)
		}, map[string]int{"starved": 1}},
		"a due task that nobody claimed while two replicas were frozen in their claims": {func(s *story) {
			starve(s, ClaimFreeze, ClaimFreeze)
			s.works(claim(7, 20, "exec", "7", "a"), 70, 71, observer.Succeeded, succeeded)
		}, map[string]int{"starved": 1}},
		"a due task that nobody ever claimed while a replica was frozen in its claim": {func(s *story) {
			starve(s, ClaimFreeze)
			s.Final[7] = Final{Status: failed}
		}, map[string]int{"starved": 1}},
		"a due task that claims passed over, while tasks that came due later were claimed": {func(s *story) {
			starve(s, OpenTransaction)
			s.queue(51, 53)
			s.queue(53, 54, 56, 58, 60, 62, 64, 66, 68)
			s.works(claim(7, 20, "exec", "7", "a"), 70, 71, observer.Succeeded, succeeded)
		}, map[string]int{"starved": 1}},
		"a due task that nobody claimed for 9 s between two faults": {func(s *story) {
			starveAmong(s, 52, 45, 50, 69, 75)
			s.works(claim(7, 20, "exec", "7", "a"), 86, 87, observer.Succeeded, succeeded)
		}, map[string]int{"starved": 1}},
		"a due task that nobody claimed for 9 s after a fault in which it came due": {func(s *story) {
			starveAmong(s, 52, 50, 54)
			s.works(claim(7, 20, "exec", "7", "a"), 73.2, 74, observer.Succeeded, succeeded)
		}, map[string]int{"starved": 1}},
		"a due task that nobody ever claimed, which came due in a fault": {func(s *story) {
			starveAmong(s, 52, 50, 54)
			s.Final[7] = Final{Status: failed}
		}, map[string]int{"starved": 1}},
		"a due task that nobody claimed, long after the clock of Postgres was right again": {func(s *story) {
			starve(s)
			s.ClockSteps = []ClockStep{{at(20), time.Minute}, {at(30), 0}}
			s.works(claim(7, 20, "exec", "7", "a"), 64, 65, observer.Succeeded, succeeded)
		}, map[string]int{"starved": 1}},
		"a due task that nobody claimed after three replicas were frozen in their claims": {func(s *story) {
			starve(s, ClaimFreeze, ClaimFreeze, ClaimFreeze)
			s.works(claim(7, 20, "exec", "7", "a"), 74, 75, observer.Succeeded, succeeded)
		}, map[string]int{"starved": 1}},
		"a due task that nobody claimed while three replicas were frozen in their claims, one after the other": {func(s *story) {
			starve(s)
			for i, begin := range []float64{50, 55, 60} {
				s.harm(ClaimFreeze, string('a'+rune(i)), begin, begin+4)
			}
			s.works(claim(7, 20, "exec", "7", "a"), 61, 62, observer.Succeeded, succeeded)
		}, map[string]int{"starved": 1}},
		"a due task behind a queue that stood still": {func(s *story) {
			starve(s, OpenTransaction)
			s.queue(51, 54, 56, 67, 68, 69)
			s.works(claim(7, 20, "exec", "7", "a"), 70, 71, observer.Succeeded, succeeded)
		}, map[string]int{"starved": 4}}, // itself, and the last three of the queue
		"a due task behind others that are less urgent": {func(s *story) {
			starve(s, OpenTransaction)
			s.Enqueued[len(s.Enqueued)-1].Priority = 1
			s.queue(51, 54, 56, 58, 60, 62, 64, 66, 68)
			s.works(claim(7, 20, "exec", "7", "a"), 70, 71, observer.Succeeded, succeeded)
		}, map[string]int{"starved": 1}},
		"a due task behind a queue for more than a minute": {func(s *story) {
			starve(s, OpenTransaction)
			var claimed []float64
			for when := 54.0; when < 120; when += 2 {
				claimed = append(claimed, when)
			}
			s.queue(51, claimed...)
			s.works(claim(7, 20, "exec", "7", "a"), 120, 121, observer.Succeeded, succeeded)
		}, map[string]int{"starved": 5}}, // itself, and the last four of the queue
		"a healthy task that failed among hostile rows": {func(s *story) {
			s.Gentle = true
			s.enqueue(7, "exec")
			s.works(claim(7, 20, "exec", "7", "a"), 50, 51, observer.Failed, failed)
		}, map[string]int{"spoiled": 1}},
		"a task whose row was locked, and that failed among hostile rows": {func(s *story) {
			s.Gentle = true
			s.enqueue(7, "exec")
			s.touch(7, Locked)
			s.works(claim(7, 20, "exec", "7", "a"), 50, 51, observer.Failed, failed)
		}, map[string]int{"spoiled": 1}},
		"an attempt at a row that was locked, which a graceful restart used up before its handler began": {func(s *story) {
			restarted(s, pending, 1)
			s.touch(7, Locked)
		}, map[string]int{"spent": 1}},
		"a fence that another task had before": {func(s *story) {
			s.enqueue(7, "exec")
			s.works(claim(7, 20, "exec", "7", "a"), 50, 51, observer.Succeeded, succeeded)
			s.stay(claim(8, 20, "exec", "8", "a"), 60, 61, observer.Stopped)
		}, map[string]int{"fences_repeated": 1, "stale_accepted": 1}},
		"a command that was begun twice": {func(s *story) {
			s.enqueue(7, "exec")
			s.stay(claim(7, 20, "exec", "7", "a"), 51, 52, observer.Stopped)
			s.works(claim(7, 20, "exec", "7", "a"), 50, 53, observer.Succeeded, succeeded)
		}, map[string]int{"fences_repeated": 1}},
		"a handler that was begun again after its end, and a command of a process more": {func(s *story) {
			s.enqueue(7, "go")
			s.stay(claim(7, 20, "go", "7", "a"), 48, 49, observer.Stopped)
			s.works(claim(7, 20, "go", "7", "a"), 50, 53, observer.Succeeded, succeeded)
			c := claim(1, 1, "exec", "k", "a")
			c.Part = "child"
			s.stay(c, 1.1, 1.9, observer.Succeeded)
		}, map[string]int{"fences_repeated": 1}},
		"a handler under a limit of its kind that was begun twice": {func(s *story) {
			s.enqueue(7, "capped")
			s.stay(claim(7, 20, "capped", "7", "a"), 48, 49, observer.Stopped)
			s.works(claim(7, 20, "capped", "7", "a"), 50, 53, observer.Succeeded, succeeded)
		}, map[string]int{"fences_repeated": 1}},
		"a statement that Postgres refused for what it says": {func(s *story) {
			s.enqueue(7, "sql")
			s.Final[7] = Final{Status: failed, Error: "ERROR: value out of range (SQLSTATE 22003)"}
		}, map[string]int{"spoiled": 1}},
		"two statements of one lock key, the older of which was undone": {func(s *story) {
			s.statement("a", 50, 55)
			s.statement("b", 55, 56)
		}, map[string]int{"double_statements": 1}},
		"two statements of one task's fence": {func(s *story) {
			s.statement("a", 50, 55)
			s.statement("a", 52, 53)
			s.Statements[1].Fence = s.Statements[0].Fence
		}, map[string]int{"double_statements": 1}},
		"a statement that went on beside a handler of its lock key": {func(s *story) {
			undone(s, 55)
			s.enqueue(8, "go")
			s.works(claim(8, 21, "go", "k5", "b"), 54, 56, observer.Succeeded, succeeded)
		}, map[string]int{"double_statements": 1}},
		"a statement that began beside a command of its lock key": {func(s *story) {
			s.enqueue(8, "exec")
			s.works(claim(8, 19, "exec", "k5", "b"), 48, 50.5, observer.Failed, failed)
			undone(s, 55)
		}, map[string]int{"double_statements": 1}},
		"a statement of a frozen replica that went on beside a request of its lock key": {func(s *story) {
			s.froze("a", 51, 70)
			undone(s, 61)
			s.enqueue(8, "http")
			s.works(claim(8, 21, "http", "k5", "b"), 60, 62, observer.Succeeded, succeeded)
		}, map[string]int{"double_statements": 1}},
		"an attempt that a graceful restart used up before its handler began": {func(s *story) {
			restarted(s, pending, 1)
		}, map[string]int{"spent": 1}},
		"an attempt that somebody else called used up after a graceful restart": {func(s *story) {
			restarted(s, pending, 1)
			s.Transitions[len(s.Transitions)-1].At = at(64)
		}, map[string]int{"spent": 1}},
		"a task with one attempt that failed by a graceful restart, its handler at work": {func(s *story) {
			c := restarted(s, failed, 1)
			s.Enqueued[len(s.Enqueued)-1].Once = true
			s.stay(c, 50.1, 51.8, observer.Gone)
		}, map[string]int{"spent": 1}},
		"an sql task with one attempt that failed by a graceful restart": {func(s *story) {
			restarted(s, failed, 1)
			s.Enqueued[len(s.Enqueued)-1].Once = true
			for i := range s.Transitions[len(s.Transitions)-2:] {
				s.Transitions[len(s.Transitions)-2+i].Kind = kindSQL
			}
		}, map[string]int{"spent": 1}},
		"a command that began while no Consul server ran": {func(s *story) {
			began(s, "exec", 54)
		}, map[string]int{"unlocked": 1}},
		"a handler that began while no Consul server ran, long after its replica had been frozen for a moment": {func(s *story) {
			s.froze("a", 51.2, 51.5)
			began(s, "go", 58)
		}, map[string]int{"unlocked": 1}},
		"a handler that began while no Consul server ran, before its replica was frozen": {func(s *story) {
			s.froze("a", 55, 58)
			began(s, "go", 54)
		}, map[string]int{"unlocked": 1}},
		"a handler that was claimed after the last Consul server had ended": {func(s *story) {
			beganLate(s, 50.1, 55)
		}, map[string]int{"unlocked": 1}},
		"a handler that began for too long after the last Consul server had ended": {func(s *story) {
			beganLate(s, 49.9, 59.5)
		}, map[string]int{"unlocked": 1}},
		"a due time without an occurrence":      {func(s *story) { s.Occurrences = s.Occurrences[1:]; delete(s.Final, 50) }, map[string]int{"occurrences_missing": 1}},
		"a due time that was skipped":           {func(s *story) { s.Occurrences[1].Task, s.Occurrences[1].Skipped = 0, "missed"; delete(s.Final, 51) }, map[string]int{"occurrences_missing": 1}},
		"an occurrence whose task is not there": {func(s *story) { delete(s.Final, 52) }, map[string]int{"occurrences_missing": 1}},
		"a due time with two tasks, where an operator has deleted another task of the schedule": {func(s *story) {
			s.touch(52, Deleted)
			s.change(claim(52, 20, "noop", "52", "a"), succeeded, Deleted, 50, Operator)
			delete(s.Final, 52)
			s.Final[53] = Final{Status: succeeded, Schedule: "s"}
		}, map[string]int{"occurrences_doubled": 1}},
		"a due time with two tasks": {func(s *story) { s.Final[53] = Final{Status: succeeded, Schedule: "s"} }, map[string]int{"occurrences_doubled": 1}},
	} {
		t.Run(name, func(t *testing.T) {
			s := good()
			c.how(s)
			v := Check(s.Evidence)
			if got := numbers(t, v); !maps.Equal(got, c.want) {
				t.Errorf("the checker found %v, want %v; it says\n\t%s", got, c.want, strings.Join(v.Violations, "\n\t"))
			}
			if !v.Violated() {
				t.Error("no violation")
			}
		})
	}
}

// What looks like a violation and is none.
// A task, and another one whose lock_key is its ID, are kept apart by the row alone: that is
// an excuse only if somebody has reset the row before.
func TestALockKeyThatIsAnID(t *testing.T) {
	for name, c := range map[string]struct {
		key        string
		reset      float64 // when somebody resets the row of task 7; zero: nobody
		statements int     // violations
		overlaps   int
	}{
		"reset":                        {"7", 52, 0, 0},
		"not reset":                    {"7", 0, 1, 1},
		"reset afterwards":             {"7", 53.9, 1, 1},
		"reset, and an ordinary key":   {"k", 52, 1, 1},
		"reset, and another task's ID": {"9", 52, 1, 1},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStory()
			a, b := claim(7, 20, "sql", c.key, "a"), claim(8, 21, "sql", c.key, "b")
			s.enqueue(7, "sql")
			s.enqueue(8, "sql")
			s.claim(a, 49.9)
			s.stay(a, 50, 55, observer.Stopped)
			if c.reset > 0 {
				s.change(a, running, pending, c.reset, Operator)
			}
			s.works(b, 53, 54, observer.Succeeded, succeeded)
			s.statement("a", 50, 55)
			s.statement("b", 53, 54)
			v := Check(s.Evidence)
			if v.DoubleStatements != c.statements || v.Overlaps != c.overlaps {
				t.Errorf("%d statements at once and %d overlaps, want %d and %d: %v", v.DoubleStatements, v.Overlaps, c.statements, c.overlaps, v.Violations)
			}
		})
	}
}

func TestExcuses(t *testing.T) {
	for name, c := range map[string]struct {
		how  func(s *story)
		want map[string]int
	}{
		"a request of a frozen replica, beside its successor with a higher fence": {func(s *story) {
			s.froze("b", 51, 70)
			s.enqueue(7, "http")
			s.claim(claim(7, 20, "http", "7", "b"), 49)
			s.stay(claim(7, 20, "http", "7", "b"), 50, 61, observer.Succeeded)
			s.change(claim(7, 20, "http", "7", "b"), running, pending, 59, "")
			s.works(claim(7, 21, "http", "7", "a"), 60, 62, observer.Succeeded, succeeded)
		}, map[string]int{"frozen_http_in_flight": 1, "repeated": 1}},
		"a task that Postgres has forgotten, and one that it has forgotten to have succeeded": {func(s *story) {
			s.Forgetful = true
			s.Enqueued = append(s.Enqueued, Enqueued{Task: 7, Kind: "exec", Due: at(50)})
			s.enqueue(8, "exec")
			s.works(claim(8, 20, "exec", "8", "a"), 50, 51, observer.Succeeded, succeeded)
			s.works(claim(8, 21, "exec", "8", "a"), 60, 61, observer.Succeeded, succeeded)
		}, map[string]int{"repeated": 1}},
		"a request of a frozen replica that leaves its rows pending": {func(s *story) {
			s.froze("b", 51, 70)
			s.enqueue(7, "http")
			s.Begun = append(s.Begun, Begun{Fence: 20, Replica: "b"}, Begun{Fence: 21, Replica: "a"})
			s.stay(claim(7, 20, "http", "7", "b"), 50, 61, observer.Succeeded)
			s.stay(claim(7, 21, "http", "7", "a"), 60, 62, observer.Succeeded)
			s.change(claim(7, 21, "http", "7", "a"), pending, succeeded, 62.1, "")
		}, map[string]int{"frozen_http_in_flight": 1, "repeated": 1}},
		"a handler that was frozen, and noticed when it thawed": {func(s *story) {
			s.froze("b", 51, 60)
			s.enqueue(7, "go")
			s.claim(claim(7, 20, "go", "7", "b"), 49)
			s.stay(claim(7, 20, "go", "7", "b"), 50, 60.4, observer.Stopped)
			s.change(claim(7, 20, "go", "7", "b"), running, pending, 59, "")
			s.works(claim(7, 21, "go", "7", "a"), 59.5, 64, observer.Succeeded, succeeded)
		}, map[string]int{"frozen_go_in_flight": 1}},
		"a handler that was frozen, beside a successor that came after 5 s": {func(s *story) { frozenFor(s, 5) }, map[string]int{"frozen_go_in_flight": 1}},
		"a handler that was frozen, and its session destroyed": {func(s *story) {
			frozenFor(s, 2)
			s.harm(SessionDestroy, "b", 50, 50.1)
		}, map[string]int{"frozen_go_in_flight": 1}},
		"a handler that was frozen, and its replica black-holed before": {func(s *story) {
			frozenFor(s, 2)
			s.harm("cut-both", "b", 42, 50)
		}, map[string]int{"frozen_go_in_flight": 1}},
		"a handler that was frozen, and frozen before": {func(s *story) {
			frozenFor(s, 2)
			s.froze("b", 40, 50.5)
		}, map[string]int{"frozen_go_in_flight": 1}},
		"a handler that was frozen, and a key deleted": {func(s *story) {
			frozenFor(s, 2)
			s.harm(KeyDelete, "service/onejob/tasks/", 52, 52.1)
		}, map[string]int{"frozen_go_in_flight": 1}},
		"a handler that was frozen, and rows reset": {func(s *story) {
			frozenFor(s, 2)
			s.harm("row-reset", "some rows", 52, 52.1)
		}, map[string]int{"frozen_go_in_flight": 1}},
		"a handler that was frozen, and the agent of its host lost": {func(s *story) {
			frozenFor(s, 2)
			s.Hosts = map[string][]string{"host-1": {"a"}, "host-2": {"b"}}
			s.harm("agent-loss", "host-2", 45, 60)
		}, map[string]int{"frozen_go_in_flight": 1}},
		"a handler that was frozen on a machine that stood still before": {func(s *story) {
			frozenFor(s, 2)
			s.Delays = []Delay{{at(47), 3 * time.Second}}
		}, map[string]int{"frozen_go_in_flight": 1}},
		"a command that was suspended with its guard, which ended it when both went on": {func(s *story) {
			s.suspended("b", 51, 60)
			s.enqueue(7, "exec")
			s.claim(claim(7, 20, "exec", "7", "b"), 49)
			s.stay(claim(7, 20, "exec", "7", "b"), 50, 60.4, observer.Stopped)
			s.change(claim(7, 20, "exec", "7", "b"), running, pending, 59, "")
			s.works(claim(7, 21, "exec", "7", "a"), 59.5, 64, observer.Succeeded, succeeded)
		}, map[string]int{"suspended_commands": 1}},
		"a request that a frozen replica sends when it thaws": {func(s *story) {
			turnedAway(s, 51, 58, 60)
		}, map[string]int{"frozen_http_in_flight": 1}},
		"a request that a frozen replica sends when it thaws, whose key was deleted": {func(s *story) {
			turnedAway(s, 51, 53, 60)
			s.harm(KeyDelete, "service/onejob/tasks/", 52, 52.1)
		}, map[string]int{"frozen_http_in_flight": 1}},
		"somebody frozen under a slot": {func(s *story) {
			s.froze("b", 51, 70)
			for i := range int64(3) {
				c := claim(7+i, 20+i, "go", "x"+string('0'+rune(i)), string('b'+rune(i)))
				c.Limit = "narrow"
				s.enqueue(c.Task, "go")
				s.works(c, 50+2*float64(i), 55+float64(i), observer.Succeeded, succeeded)
			}
		}, map[string]int{}},
		"one that begins under a slot as its replica thaws": {func(s *story) {
			s.froze("b", 50, 51)
			for i, begin := range []float64{51.5, 60, 60} {
				c := claim(7+int64(i), 20+int64(i), "go", "x"+string('0'+rune(i)), "b")
				c.Limit = "narrow"
				s.enqueue(c.Task, "go")
				s.works(c, begin, begin+1, observer.Succeeded, succeeded)
			}
		}, map[string]int{}},
		"one comes as another leaves": {func(s *story) {
			s.enqueue(7, "exec")
			s.enqueue(8, "exec")
			s.works(claim(7, 20, "exec", "k2", "a"), 50, 52, observer.Succeeded, succeeded)
			s.works(claim(8, 21, "exec", "k2", "b"), 52.2, 53, observer.Succeeded, succeeded)
		}, map[string]int{}},
		"a request that was sent again": {func(s *story) {
			s.enqueue(7, "http")
			s.stay(claim(7, 20, "http", "7", "a"), 50, 50.1, observer.Gone)
			s.works(claim(7, 20, "http", "7", "a"), 50.2, 53, observer.Succeeded, succeeded)
		}, map[string]int{}},
		"two processes of one attempt": {func(s *story) {
			c := claim(1, 1, "exec", "k", "a")
			c.Part = "child"
			s.stay(c, 1.1, 1.9, observer.Succeeded)
		}, map[string]int{}},
		"an operator who makes a running row pending": {func(s *story) {
			c := claim(7, 20, "exec", "7", "a")
			s.enqueue(7, "exec")
			s.claim(c, 50)
			s.stay(c, 50.1, 60, observer.Succeeded)
			s.change(c, running, pending, 52, Operator)
			s.works(claim(7, 21, "exec", "7", "a"), 61, 62, observer.Succeeded, succeeded)
		}, map[string]int{"repeated": 1}},
		"an operator who ends a session and resets its row": {func(s *story) {
			handsOn(s, SessionUnheard, "b")
		}, map[string]int{"two_hands": 1}},
		"hostile rows, whatever they do": {func(s *story) {
			s.Hostile = []int64{7, 8}
			for i := range int64(2) {
				c := claim(7+i, 20+i, "exec", "k2", "a")
				s.works(c, 50, 52, observer.Succeeded, succeeded)
				s.works(c, 50, 52, observer.Succeeded, succeeded)
				s.Effects = append(s.Effects, Effect{Task: 7, Fence: 40 + i, Key: "k2", Began: at(50)})
				s.Stale = append(s.Stale, observer.Stale{Claim: c, At: at(51)})
			}
			s.Final[8] = Final{Status: running, Schedule: "s"}
		}, map[string]int{}},
		"rows that an operator deleted": {func(s *story) {
			for id, from := range map[int64]string{7: pending, 8: running, 9: succeeded} {
				s.enqueue(id, "noop")
				c := claim(id, 20+id, "noop", "k5", "a")
				if from != pending {
					s.claim(c, 50+float64(id))
				}
				if from == succeeded {
					s.change(c, running, succeeded, 50.2+float64(id), "")
				}
				s.touch(id, Deleted)
				s.change(c, from, Deleted, 50.5+float64(id), Operator)
				delete(s.Final, id)
			}
		}, map[string]int{}},
		"a task of a schedule that an operator deleted": {func(s *story) {
			s.touch(52, Deleted)
			s.change(claim(52, 20, "noop", "52", "a"), succeeded, Deleted, 50, Operator)
			delete(s.Final, 52)
		}, map[string]int{}},
		"a task of a schedule that an operator cancelled": {func(s *story) {
			s.touch(52, CancelRequested)
			s.Final[52] = Final{Status: cancelled, Schedule: "s"}
		}, map[string]int{}},
		"a task that an operator cancelled in its row": {func(s *story) {
			s.enqueue(7, "exec")
			s.touch(7, CancelRequested)
			s.works(claim(7, 20, "exec", "7", "a"), 50, 51, observer.Stopped, cancelled)
		}, map[string]int{}},
		"a task that an operator retried after its success": {func(s *story) {
			s.touch(1, Retried)
			s.change(claim(1, 1, "exec", "k", "a"), succeeded, pending, 50, Operator)
			s.works(claim(1, 20, "exec", "k", "b"), 51, 52, observer.Succeeded, succeeded)
		}, map[string]int{"repeated": 1}},
		"an sql task that an operator retried after its success": {retryEffect, map[string]int{"repeated": 1}},
		"a command whose row was deleted, and the next of its key after it": {func(s *story) {
			deletedWhileRunning(s, 61)
		}, map[string]int{}},
		"a due task that nobody claimed while a person had to help": {func(s *story) {
			starve(s, Helpless)
			s.works(claim(7, 20, "exec", "7", "a"), 70, 71, observer.Succeeded, succeeded)
		}, map[string]int{}},
		"a task that waited while another fault went on as well": {func(s *story) {
			starve(s, OpenTransaction, "consul-freeze")
			s.works(claim(7, 20, "exec", "7", "a"), 70, 71, observer.Succeeded, succeeded)
		}, map[string]int{}},
		"a task that waited among faults, for less than 8 s without any at a time": {func(s *story) {
			starveAmong(s, 52, 45, 50, 67, 70, 87, 90)
			s.works(claim(7, 20, "exec", "7", "a"), 107, 108, observer.Succeeded, succeeded)
		}, map[string]int{}},
		"a task that came due while the clock of Postgres was ahead": {func(s *story) {
			starve(s)
			s.ClockSteps = []ClockStep{{at(40), time.Minute}, {at(48), 0}}
			s.works(claim(7, 20, "exec", "7", "a"), 108, 109, observer.Succeeded, succeeded)
		}, map[string]int{}},
		"a task that waited after a fault, behind those that were due before it": {func(s *story) {
			starveAmong(s, 52, 40, 54)
			s.queue(45, 65, 67, 69, 71, 73, 75)
			s.works(claim(7, 20, "exec", "7", "a"), 76, 77, observer.Succeeded, succeeded)
		}, map[string]int{}},
		"a task that waited before a restore of Postgres, which forgot its first claim": {func(s *story) {
			s.Forgetful = true
			starveAmong(s, 52, 50, 54, 80, 81)
			s.works(claim(7, 20, "exec", "7", "a"), 92, 93, observer.Succeeded, succeeded)
		}, map[string]int{}},
		"a task that waited while many were frozen in their claims": {func(s *story) {
			starve(s, ClaimFreeze, ClaimFreeze, ClaimFreeze)
			s.works(claim(7, 20, "exec", "7", "a"), 70, 71, observer.Succeeded, succeeded)
		}, map[string]int{}},
		"a task that waited while a transaction had it locked": {func(s *story) {
			starve(s, OpenTransaction)
			s.touch(7, Locked)
			s.works(claim(7, 20, "exec", "7", "a"), 70, 71, observer.Succeeded, succeeded)
		}, map[string]int{}},
		"a task that was claimed while a transaction was open, and again later": {func(s *story) {
			starve(s, OpenTransaction)
			s.works(claim(7, 20, "exec", "7", "a"), 55, 56, observer.Failed, pending)
			s.works(claim(7, 21, "exec", "7", "a"), 70, 71, observer.Succeeded, succeeded)
		}, map[string]int{}},
		"a task that waited behind those that were due before it": {func(s *story) {
			starve(s, OpenTransaction)
			s.queue(51, 54, 56, 58, 60, 62, 64, 66, 68)
			s.works(claim(7, 20, "exec", "7", "a"), 70, 71, observer.Succeeded, succeeded)
		}, map[string]int{}},
		"a task that waited behind those that were due after it, and more urgent": {func(s *story) {
			starve(s, OpenTransaction)
			first := len(s.Enqueued)
			s.queue(53, 54, 56, 58, 60, 62, 64, 66, 68)
			for i := range s.Enqueued[first:] {
				s.Enqueued[first+i].Priority = 1
			}
			s.works(claim(7, 20, "exec", "7", "a"), 70, 71, observer.Succeeded, succeeded)
		}, map[string]int{}},
		"a task that was cancelled while it waited behind a queue": {func(s *story) {
			starve(s, OpenTransaction)
			s.Enqueued[len(s.Enqueued)-1].Cancelled = true
			s.queue(51, 54, 56, 58, 60, 62, 64, 66, 68)
			s.change(claim(7, 0, "exec", "7", ""), pending, cancelled, 70, "")
		}, map[string]int{}},
		"a task behind a queue that stood still while long ones had all slots": {func(s *story) {
			starve(s, OpenTransaction)
			s.queue(51, 54, 56, 65, 66, 68)
			s.works(claim(7, 20, "exec", "7", "a"), 70, 71, observer.Succeeded, succeeded)
		}, map[string]int{}},
		"a task that waited for two minutes behind a queue whose head had waited for longer": {func(s *story) {
			starve(s, OpenTransaction)
			var claimed []float64
			for when := 53.0; when < 170; when += 2 {
				claimed = append(claimed, when)
			}
			s.queue(-100, claimed...)
			s.Marks = append(s.Marks, observer.Mark{ID: 300, Kind: "consul-away", Target: "x", Begin: at(-100), End: at(42)})
			s.works(claim(7, 20, "exec", "7", "a"), 170, 171, observer.Succeeded, succeeded)
		}, map[string]int{}},
		"a task behind a queue that stood still during an outage": {func(s *story) {
			starve(s, OpenTransaction)
			s.Marks = append(s.Marks, observer.Mark{ID: 300, Kind: "consul-away", Target: "x", Begin: at(61), End: at(66)})
			s.queue(51, 54, 56, 58, 60, 76)
			s.works(claim(7, 20, "exec", "7", "a"), 77, 78, observer.Succeeded, succeeded)
		}, map[string]int{}},
		"a statement that began in the hundredth of a second in which the attempt before it ended": {func(s *story) {
			s.enqueue(7, "http")
			s.enqueue(8, "sql")
			s.works(claim(7, 20, "http", "k4", "a"), 50, 51.009, observer.Succeeded, succeeded)
			s.Effects = append(s.Effects, Effect{Task: 8, Fence: 21, Key: "k4", Began: at(51), Ended: at(51.02)})
			s.change(claim(8, 21, "sql", "k4", "b"), running, succeeded, 51.03, "")
		}, map[string]int{}},
		"a task that waited through a fault that takes a server away": {func(s *story) {
			starve(s, "consul-away")
			s.works(claim(7, 20, "exec", "7", "a"), 70, 71, observer.Succeeded, succeeded)
		}, map[string]int{}},
		"tasks that fail as they were made to, or were edited": {func(s *story) {
			s.Gentle = true
			s.Enqueued = append(s.Enqueued, Enqueued{Task: 7, Kind: "exec", Doomed: true})
			s.works(claim(7, 20, "exec", "7", "a"), 50, 51, observer.Stopped, failed)
			s.enqueue(8, "exec")
			s.touch(8, Edited)
			s.works(claim(8, 21, "exec", "8", "a"), 50, 51, observer.Stopped, failed)
		}, map[string]int{}},
		"two statements of one lock key, one after the other, and one of another key": {func(s *story) {
			s.statement("a", 50, 55)
			s.statement("b", 55.1, 57)
			s.statement("b", 52, 56)
			s.Statements[2].Key++
		}, map[string]int{}},
		"a statement that was undone before a handler of its lock key began": {func(s *story) {
			undone(s, 53.95)
			s.enqueue(8, "go")
			s.works(claim(8, 21, "go", "k5", "b"), 54, 56, observer.Succeeded, succeeded)
		}, map[string]int{}},
		"a statement beside a handler of another lock key": {func(s *story) {
			undone(s, 55)
			s.enqueue(8, "go")
			s.works(claim(8, 21, "go", "k6", "b"), 54, 56, observer.Succeeded, succeeded)
		}, map[string]int{}},
		"a statement beside an outsider": {func(s *story) {
			undone(s, 55)
			s.stay(outsider("o/1", "k5"), 54, 56, observer.Succeeded)
		}, map[string]int{"outsiders": 1}},
		"a statement beside a handler whose replica was frozen": {func(s *story) {
			s.froze("b", 41, 53)
			s.enqueue(8, "go")
			s.works(claim(8, 19, "go", "k5", "b"), 40, 52, observer.Failed, failed)
			undone(s, 55)
		}, map[string]int{"frozen_go_in_flight": 1}},
		"a statement whose row was reset and session ended, beside a handler": {func(s *story) {
			undone(s, 55)
			s.harm(SessionUnheard, "a", 51, 60)
			s.Transitions[len(s.Transitions)-1].By = Operator
			s.enqueue(8, "go")
			s.works(claim(8, 21, "go", "k5", "b"), 54, 56, observer.Succeeded, succeeded)
		}, map[string]int{"two_hands": 1}},
		"an attempt that a graceful restart gave back before its handler began": {func(s *story) {
			restarted(s, pending, 0)
		}, map[string]int{}},
		"an attempt that was used up though its handler had begun": {func(s *story) {
			s.stay(restarted(s, pending, 1), 50.1, 51.8, observer.Stopped)
		}, map[string]int{}},
		"an attempt that was used up in the restart of another replica": {func(s *story) {
			restarted(s, pending, 1)
			s.Marks[len(s.Marks)-1].Target = "b"
		}, map[string]int{}},
		"an attempt that was claimed after the restart": {func(s *story) {
			restarted(s, pending, 1)
			s.Marks[len(s.Marks)-1].Begin, s.Marks[len(s.Marks)-1].End = at(48), at(49)
		}, map[string]int{}},
		"an attempt that another fault may have used up": {func(s *story) {
			restarted(s, failed, 1)
			s.Enqueued[len(s.Enqueued)-1].Once = true
			s.Marks = append(s.Marks, observer.Mark{ID: 300, Kind: "consul-kill", Target: "x", Begin: at(40), End: at(41)})
		}, map[string]int{}},
		"a task that was made to fail, in a graceful restart": {func(s *story) {
			restarted(s, failed, 1)
			s.Enqueued[len(s.Enqueued)-1].Doomed = true
		}, map[string]int{}},
		"a stranger's command that began while no Consul server of the others ran": {func(s *story) {
			began(s, "exec", 54)
			s.Marks = append(s.Marks, observer.Mark{ID: 201, Kind: Stranger, Target: "a", Begin: at(51), End: at(59)})
		}, map[string]int{}},
		"a command that was about to begin when the last Consul server was killed": {func(s *story) {
			began(s, "exec", 52)
		}, map[string]int{}},
		"a handler whose claim was committed slowly while no Consul server ran": {func(s *story) {
			beganLate(s, 49.9, 55)
		}, map[string]int{}},
		"a handler that thawed while no Consul server ran": {func(s *story) {
			s.froze("a", 51, 54)
			began(s, "go", 54.1)
		}, map[string]int{}},
		"a task that was cancelled on request": {func(s *story) {
			s.Enqueued = append(s.Enqueued, Enqueued{Task: 7, Kind: "exec", Cancelled: true})
			s.change(claim(7, 0, "exec", "7", ""), pending, cancelled, 50, "")
		}, map[string]int{}},
	} {
		t.Run(name, func(t *testing.T) {
			s := good()
			c.how(s)
			v := Check(s.Evidence)
			if got := numbers(t, v); !maps.Equal(got, c.want) {
				t.Errorf("the checker found %v, want %v; it says\n\t%s", got, c.want, strings.Join(v.Violations, "\n\t"))
			}
			if v.Violated() {
				t.Error("a violation")
			}
		})
	}
}

// retryEffect lets an operator retry the sql task of the good history.
func retryEffect(s *story) {
	s.touch(4, Retried)
	c := claim(4, 20, "sql", "k", "a")
	s.change(c, succeeded, pending, 50, Operator)
	s.claim(c, 50.9)
	s.Effects = append(s.Effects, Effect{Task: 4, Fence: 20, Key: "k", Began: at(51)})
	s.change(c, running, succeeded, 52, "")
}

// deletedWhileRunning lets an operator delete the row of a command that goes on
// until 60; the next task of its lock key begins at a moment.
func deletedWhileRunning(s *story, next float64) {
	c := claim(7, 20, "exec", "k3", "a")
	s.enqueue(7, "exec")
	s.enqueue(8, "exec")
	s.claim(c, 50)
	s.stay(c, 50.1, 60, observer.Succeeded)
	s.touch(7, Deleted)
	s.change(c, running, Deleted, 52, Operator)
	delete(s.Final, 7)
	s.works(claim(8, 21, "exec", "k3", "b"), next, 62, observer.Succeeded, succeeded)
}

// statement is one of an sql task at work. It leaves no other trace, as if it was
// undone.
func (s *story) statement(replica string, first, last float64) {
	n := len(s.Statements)
	s.Statements = append(s.Statements, Statement{Fence: 20 + int64(n), PID: 500 + n, Key: 77, Replica: replica, First: at(first), Last: at(last)})
}

// undone adds an sql task of lock key k5 that replica a claims at 50, and whose row is given up at 53. Its statement
// is at work from 50 to a moment, and undone.
func undone(s *story, until float64) {
	c := claim(7, 20, "sql", "k5", "a")
	s.enqueue(7, "sql")
	s.claim(c, 49.9)
	s.statement("a", 50, until)
	s.change(c, running, pending, 53, "")
	s.Final[7] = Final{Status: failed}
}

// restarted adds a task that replica a claims at 50, and that is given up at 52, with so
// many attempts used up, as a graceful restart from 51 to 53 goes on.
func restarted(s *story, next string, used int) observer.Claim {
	c := claim(7, 20, "exec", "k7", "a")
	s.enqueue(7, "exec")
	s.claim(c, 50)
	s.Transitions[len(s.Transitions)-1].Attempt = 1
	s.change(c, running, next, 52, "")
	s.Transitions[len(s.Transitions)-1].Attempt = used
	s.Final[7] = Final{Status: failed}
	s.Marks = append(s.Marks, observer.Mark{ID: 200, Kind: GracefulRestart, Target: "a", Begin: at(51), End: at(53)})
	return c
}

// began adds a task of replica a that begins at a moment; from 50 to 60 no Consul
// server runs.
func began(s *story, kind string, when float64) {
	s.Marks = append(s.Marks, observer.Mark{ID: 200, Kind: NoConsul, Target: "all", Begin: at(50), End: at(60)})
	s.enqueue(7, kind)
	s.works(claim(7, 20, kind, "k8", "a"), when, when+1, observer.Succeeded, succeeded)
}

// beganLate adds a task of replica a that is claimed at a moment, and begins at another; from 50 to
// 60 no Consul server runs.
func beganLate(s *story, claimed, begins float64) {
	s.Marks = append(s.Marks, observer.Mark{ID: 200, Kind: NoConsul, Target: "all", Begin: at(50), End: at(60)})
	s.enqueue(7, "go")
	c := claim(7, 20, "go", "k8", "a")
	s.claim(c, claimed)
	s.stay(c, begins, begins+0.5, observer.Succeeded)
	s.change(c, running, succeeded, begins+0.6, "")
}

// starve adds a task that is due at 52, and faults from 50 to 65.
func starve(s *story, kinds ...string) {
	for i, kind := range kinds {
		s.Marks = append(s.Marks, observer.Mark{ID: 200 + i, Kind: kind, Target: "x", Begin: at(50), End: at(65)})
	}
	s.Enqueued = append(s.Enqueued, Enqueued{Task: 7, Kind: "exec", Due: at(52)})
	s.Final[7] = Final{Status: pending}
}

// starveAmong adds a task that is due at a moment, and faults, each from one moment to another, after which
// tasks may wait for 10 s more.
func starveAmong(s *story, due float64, faults ...float64) {
	for i := 0; i < len(faults); i += 2 {
		s.harm("consul-away", "all", faults[i], faults[i+1])
	}
	starve(s)
	s.Enqueued[len(s.Enqueued)-1].Due = at(due)
}

// queue adds tasks that came due one after the other, from one moment on, and were claimed at
// others.
func (s *story) queue(due float64, claimed ...float64) {
	for i, when := range claimed {
		task := int64(900 + len(s.Enqueued))
		s.Enqueued = append(s.Enqueued, Enqueued{Task: task, Kind: "noop", Due: at(due + float64(i)/1000)})
		c := claim(task, task, "noop", fmt.Sprint(task), "a")
		s.claim(c, when)
		s.change(c, running, succeeded, when+0.1, "")
	}
}

// turnedAway adds a request of replica b, which is frozen from a moment on until it sends the request. Its successor
// begins at another moment.
func turnedAway(s *story, frozen, next, sent float64) {
	s.froze("b", frozen, sent)
	s.enqueue(7, "http")
	c := claim(7, 20, "http", "7", "b")
	s.claim(c, 50)
	s.change(c, running, pending, next-0.2, "")
	s.works(claim(7, 21, "http", "7", "a"), next, next+1, observer.Succeeded, succeeded)
	c.Replica = ""
	s.Stale = append(s.Stale, observer.Stale{Claim: c, At: at(sent + 0.1)})
}

// frozenFor lets a handler of replica b be frozen from 51 to 60, and another one begin in its place so
// many seconds after that began.
func frozenFor(s *story, seconds float64) {
	s.froze("b", 51, 60)
	s.harm("freeze", "b", 51.1, 60)
	s.enqueue(7, "go")
	c := claim(7, 20, "go", "7", "b")
	s.claim(c, 49)
	s.stay(c, 50, 60.4, observer.Stopped)
	s.change(c, running, pending, 51+seconds-0.2, "")
	s.works(claim(7, 21, "go", "7", "a"), 51+seconds, 64, observer.Succeeded, succeeded)
}

// handsOn lets an operator reset the row of an attempt on replica a, and do
// something else to that replica; then somebody begins another task of the key
// while the first is still inside.
func handsOn(s *story, kind, somebody string) {
	c := claim(7, 20, "exec", "k3", "a")
	s.enqueue(7, "exec")
	s.enqueue(8, "exec")
	s.claim(c, 50)
	s.stay(c, 50.1, 60, observer.Gone)
	s.Marks = append(s.Marks, observer.Mark{ID: len(s.Marks) + 1, Kind: kind, Target: "a", Begin: at(51), End: at(58)})
	s.change(c, running, pending, 52, Operator)
	s.works(claim(8, 21, "exec", "k3", somebody), 59, 62, observer.Succeeded, succeeded)
	s.Final[7] = Final{Status: failed}
}

// A zero of starved tasks says of how many: those of which a wait for a minute would have been found.
func TestStarvedAreCounted(t *testing.T) {
	for name, c := range map[string]struct {
		faults []float64
		want   int
	}{
		"no fault":                    {nil, 1},
		"a fault when it comes due":   {[]float64{50, 54}, 1},
		"a fault for longer than 1 m": {[]float64{50, 105}, 0},
		"faults all the time":         {[]float64{45, 50, 65, 70, 85, 90, 105, 110}, 0},
		"a pause between faults":      {[]float64{45, 50, 65, 70, 88.5, 90, 105, 110}, 1},
	} {
		s := newStory()
		starveAmong(s, 52, c.faults...)
		if got := Check(s.Evidence).StarvedJudged; got != c.want {
			t.Errorf("%s: %d were judged, want %d", name, got, c.want)
		}
	}
}

func TestTakeOvers(t *testing.T) {
	v := Check(good().Evidence)
	var kills, freezes []time.Duration
	for _, o := range v.TakeOvers {
		switch o.Cause {
		case Kill:
			kills = append(kills, o.Took)
			if !o.Alone {
				t.Error("the kill was alone")
			}
		case Frozen:
			freezes = append(freezes, o.Took)
		}
	}
	// Task 3: killed at 7, its successor at 14. But it left just as the kill began.
	if len(kills) != 0 {
		t.Errorf("takeovers after the kill: %v; task 3 had left when it began", kills)
	}
	if want := []time.Duration{8 * time.Second}; !slices.Equal(freezes, want) {
		t.Errorf("takeovers after the freeze: %v, want %v", freezes, want)
	}
	if len(v.Slowest) != 1 || v.Slowest[0].Took != 8 || !strings.HasPrefix(v.Slowest[0].After, Frozen+" of ") || len(v.Slowest[0].Faults) == 0 {
		t.Errorf("the slowest takeovers are %+v", v.Slowest)
	}
	s := good()
	s.Stays[slices.IndexFunc(s.Stays, func(s observer.Stay) bool { return s.Fence == 4 })].End = at(7.001)
	v = Check(s.Evidence)
	if i := slices.IndexFunc(v.TakeOvers, func(o TakeOver) bool { return o.Cause == Kill }); i < 0 || v.TakeOvers[i].Took != 7*time.Second {
		t.Errorf("takeovers %v, want one of 7 s after the kill", v.TakeOvers)
	}
	// A host takes several replicas with it.
	s.Marks[slices.IndexFunc(s.Marks, func(m observer.Mark) bool { return m.Kind == Kill })] =
		observer.Mark{ID: 100, Kind: HostLoss, Target: "c,a", Alone: true, Begin: at(7), End: at(20)}
	v = Check(s.Evidence)
	if i := slices.IndexFunc(v.TakeOvers, func(o TakeOver) bool { return o.Cause == HostLoss }); i < 0 || v.TakeOvers[i].Took != 7*time.Second || !v.TakeOvers[i].Alone {
		t.Errorf("takeovers %v, want one of 7 s after the loss of a host", v.TakeOvers)
	}
}

func TestQuantile(t *testing.T) {
	times := []time.Duration{4, 1, 3, 2}
	for q, want := range map[float64]time.Duration{0: 1, 0.5: 3, 0.99: 4, 1: 4} {
		if got := Quantile(times, q); got != want {
			t.Errorf("quantile %v is %d, want %d", q, got, want)
		}
	}
	if got := Quantile(nil, 0.5); got != 0 {
		t.Errorf("of nothing it is %d", got)
	}
}

// Evidence is kept as JSON, and can be checked again.
func TestEvidenceSurvivesAFile(t *testing.T) {
	s := good()
	s.stay(claim(6, 30, "exec", "6", "b"), 26.5, 28, observer.Stopped)
	b, err := json.Marshal(s.Evidence)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "evidence.json")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	e, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := numbers(t, Check(e)), numbers(t, Check(s.Evidence)); !maps.Equal(got, want) || want["overlaps"] != 1 {
		t.Errorf("judged again: %v, want %v", got, want)
	}
}
