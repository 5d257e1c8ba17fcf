package store_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"onejob/internal/testenv"
	"onejob/store"
	"onejob/tasks"
)

// joined adds a replica with a session and a process of its own to the list.
func (b *bench) joined(name string) tasks.Replica {
	b.t.Helper()
	ctx := context.WithoutCancel(b.t.Context())
	id, err := b.ClusterID(ctx)
	if err == nil && id == "" {
		err = b.AdoptConsul(ctx, "", nil, false, name, func(_ context.Context, next string) error { id = next; return nil })
	}
	r := tasks.Replica{Session: uuid.NewString(), Process: uuid.NewString(), Name: name, State: tasks.ReplicaWorking}
	if err == nil {
		err = b.Join(ctx, id, r)
	}
	if err != nil {
		b.t.Fatal(err)
	}
	return b.listed(r.Session)
}

// join puts the bench's own session on the list.
func (b *bench) join() { b.session = b.joined("one").Session }

// beat sends a heartbeat, again if Postgres has not answered in time.
func (b *bench) beat(r tasks.Replica, known tasks.Known) (answer tasks.Answer) {
	b.t.Helper()
	testenv.Eventually(b.t, time.Minute, "Postgres answers a heartbeat", func() bool {
		var err error
		answer, err = b.Beat(b.t.Context(), r, known)
		if err != nil && !late(err) {
			b.t.Fatal(err)
		}
		return err == nil
	})
	return answer
}

// listed returns a replica as it is on the list.
func (b *bench) listed(session string) tasks.Replica {
	b.t.Helper()
	list, err := b.Replicas(b.t.Context())
	if err != nil {
		b.t.Fatal(err)
	}
	for _, r := range list {
		if r.Session == session {
			return r
		}
	}
	b.t.Fatalf("%s is not on the list", session)
	return tasks.Replica{}
}

// claimedBy claims a new task under the session of r.
func (b *bench) claimedBy(r tasks.Replica, columns ...string) *tasks.Task {
	b.t.Helper()
	other := *b
	other.session = r.Session
	return other.claimed(columns...)
}

