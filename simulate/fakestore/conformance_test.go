package fakestore_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"onejob/internal/testenv"
	"onejob/simulate/fakestore"
	"onejob/store"
	"onejob/tasks"
	"onejob/worker"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// side is one of the two that are compared.
type side struct {
	worker.Store
	insert func(queue, lockKey, limit string, priority, maxAttempts int)
	cancel func(id int64)
	forget func(known []string) []string
	unhear func(session string) // its last heartbeat was an hour earlier
	rows   func() []string

	before, last tasks.Answer // to heartbeats
}

func fake() *side {
	d := fakestore.New()
	return &side{
		Store: d.Store(fakestore.Direct),
		insert: func(queue, lockKey, limit string, priority, maxAttempts int) {
			d.Insert(fakestore.Row{Kind: "k", Queue: queue, LockKey: lockKey, Limit: limit, Priority: int16(priority), MaxAttempts: maxAttempts})
		},
		cancel: d.Cancel,
		forget: d.ForgetReplicas,
		unhear: d.Unhear,
		rows: func() (list []string) {
			for _, r := range d.Rows() {
				list = append(list, describe(r.ID, string(r.Status), r.Attempt, r.Crashes, r.Stalls, r.Fence, r.Session, r.Replica, r.RunAt.After(time.Now()), r.Cancel, !r.BegunAt.IsZero(), !r.FinishedAt.IsZero(), r.Error))
			}
			for _, a := range d.Attempts() {
				list = append(list, fmt.Sprint(a.Task, a.Fence, a.Session, a.Outcome))
			}
			return list
		},
	}
}

func real(t *testing.T) *side {
	db := testenv.Postgres(t)
	s, err := store.Open(store.Config{DSN: db.DSN})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	if err := s.Migrate(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	pool := db.Pool(t)
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql, args...); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	return &side{
		Store: s,
		insert: func(queue, lockKey, limit string, priority, maxAttempts int) {
			exec(`INSERT INTO onejob.tasks (kind, queue, lock_key, limit_name, priority, max_attempts) VALUES ('k', $1, nullif($2, ''), nullif($3, ''), $4, $5)`, queue, lockKey, limit, priority, maxAttempts)
		},
		cancel: func(id int64) {
			exec(`UPDATE onejob.tasks SET cancel_requested = true WHERE id = $1 AND status = 'running'`, id)
		},
		forget: func(known []string) []string {
			names, err := s.ForgetReplicas(t.Context(), known)
			if err != nil {
				t.Fatal(err)
			}
			return names
		},
		unhear: func(session string) {
			exec(`UPDATE onejob.replicas SET heartbeat_at = heartbeat_at - interval '1 hour' WHERE session = $1`, session)
		},
		rows: func() []string { return realRows(t, pool) },
	}
}

func realRows(t *testing.T, pool *pgxpool.Pool) []string {
	t.Helper()
	rows, err := pool.Query(t.Context(), `
SELECT id, status, attempt, crashes, stalls, coalesce(fence, 0), coalesce(session::text, ''), coalesce(replica, ''), run_at > clock_timestamp(), cancel_requested,
       begun_at IS NOT NULL, finished_at IS NOT NULL, coalesce(error, '')
  FROM onejob.tasks
 ORDER BY id`)
	if err != nil {
		t.Fatal(err)
	}
	list, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (string, error) {
		var id, fence int64
		var status, session, replica, failure string
		var attempt, crashes, stalls int
		var later, cancel, begun, finished bool
		err := row.Scan(&id, &status, &attempt, &crashes, &stalls, &fence, &session, &replica, &later, &cancel, &begun, &finished, &failure)
		return describe(id, status, attempt, crashes, stalls, fence, session, replica, later, cancel, begun, finished, failure), err
	})
	if err != nil {
		t.Fatal(err)
	}
	rows, err = pool.Query(t.Context(), `SELECT task_id, fence, coalesce(session::text, ''), outcome FROM onejob.attempts ORDER BY task_id, fence`)
	if err != nil {
		t.Fatal(err)
	}
	attempts, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (string, error) {
		var a fakestore.Attempt
		err := row.Scan(&a.Task, &a.Fence, &a.Session, &a.Outcome)
		return fmt.Sprint(a.Task, a.Fence, a.Session, a.Outcome), err
	})
	if err != nil {
		t.Fatal(err)
	}
	return append(list, attempts...)
}

func describe(id int64, status string, attempt, crashes, stalls int, fence int64, session, replica string, later, cancel, begun, finished bool, failure string) string {
	return fmt.Sprintf("%d %s attempt %d crashes %d stalls %d fence %d session %s replica %q later %v cancel %v begun %v finished %v error %q",
		id, status, attempt, crashes, stalls, fence, session, replica, later, cancel, begun, finished, failure)
}

// TestSameAsPostgres makes the same calls of both, at random, and compares what they answer
// and what their rows are.
func TestSameAsPostgres(t *testing.T) {
	for seed := range uint64(6) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Parallel()
			compare(t, seed, fake(), real(t))
		})
	}
}

func compare(t *testing.T, seed uint64, sides ...*side) {
	ctx := t.Context()
	r := rand.New(rand.NewPCG(seed, 0))
	type session struct {
		id, process string
	}
	var sessions []session
	claims := map[int64]*tasks.Task{} // by fence
	var fences []int64
	var cluster [2]string
	inserted := 0
	for i, s := range sides {
		if err := s.AdoptConsul(ctx, "", nil, false, "test", func(_ context.Context, id string) error { cluster[i] = id; return nil }); err != nil {
			t.Fatal(err)
		}
		if id, err := s.ClusterID(ctx); id != cluster[i] || err != nil {
			t.Fatalf("the id is %q, %v, not %q", id, err, cluster[i])
		}
	}
	const maxCrashes = 3
	for step := range 400 {
		var did string
		answers := make([]string, len(sides))
		each := func(what string, f func(i int, s *side) string) {
			did = what
			for i, s := range sides {
				answers[i] = f(i, s)
			}
		}
		one := func() session { return sessions[r.IntN(len(sessions))] }
		switch n := r.IntN(20); {
		case len(sessions) == 0 || n == 0:
			ss := session{id: uuid.NewString(), process: uuid.NewString()}
			if len(sessions) > 0 && r.IntN(2) == 0 {
				ss.process = one().process
			}
			sessions = append(sessions, ss)
			each("join", func(i int, s *side) string {
				return words(s.Join(ctx, cluster[i], tasks.Replica{Session: ss.id, Process: ss.process, Name: "r", State: tasks.ReplicaWorking}))
			})
		case n <= 4:
			key, limit, priority, most := "", "", r.IntN(3), 1+r.IntN(4)
			if r.IntN(3) == 0 {
				key = fmt.Sprint("key ", r.IntN(3))
			}
			if r.IntN(4) == 0 {
				limit = "l"
			}
			inserted++
			each("insert", func(_ int, s *side) string {
				s.insert(fmt.Sprint("q", inserted), key, limit, priority, most)
				return ""
			})
		case n <= 8:
			// Which of several rows it takes first, and how many at once, is Postgres' choice.
			ss, queue := one(), fmt.Sprint("q", 1+r.IntN(max(1, inserted)))
			claim := tasks.Claim{Session: ss.id, Replica: "r", Kinds: []string{"k"}, Queues: []string{queue}, Max: 3, FencesFrom: int64(step/100) * 10_000}
			if r.IntN(4) == 0 {
				claim.Limit = "l"
			}
			server := r.IntN(8)
			each("claim "+queue+" "+claim.Limit, func(i int, s *side) string {
				claim := claim
				if server < 2 {
					known, err := s.Server(ctx)
					if claim.Server = known.Started; err != nil || server == 0 {
						claim.Server = known.Started.Add(time.Microsecond)
					}
				}
				var got []string
				var claimed tasks.Claimed
				var err error
				// Postgres' store remembers rows that could not be had. When a look at them took
				// long it rests before the next one.
				deadline := time.Now().Add(time.Minute)
				for try := 0; len(claimed.Tasks) == 0 && err == nil && (try < 4 || i > 0 && answers[0] != "" && time.Now().Before(deadline)); try++ {
					time.Sleep(time.Duration(max(0, try-4)) * time.Millisecond)
					if _, err = s.LookBehind(ctx, tasks.Claim{Limit: claim.Limit, Kinds: claim.Kinds, Queues: claim.Queues}); err == nil {
						claim.Taken = func(rows []tasks.Taken) {
							for _, r := range rows {
								got = append(got, fmt.Sprint("taken ", r.ID, r.Fence))
							}
						}
						claimed, err = s.Claim(ctx, claim)
					}
				}
				for _, task := range claimed.Tasks {
					got = append(got, fmt.Sprint(task.ID, task.Fence, task.Attempt, task.MaxAttempts, task.Crashes, task.Stalls, task.LockKey))
					if i == 0 {
						claims[task.Fence] = task
						fences = append(fences, task.Fence)
					}
				}
				return strings.Join(got, "; ") + words(err)
			})
		case n <= 14 && len(fences) > 0:
			task := *claims[fences[max(0, len(fences)-1-r.IntN(8))]]
			if r.IntN(10) == 0 {
				task.Session = one().id
			}
			switch r.IntN(5) {
			case 0:
				delay := time.Duration(r.IntN(2)) * time.Hour
				each("requeue", func(_ int, s *side) string { return words(s.Requeue(ctx, &task, delay)) })
			case 1:
				each("begin", func(_ int, s *side) string { return words(s.Begin(ctx, &task)) })
			case 2:
				each("cancel", func(_ int, s *side) string {
					s.cancel(task.ID)
					ids, err := s.CancelRequests(ctx, task.Session)
					slices.Sort(ids)
					return fmt.Sprint(ids, words(err))
				})
			default:
				e := tasks.Completion{ID: task.ID, Fence: task.Fence, Session: task.Session, Outcome: tasks.Succeeded, Next: tasks.StatusSucceeded}
				switch r.IntN(4) {
				case 0:
					e.Outcome, e.Next, e.Error = tasks.Failed, tasks.StatusPending, "failed"
				case 1:
					e.Outcome, e.Next, e.Requeue, e.Error = tasks.LeaseLost, tasks.StatusPending, true, "lost"
					e.Stalled = r.IntN(2) == 0
				case 2:
					e.Outcome, e.Next, e.Error = tasks.Failed, tasks.StatusFailed, "failed"
				}
				each("complete "+string(e.Outcome), func(_ int, s *side) string { return words(s.Complete(ctx, e)) })
			}
		case n == 15 && r.IntN(3) == 0:
			ss := one()
			each("held", func(_ int, s *side) string {
				list, err := s.Held(ctx, ss.id)
				var held []string
				for _, task := range list {
					held = append(held, fmt.Sprint(task.ID, task.LockKey, task.Attempt, task.Fence, task.Session))
				}
				slices.Sort(held)
				limited, e := s.Limited(ctx)
				due, dueErr := s.DueLimits(ctx, tasks.Claim{Kinds: []string{"k"}}, []string{"l", "another"})
				return fmt.Sprint(held, words(err), limited, words(e), due, words(dueErr))
			})
		case n <= 16:
			ss := one()
			each("beat", func(_ int, s *side) string {
				known := tasks.Known{Server: s.last.Server, Digest: s.last.Digest, Since: s.before.Transaction}
				a, err := s.Beat(ctx, tasks.Replica{Session: ss.id, State: tasks.ReplicaWorking}, known)
				s.before, s.last = s.last, a
				var states []string
				for _, m := range a.Replicas {
					states = append(states, fmt.Sprint(m.Session, m.State, m.Here, m.Quiet))
				}
				slices.Sort(states)
				return fmt.Sprint(a.Ended, a.Whole, states, words(err))
			})
		case n == 17:
			ss, how := one(), tasks.ReplicaStopped
			switch r.IntN(3) {
			case 0:
				how = tasks.ReplicaLost
				fallthrough
			case 1:
				each("end", func(_ int, s *side) string { return words(s.EndReplica(ctx, ss.id, how)) })
			default:
				each("process dead", func(_ int, s *side) string {
					list, err := s.DeclareProcessDead(ctx, ss.process)
					slices.Sort(list)
					return fmt.Sprint(list, words(err))
				})
			}
		case n == 18 && r.IntN(4) == 0:
			known := []string{}
			for _, ss := range sessions {
				if r.IntN(2) == 0 {
					known = append(known, ss.id)
				}
			}
			each("forget replicas", func(_ int, s *side) string { return fmt.Sprint(s.forget(known)) })
		case n == 18:
			ss, stopped := one(), r.IntN(3) == 0
			each("declare dead", func(_ int, s *side) string {
				list, err := s.Replicas(ctx)
				if err != nil {
					return err.Error()
				}
				i := slices.IndexFunc(list, func(m tasks.Replica) bool { return m.Session == ss.id })
				how, err := s.DeclareDead(ctx, list[i], stopped)
				return string(how) + words(err)
			})
		default:
			var dead []string
			for range 1 + r.IntN(3) {
				dead = append(dead, one().id)
			}
			each("take over", func(_ int, s *side) string {
				others, err := s.Sessions(ctx, dead[0])
				slices.Sort(others)
				abandoned, refused, e := s.TakeOver(ctx, dead, maxCrashes)
				var list []string
				for _, o := range abandoned {
					list = append(list, fmt.Sprint(o.ID, o.Attempt, o.Crashes, o.Stalls, o.Fence, o.Next))
				}
				slices.Sort(list)
				return fmt.Sprint(others, list, len(refused), words(err), words(e))
			})
		}
		if answers[0] != answers[1] {
			t.Fatalf("step %d, %s: the fake answers\n%s\nand Postgres\n%s", step, did, answers[0], answers[1])
		}
		x, y := sides[0].rows(), sides[1].rows()
		for i := range min(len(x), len(y)) {
			if x[i] != y[i] {
				t.Fatalf("step %d, %s (%s): the fake has\n%s\nand Postgres\n%s", step, did, answers[0], x[i], y[i])
			}
		}
		if len(x) != len(y) {
			t.Fatalf("step %d, %s: %d rows and %d", step, did, len(x), len(y))
		}
	}
}