// I8: somebody's transaction that has locked rows of the list keeps no replica from joining, and no
// heartbeat from its connection while a death is recorded.
func TestLockedReplicasKeepNobodyWaiting(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	dead, old := b.joined("dead"), b.joined("old")
	b.sql(`UPDATE onejob.replicas SET state = 'stopped', ended_at = now() - interval '2 days' WHERE session = $1`, old.Session)
	tx, err := b.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `SELECT FROM onejob.replicas FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	b.joined("new")
	if how, err := b.DeclareDead(t.Context(), dead, false); how != "" || err == nil || !strings.Contains(err.Error(), "locked its row") {
		t.Errorf("declared %q: %v", how, err)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if how, err := b.DeclareDead(t.Context(), dead, false); how != tasks.ReplicaDead || err != nil {
		t.Errorf("declared %q: %v", how, err)
	}
	if how, err := b.DeclareDead(t.Context(), dead, false); how != "" || err != nil {
		t.Errorf("declared for the second time %q: %v", how, err)
	}
	b.joined("newer")
	equal(t, "rows that ended long ago", b.one(`SELECT count(*) FROM onejob.replicas WHERE name = 'old'`), "0")
}

// How a session ended is known for as long as a row runs under it: a row that nobody could write when its replica
// stopped is charged nothing days later.
func TestAnEndThatIsStillNeeded(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	old := b.joined("old")
	task := b.claimedBy(old)
	b.sql(`UPDATE onejob.replicas SET state = 'stopped', ended_at = now() - interval '2 days' WHERE session = $1`, old.Session)
	b.joined("new")
	if _, _, err := b.TakeOver(t.Context(), []string{old.Session}, 3); err != nil {
		t.Fatal(err)
	}
	equal(t, "the row", b.row(task, "status, attempt, crashes"), "pending 0 0")
	b.joined("newer")
	equal(t, "rows that ended long ago", b.one(`SELECT count(*) FROM onejob.replicas WHERE name = 'old'`), "0")
}

// Whatever Consul says: a task is taken over only from a replica that the list says has
// ended. How it ended decides what the task pays for it.
func TestTakeOverNeedsTheList(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	a := b.joined("a")
	task := b.claimedBy(a)
	taken := func() int {
		t.Helper()
		abandoned, refused, err := b.TakeOver(t.Context(), []string{a.Session}, 3)
		if err != nil || len(refused) > 0 {
			t.Fatal(err, refused)
		}
		return len(abandoned)
	}
	equal(t, "taken from a living replica", taken(), 0)
	equal(t, "the row", b.row(task, "status, attempt, crashes"), "running 1 0")

	// A heartbeat that comes between the look and the verdict saves it.
	b.beat(a, tasks.Known{})
	how, err := b.DeclareDead(t.Context(), a, false)
	equal(t, "declared", fmt.Sprint(how, err), fmt.Sprint("", nil))
	equal(t, "taken from a living replica", taken(), 0)

	how, err = b.DeclareDead(t.Context(), b.listed(a.Session), false)
	equal(t, "declared", fmt.Sprint(how, err), fmt.Sprint("dead", nil))
	equal(t, "taken from a dead replica", taken(), 1)
	equal(t, "the row", b.row(task, "status, attempt, crashes"), "pending 1 1")
	equal(t, "the history", b.history(task), "crashed")

	// The dead do not come back by a late heartbeat.
	answer := b.beat(a, tasks.Known{})
	if !answer.Ended || len(answer.Replicas) == 0 || answer.Replicas[0].State != tasks.ReplicaDead {
		t.Errorf("after its heartbeat it is %+v", answer)
	}
}

func TestALostSessionIsNoCrash(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	a := b.joined("a")
	task := b.claimedBy(a, "max_attempts=1", "crashes=2")
	again := a
	again.Session = uuid.NewString()
	id, err := b.ClusterID(t.Context())
	if err == nil {
		err = b.Join(t.Context(), id, again)
	}
	if err != nil {
		t.Fatal(err)
	}
	how, err := b.DeclareDead(t.Context(), a, false)
	equal(t, "declared", fmt.Sprint(how, err), fmt.Sprint("lost", nil))
	if _, _, err := b.TakeOver(t.Context(), []string{a.Session}, 3); err != nil {
		t.Fatal(err)
	}
	equal(t, "the row", b.row(task, "status, attempt, crashes"), "pending 0 2")
	equal(t, "the history", b.history(task), "lease_lost")
}

// Somebody wrote a running row by hand, with a crash and no attempt. What is not charged
// cannot be taken from nothing.
func TestTakeOverOfARowWithoutAnAttempt(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	session := uuid.NewString()
	id := b.insert("status='running'", "crashes=1", "fence=1", "replica='nobody'", "started_at=now()", "session='"+session+"'")
	abandoned, refused, err := b.TakeOver(t.Context(), []string{session}, 3)
	if err != nil || len(refused) > 0 || len(abandoned) != 1 {
		t.Fatalf("taken over: %v, refused: %v, %v", abandoned, refused, err)
	}
	equal(t, "the row", b.one(`SELECT concat_ws(' ', status, attempt, crashes) FROM onejob.tasks WHERE id = $1`, id), "pending 0 1")
}

// Deaths of several replicas at once, a power cut, are no task's fault. Those that
// follow a task from replica to replica are.
func TestWhoIsToBlame(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	dies := func(replicas ...tasks.Replica) {
		t.Helper()
		for _, r := range replicas {
			if how, err := b.DeclareDead(t.Context(), b.listed(r.Session), false); err != nil || how != tasks.ReplicaDead {
				t.Fatal(how, err)
			}
		}
		for _, r := range replicas {
			if _, _, err := b.TakeOver(t.Context(), []string{r.Session}, 3); err != nil {
				t.Fatal(err)
			}
		}
	}
	var bystander string
	for range 3 {
		one, two := b.joined("one"), b.joined("two")
		if bystander == "" {
			bystander = fmt.Sprint(b.claimedBy(one).ID)
		} else {
			b.sql(`UPDATE onejob.tasks SET status = 'running', attempt = attempt + 1, fence = nextval('onejob.fences'), session = $2, replica = 'one', started_at = now() WHERE id = $1`, bystander, one.Session)
		}
		b.sql(`UPDATE onejob.replicas SET heartbeat_at = clock_timestamp() WHERE ended_at IS NULL`) // they were heard of together, however long the rest took
		dies(one, two)
		b.sql(`UPDATE onejob.replicas SET heartbeat_at = heartbeat_at - interval '1 minute'`) // long ago
	}
	equal(t, "the bystander of three power cuts", b.one(`SELECT status || ' ' || crashes FROM onejob.tasks WHERE id = $1`, bystander), "pending 0")
	equal(t, "whether its crashes were charged", b.one(`SELECT string_agg(DISTINCT charged::text, ' ') FROM onejob.attempts WHERE outcome = 'crashed'`), "false")

	b.sql(`DELETE FROM onejob.tasks`)
	poison := b.insert()
	for range 3 {
		r := b.joined("r") // within the same five seconds
		b.sql(`UPDATE onejob.tasks SET status = 'running', attempt = attempt + 1, fence = nextval('onejob.fences'), session = $2, replica = 'r', started_at = now(), begun_at = now() WHERE id = $1`, poison, r.Session)
		dies(r)
	}
	equal(t, "what ended three replicas, one after the other", b.one(`SELECT status || ' ' || crashes FROM onejob.tasks WHERE id = $1`, poison), "failed 3")
	equal(t, "whether they were charged", b.one(`SELECT string_agg(charged::text, ' ') FROM onejob.attempts WHERE outcome = 'crashed' AND task_id = $1`, poison), "true true true")
}

// Of the tasks that a death would quarantine, the death says something only of one that
// had just begun, and only if it was alone. The others are claimed once more.
func TestOnlyTheLikelyCauseIsQuarantined(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name  string
		begun []string // how long before the death each task had begun
		want  string   // status and crashes of each
	}{
		{"begun long ago", []string{"1 minute"}, "pending 3"},
		{"two that had just begun", []string{"1 second", "1 second"}, "pending 3, pending 3"},
		{"alone and just begun", []string{"1 second"}, "failed 3"},
		{"just begun, beside one from long ago", []string{"1 second", "1 minute"}, "failed 3, pending 3"},
		{"not begun", []string{""}, "pending 2"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			a := b.joined("a")
			for _, ago := range test.begun {
				task := b.claimedBy(a, "crashes=2")
				if ago != "" {
					b.sql(`UPDATE onejob.tasks SET started_at = r.heartbeat_at - $2::interval, begun_at = r.heartbeat_at - $2::interval FROM onejob.replicas r WHERE r.session = tasks.session AND id = $1`, task.ID, ago)
				}
			}
			how, err := b.DeclareDead(t.Context(), b.listed(a.Session), false)
			equal(t, "declared", fmt.Sprint(how, err), fmt.Sprint("dead", nil))
			if _, _, err := b.TakeOver(t.Context(), []string{a.Session}, 3); err != nil {
				t.Fatal(err)
			}
			equal(t, "what became of them", b.one(`SELECT string_agg(status || ' ' || crashes, ', ' ORDER BY id) FROM onejob.tasks`), test.want)
		})
	}
}

// Takeovers take more than one statement where Postgres refuses a row or somebody has it
// locked. Suspects that a statement leaves behind were not alone.
func TestSuspectsThatAreTakenOneByOne(t *testing.T) {
	t.Parallel()
	for _, test := range []string{"refused", "locked"} {
		t.Run(test, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			a := b.joined("a")
			var suspects [2]*tasks.Task
			for i := range suspects {
				suspects[i] = b.claimedBy(a, "crashes=2")
				b.sql(`UPDATE onejob.tasks SET begun_at = started_at WHERE id = $1`, suspects[i].ID)
			}
			other := b.claimedBy(a)
			if how, err := b.DeclareDead(t.Context(), b.listed(a.Session), false); err != nil || how != tasks.ReplicaDead {
				t.Fatal(how, err)
			}
			take := func() {
				t.Helper()
				if _, _, err := b.TakeOver(t.Context(), []string{a.Session}, 3); err != nil {
					t.Fatal(err)
				}
			}
			if test == "refused" {
				b.sql(fmt.Sprintf(`ALTER TABLE onejob.tasks ADD CONSTRAINT none CHECK (id <> %d OR status = 'running') NOT VALID`, other.ID))
				take()
			} else {
				tx, err := b.pool.Begin(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				defer tx.Rollback(t.Context())
				if _, err := tx.Exec(t.Context(), `SELECT FROM onejob.tasks WHERE id = $1 FOR UPDATE`, suspects[1].ID); err != nil {
					t.Fatal(err)
				}
				take()
				if err := tx.Rollback(t.Context()); err != nil {
					t.Fatal(err)
				}
				take()
			}
			equal(t, "what became of them", b.one(`SELECT string_agg(status || ' ' || crashes, ', ' ORDER BY id) FROM onejob.tasks WHERE id <> $1`, other.ID), "pending 3, pending 3")
		})
	}
}

// Replicas that a power cut ends together are reported one after the other. Whom a death
// would quarantine waits until it is known whether others died as well.
func TestQuarantineWaitsForOtherDeaths(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, other string // what becomes of the other replica
		then        string
	}{
		{"it died", `UPDATE onejob.replicas SET state = 'dead', ended_at = now() WHERE session = $1`, "pending 2"},
		{"it lives", `UPDATE onejob.replicas SET heartbeat_at = clock_timestamp() + interval '1 hour' WHERE session = $1`, "failed 3"},
		{"nobody knows", `UPDATE onejob.replicas SET heartbeat_at = heartbeat_at - interval '3 seconds' WHERE session = $1`, "pending 2"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			var a, other tasks.Replica
			take := func() string {
				t.Helper()
				if _, _, err := b.TakeOver(t.Context(), []string{a.Session}, 3); err != nil {
					t.Fatal(err)
				}
				return b.one(`SELECT status || ' ' || crashes FROM onejob.tasks`)
			}
			b.eventually("the takeover comes in time", func() bool {
				b.sql(`DELETE FROM onejob.tasks`)
				b.sql(`DELETE FROM onejob.replicas`)
				a = b.joined("a")
				task := b.claimedBy(a, "crashes=2")
				b.sql(`UPDATE onejob.tasks SET begun_at = started_at WHERE id = $1`, task.ID)
				if how, err := b.DeclareDead(t.Context(), b.listed(a.Session), false); err != nil || how != tasks.ReplicaDead {
					t.Fatal(how, err)
				}
				other = b.joined("b")
				began := time.Now()
				b.sql(`UPDATE onejob.replicas SET heartbeat_at = clock_timestamp() - CASE WHEN session = $1 THEN interval '1 second' ELSE interval '0.9 seconds' END`, a.Session)
				got := take()
				if time.Since(began) > 2*time.Second { // the machine stood still, and the other one may be silent for too long by now
					return false
				}
				equal(t, "at first", got, "running 2")
				return true
			})
			b.sql(test.other, other.Session)
			equal(t, "then", take(), test.then)
		})
	}
}

// A replica that stands still while it adopts a Consul lets go of the row that all others need.
func TestAdoptConsulByOneThatIsFrozen(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	frozen := open(t, store.Config{DSN: b.dsn, Timeout: time.Minute}) // nobody ends it here
	id, err := b.ClusterID(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	err = frozen.AdoptConsul(t.Context(), id, nil, false, "frozen", func(context.Context, string) error {
		testenv.Eventually(t, 50*time.Second, "the row is free", func() bool {
			_, err := b.pool.Exec(t.Context(), `SELECT FROM onejob.cluster FOR UPDATE NOWAIT`)
			return err == nil
		})
		return nil
	})
	if err == nil {
		t.Error("it has adopted it")
	}
	equal(t, "the cluster's id", b.one(`SELECT coalesce(id::text, '') FROM onejob.cluster`), id)
}

func TestAdoptConsul(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := t.Context()
	a := b.joined("a")
	id, err := b.ClusterID(ctx)
	if err != nil || id == "" {
		t.Fatalf("id %q, %v", id, err)
	}
	adopt := func(id string, sessions []string, foreign bool, write func(context.Context, string) error) string {
		t.Helper()
		err := b.AdoptConsul(ctx, id, sessions, foreign, "x", write)
		if err == nil {
			return ""
		}
		var other *tasks.OtherClusterError
		if !errors.As(err, &other) {
			return "odd: " + err.Error()
		}
		return other.Why
	}
	var next string
	write := func(_ context.Context, id string) error { next = id; return nil }
	if why := adopt(id, nil, false, write); !strings.Contains(why, "replica a, which may be at work") || next != "" {
		t.Errorf("with a replica elsewhere: %q", why)
	}
	const stranger = "0f794b9c-ef66-4f56-a44c-02db121a7a85"
	if why := adopt(id, []string{a.Session, stranger}, true, write); !strings.Contains(why, "another database") || next != "" {
		t.Errorf("with another's replicas: %q", why)
	}
	if why := adopt(uuid.NewString(), []string{a.Session}, false, write); why != "" || next != "" {
		t.Errorf("with an id of before: %q", why)
	}
	if why := adopt(id, []string{a.Session}, true, func(context.Context, string) error { return errors.New("no") }); !strings.HasPrefix(why, "odd: write") {
		t.Errorf("when it cannot be written: %q", why)
	}
	equal(t, "the id", b.one(`SELECT id::text FROM onejob.cluster`), id)
	if why := adopt(id, []string{a.Session}, true, write); why != "" || next == "" {
		t.Errorf("with all replicas in sight: %q", why)
	}
	equal(t, "the id", b.one(`SELECT id::text FROM onejob.cluster`), next)

	// Who looked before that must look again.
	var other *tasks.OtherClusterError
	if err := b.Join(ctx, id, a); !errors.As(err, &other) {
		t.Errorf("joined: %v", err)
	}

	// A row that runs under a session that nobody knows may be at work as well.
	b.sql(`INSERT INTO onejob.tasks (kind, status, session, replica, fence, started_at, attempt) VALUES ('noop', 'running', $1, 'ghost', nextval('onejob.fences'), now(), 1),
		('other', 'running', $1, 'another name', nextval('onejob.fences'), now(), 1)`, stranger)
	if why := adopt(next, []string{a.Session}, false, write); !strings.Contains(why, "which may be at work, has no session here ("+stranger) {
		t.Errorf("with a task of an unknown session: %q", why)
	}
	names, err := b.ForgetReplicas(ctx, []string{a.Session})
	equal(t, "forgotten", fmt.Sprint(names, err), fmt.Sprint([]string{"another name"}, nil))
	if why := adopt(next, []string{a.Session}, false, write); why != "" {
		t.Errorf("after that was forgotten: %q", why)
	}
	equal(t, "the living", string(b.listed(a.Session).State), "working")
}

// A heartbeat carries how far tasks are, once. All who look see it, of the attempt that said
// it and no other.
func TestProgressOfTasks(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	r := b.joined("one")
	task, other := b.claimedBy(r), b.claimedBy(r)
	percent, at := 33.3, time.Date(2030, 1, 2, 3, 4, 5, 678000, time.UTC)
	said := func(want ...string) {
		t.Helper()
		equal(t, "onejob.progress", fmt.Sprint(b.sql(`SELECT concat_ws(' ', task_id, replica, coalesce(percent::text, '-'), text, said_at AT TIME ZONE 'UTC') FROM onejob.progress ORDER BY task_id`)), fmt.Sprint(want))
	}
	beat := func(progress map[int64]tasks.ProgressAt) {
		t.Helper()
		r.Progress = progress
		b.beat(r, tasks.Known{})
	}
	beat(nil)
	said()
	beat(map[int64]tasks.ProgressAt{task.Fence: {Percent: &percent, Text: `a "quoted" \u0000 line`, At: at}, other.Fence: {Text: "waits", At: at}, 99: {Text: "long gone", At: at}})
	all := []string{
		fmt.Sprintf(`%d one 33.3 a "quoted" \u0000 line 2030-01-02 03:04:05.000678`, task.ID),
		fmt.Sprintf(`%d one - waits 2030-01-02 03:04:05.000678`, other.ID),
	}
	said(all...)
	beat(nil) // nothing new
	said(all...)

	o := b.overview()
	if len(o.Running.Rows) == 0 {
		t.Fatal("the overview has no running tasks")
	}
	if p := o.Running.Rows[0].Progress; p == nil || *p.Percent != percent || !p.SaidAt.Equal(at) {
		t.Errorf("the overview has %+v", p)
	}
	story, err := b.story(other.ID)
	if p := story.Progress; err != nil || p == nil || p.Percent != nil || p.Text != "waits" {
		t.Errorf("the story has %+v, %v", p, err)
	}
	row, _, err := b.Show(t.Context(), task.ID)
	if err != nil || row.Progress == nil || row.Progress.String() != `33.3 %, a "quoted" \u0000 line` {
		t.Errorf("show has %v, %v", row.Progress, err)
	}

	b.sql(`UPDATE onejob.tasks SET fence = fence + 1000 WHERE id = $1`, task.ID) // another attempt has said nothing
	said(all[1])
	beat(map[int64]tasks.ProgressAt{})
	said()
	if row, _, err := b.Show(t.Context(), other.ID); err != nil || row.Progress != nil {
		t.Errorf("show has %v, %v", row.Progress, err)
	}

	// What somebody wrote by hand hides no row.
	for _, written := range []string{`"garbage"`, `[1]`, `null`, `{"percent": "40", "text": "x"}`, `{"text": 7, "said_at": "soon"}`} {
		b.sql(`UPDATE onejob.replicas SET progress = jsonb_build_object($1::text, $2::jsonb, 'x', 1)`, fmt.Sprint(other.Fence), written)
		row, _, err := b.Show(t.Context(), other.ID)
		if err != nil || row.Progress != nil && row.Progress.String() != "" {
			t.Errorf("show of %s has %v, %v", written, row.Progress, err)
		}
		if _, err := b.story(other.ID); err != nil {
			t.Errorf("the story of %s: %v", written, err)
		}
		if page, err := b.List(t.Context(), store.Filter{Limit: 10}); err != nil || len(page.Rows) != 2 {
			t.Errorf("the list of %s: %d rows, %v", written, len(page.Rows), err)
		}
		equal(t, "running", len(b.overview().Running.Rows), 2)
	}
}

// The answer to a heartbeat has the whole list only when that is another one, and otherwise
// those that have sent none for two heartbeats of the asker, whatever Postgres' clock does.
func TestAnswersToHeartbeats(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	one, two, three := b.joined("one"), b.joined("two"), b.joined("three")
	var before, last tasks.Answer
	beat := func(r tasks.Replica) tasks.Answer {
		t.Helper()
		return b.beat(r, tasks.Known{})
	}
	asks := func(what, want string) {
		t.Helper()
		a := b.beat(one, tasks.Known{Server: last.Server, Digest: last.Digest, Since: before.Transaction})
		before, last = last, a
		got := map[bool]string{true: "whole", false: "same"}[a.Whole]
		if a.Ended {
			got += " ended"
		}
		for _, r := range a.Replicas {
			if r.Quiet {
				got += " " + r.Name
			}
		}
		equal(t, what, got, want)
	}
	asks("at first", "whole")
	asks("unchanged", "same")
	asks("since before the first heartbeat", "same two three")
	beat(two)
	asks("two has sent one", "same three")
	asks("two has sent one since the look but one", "same three")
	b.sql(`UPDATE onejob.replicas SET heartbeat_at = heartbeat_at - interval '1 hour' WHERE name = 'two'`) // the clock was set back
	asks("two has sent one by a clock that was set back", "same three")
	three.Running = 1
	beat(three)
	asks("three runs something", "whole")
	asks("unchanged", "same two")
	beat(two)
	three.Kinds = []string{"noop"}
	beat(three)
	asks("three serves a kind", "whole")
	testenv.Eventually(t, time.Minute, "Postgres answers", func() bool {
		err := b.EndReplica(t.Context(), two.Session, tasks.ReplicaStopped)
		if err != nil && !late(err) {
			t.Fatal(err)
		}
		return err == nil
	})
	asks("two has ended", "whole")
	beat(three)
	asks("two has ended", "same")
	asks("two has ended", "same")
	last.Server = last.Server.Add(time.Second)
	asks("of another server", "whole")
	beat(three)
	b.sql(`UPDATE onejob.replicas SET state = 'dead', ended_at = now() WHERE name = 'one'`)
	asks("called dead", "whole ended")
	b.sql(`DELETE FROM onejob.replicas WHERE name = 'one'`)
	a := beat(one)
	equal(t, "a session that is not listed", fmt.Sprint(a.Ended), "true")
}