// TestUnheardClaims compares what becomes of claims of a replica that had been heard of long before,
// or just then. It is a test of its own, as only that replica's heartbeats may be set back.
func TestUnheardClaims(t *testing.T) {
	ctx := t.Context()
	for unheard, want := range map[bool]string{true: "pending attempt 0 crashes 0", false: "pending attempt 1 crashes 1"} {
		for name, s := range map[string]*side{"the fake": fake(), "Postgres": real(t)} {
			var cluster string
			must := func(err error) {
				t.Helper()
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
			}
			must(s.AdoptConsul(ctx, "", nil, false, "test", func(_ context.Context, id string) error { cluster = id; return nil }))
			session := uuid.NewString()
			must(s.Join(ctx, cluster, tasks.Replica{Session: session, Process: uuid.NewString(), Name: "r", State: tasks.ReplicaWorking}))
			s.insert("q", "", "", 0, 5)
			if unheard {
				s.unhear(session)
			}
			claimed, err := s.Claim(ctx, tasks.Claim{Session: session, Replica: "r", Kinds: []string{"k"}, Max: 1})
			if must(err); len(claimed.Tasks) != 1 {
				t.Fatalf("%s: %d tasks were claimed", name, len(claimed.Tasks))
			}
			list, err := s.Replicas(ctx)
			must(err)
			if how, err := s.DeclareDead(ctx, list[0], false); err != nil || how != tasks.ReplicaDead {
				t.Fatalf("%s: it is called %q, %v", name, how, err)
			}
			_, _, err = s.TakeOver(ctx, []string{session}, 3)
			must(err)
			if got := s.rows()[0]; !strings.Contains(got, want) {
				t.Errorf("%s, unheard %t: %s, want %s", name, unheard, got, want)
			}
		}
	}
}

func words(err error) string {
	switch {
	case err == nil:
		return ""
	case errors.Is(err, tasks.ErrRefused):
		return " refused"
	case errors.Is(err, tasks.ErrOtherServer):
		return " other server"
	}
	return " " + err.Error()
}
