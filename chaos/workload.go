package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/chaos/checker"
	"onejob/chaos/observer"
)

// row is a task as it is inserted.
type row struct {
	kind, payload       string
	key, limit          *string
	token               string // its unique_key, by which it is found when an answer was lost
	maxAttempts         int
	timeout             *string
	failures            int // so many attempts fail
	priority, delayInMS int
	queue               string
	keepFor             time.Duration // zero for the configured one
	once                bool          // one attempt, and nothing in it that fails
}

// taskTimeout is the timeout of tasks whose attempts all take longer.
const taskTimeout = time.Second

// enqueued is what the checker knows of the task.
func (t row) enqueued() checker.Enqueued {
	q := checker.Enqueued{Kind: t.kind, Doomed: t.timeout != nil, Once: t.once, MaxAttempts: t.maxAttempts, Failures: t.failures, Priority: t.priority}
	q.KeepFor = t.keepFor
	if t.timeout != nil {
		q.Timeout = taskTimeout
	}
	return q
}

// workload enqueues tasks by plain INSERTs and cancels some of them.
type workload struct {
	c     *cluster
	rate  int
	rand  *rand.Rand
	kinds []string // that the subjects can run
	long  []string // those of them that may take long

	limits bool // the subject has them; rows go without where it has not
	spread int  // how many lock keys stand in for one

	n        int
	enqueued map[int64]*checker.Enqueued
	recent   []int64
	doubtful map[string]checker.Enqueued // by token, those whose INSERT was not answered
	crowded  bool                        // so many rows wait for narrow limits that more would not be done in time
	tokens   []string                    // of the last tasks
	declined []checker.Declined          // INSERTs that made no task, because their unique_key was taken
	resizes  resizes
	batches  int // INSERTs
	errors   int // those that failed, or were not answered
}

func newWorkload(c *cluster, rate int, seed uint64, subject string) *workload {
	w := &workload{c: c, rate: rate, rand: rand.New(rand.NewPCG(seed, 2)), limits: subject == onejobName, spread: 1,
		enqueued: map[int64]*checker.Enqueued{}, doubtful: map[string]checker.Enqueued{},
		resizes: resizes{c: c, rand: rand.New(rand.NewPCG(seed, 4))}}
	if subject == "naive" {
		w.spread = 40 // it leaves each key shut for Consul's lock-delay of 15 s, and would never be done with so few
	}
	for _, r := range c.replicas {
		w.kinds = append(w.kinds, r.subject.kinds()...)
	}
	slices.Sort(w.kinds)
	w.kinds = slices.Compact(w.kinds)
	w.long = slices.DeleteFunc(slices.Clone(w.kinds), func(k string) bool { return k == "noop" || k == capped })
	return w
}

// run enqueues until ctx ends.
func (w *workload) run(ctx context.Context) {
	const ticks = 10 // a second
	tick := time.NewTicker(time.Second / ticks)
	defer tick.Stop()
	for due := 0.0; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		due += float64(w.rate) / ticks
		var batch []row
		for ; due >= 1; due-- {
			batch = append(batch, w.next())
		}
		for _, kind := range w.c.wants.take() {
			batch = append(batch, w.wanted(kind)...)
		}
		w.insert(batch)
		if w.rand.IntN(ticks) == 0 {
			w.cancel()
		}
		if w.rand.IntN(ticks) == 0 && w.limits {
			w.repeat()
		}
	}
}

// next is another task. Most are short. Some are long, so that there is always
// something that a fault can catch in the middle.
func (w *workload) next() row {
	w.n++
	t := row{token: fmt.Sprint("n", w.n), maxAttempts: 8, kind: w.kind(), queue: "default"}
	d := work{MS: 20 + w.rand.IntN(180)}
	share := func(name string, n int) {
		key := fmt.Sprint(name, w.rand.IntN(n))
		if w.spread > 1 {
			key = fmt.Sprint(key, "-", w.n%w.spread)
		}
		t.key = &key
	}
	switch p := w.rand.IntN(40); {
	case p < 3:
		t.kind = w.long[w.rand.IntN(len(w.long))]
		d.MS = 4000 + w.rand.IntN(16000)
		switch p {
		case 0:
			share("long-", 12)
		case 1:
			t.once = true
		}
	case p < 13:
		share("short-", 12)
	case p < 16:
		// The narrow one and the elastic one are full now and then.
		name := []string{"narrow", "narrow", "wide", elastic, elastic}[w.rand.IntN(5)]
		t.limit, d.Limit = &name, name
		d.MS = 100 + w.rand.IntN(400)
		if w.rand.IntN(5) == 0 {
			d.MS = 3000 + w.rand.IntN(3000)
		}
	case p < 18:
		d.Failures = 1 + w.rand.IntN(2)
	case p == 18: // every attempt takes too long
		// A command that minds no SIGTERM ends by itself before it is killed, or after.
		limit := taskTimeout.String()
		t.timeout, t.maxAttempts, d.MS = &limit, 2, []int{3000, 12000}[w.rand.IntN(2)]
	case p == 19:
		t.delayInMS = w.rand.IntN(5000)
	case p == 20: // its id may be somebody's lock_key: one that is on its way just now
		if len(w.recent) > 0 {
			key := fmt.Sprint(w.recent[len(w.recent)-1] + int64(w.rand.IntN(3)))
			t.key = &key
		}
	case p == 21:
		t.once = true
	case p < 24:
		if w.limits { // of onejob's alone are there outsiders
			share(sharedKey, sharedKeys)
		}
	}
	if t.once {
		t.maxAttempts = 1
	}
	if t.limit != nil && t.kind == "sql" {
		t.kind = "exec" // what an sql task does is seen when it is done, too late for a limit
	}
	if !w.limits || w.crowded && t.limit != nil && *t.limit != "wide" {
		t.limit, d.Limit = nil, ""
	}
	if w.crowded && t.kind == capped {
		t.kind = "go"
	}
	if w.limits {
		w.unusual(&t, &d)
	}
	if t.kind == "sql" || t.kind == "noop" {
		t.timeout = nil
	} else {
		t.failures = d.Failures
	}
	d.Stubborn, d.Child = w.rand.IntN(4) == 0, w.rand.IntN(6) == 0
	if d.MS >= 4000 { // only these show that a guard kills in time
		d.Stubborn = w.rand.IntN(2) == 0
	}
	t.priority = w.rand.IntN(3) / 2
	t.payload = w.payload(t, d)
	return t
}

// wantedAtOnce is about one for each replica.
const wantedAtOnce = 6

// wanted are tasks for which a fault waits: they take long, and come first.
func (w *workload) wanted(kind string) (batch []row) {
	if !slices.Contains(w.kinds, kind) {
		return nil
	}
	for range wantedAtOnce {
		w.n++
		t := row{token: fmt.Sprint("n", w.n), maxAttempts: 8, kind: kind, queue: "default", priority: 2}
		t.payload = w.payload(t, work{MS: 6000 + w.rand.IntN(4000)})
		batch = append(batch, t)
	}
	return batch
}

// unusual makes some tasks what most are not.
func (w *workload) unusual(t *row, d *work) {
	if t.kind == capped && t.limit == nil {
		d.Limit = capped
		if t.timeout == nil {
			d.MS = 300 + w.rand.IntN(1200)
		}
	}
	switch p := w.rand.IntN(60); {
	case p < 6:
		t.queue = otherQueue
	case p < 9:
		t.keepFor = time.Duration(1+w.rand.IntN(5)) * time.Second
	case p == 9: // of kinds that have a payload of their own alone
		d.Pad = strings.Repeat("padding ", []int{1000, 10_000, 100_000}[w.rand.IntN(3)])
		d.PadSum = crc32.ChecksumIEEE([]byte(d.Pad))
	case p == 10:
		d.Print = []int{1000, 100_000, 3_000_000}[w.rand.IntN(3)]
	}
}

// kind chooses one: processes are dear, and what does nothing is cheap.
func (w *workload) kind() string {
	weights := map[string]int{"exec": 10, "go": 20, "http": 25, "sql": 20, "noop": 25, capped: 3}
	sum := 0
	for _, k := range w.kinds {
		sum += weights[k]
	}
	p := w.rand.IntN(sum)
	for _, k := range w.kinds {
		if p -= weights[k]; p < 0 {
			return k
		}
	}
	return w.kinds[0]
}

func (w *workload) payload(t row, d work) string {
	var p any
	switch t.kind {
	case "exec":
		p = execPayload{Command: "work", Data: d}
	case "go", capped:
		p = work{MS: d.MS, Failures: d.Failures, Limit: d.Limit, Pad: d.Pad, PadSum: d.PadSum}
	case "http":
		key := ""
		if t.key != nil {
			key = *t.key
		}
		p = map[string]any{"url": w.c.observer.Where.WorkURL(key, d.Limit, time.Duration(d.MS)*time.Millisecond, d.Failures)}
	case "sql":
		// A replica that is cut off or frozen is taken over after 7 s: some statements are
		// at work for longer.
		seconds := min(float64(d.MS)/1000, 12)
		p = map[string]any{"statement": "effect", "params": map[string]any{"seconds": seconds}}
	default:
		return "{}"
	}
	b, err := json.Marshal(p)
	if err != nil {
		panic(err) // there is nothing in it that JSON cannot have
	}
	return string(b)
}

// insert enqueues a batch in one statement. When the answer is lost, nobody
// knows whether it was made; settle asks later.
func (w *workload) insert(batch []row) {
	if len(batch) == 0 {
		return
	}
	w.batches++
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	var pending pgx.Batch
	for _, t := range batch {
		pending.Queue(`
INSERT INTO onejob.tasks (kind, payload, lock_key, limit_name, unique_key, max_attempts, timeout, priority, run_at, queue, keep_for)
VALUES ($1, $2, $3, $4, $5, $6, $7::text::interval, $8, now() + $9 * interval '1 millisecond', $10, nullif($11::bigint, 0) * interval '1 microsecond')
RETURNING id, chaos.clock()`, t.kind, t.payload, t.key, t.limit, t.token, t.maxAttempts, t.timeout, t.priority, t.delayInMS, t.queue, t.keepFor.Microseconds())
	}
	// Two slots do a hundred of a limit's rows a minute, and fewer while faults keep slots
	// busy.
	pending.Queue(`
SELECT count(*) = 200
  FROM (SELECT FROM onejob.tasks WHERE status = 'pending' AND (limit_name IN ('narrow', 'elastic') OR kind = $1) LIMIT 200) waiting`, capped)
	var ids []int64
	var inserted []time.Time
	err := pgx.BeginFunc(ctx, w.c.operator, func(tx pgx.Tx) error {
		answers := tx.SendBatch(ctx, &pending)
		defer answers.Close()
		for range batch {
			var id int64
			var now time.Time
			if err := answers.QueryRow().Scan(&id, &now); err != nil {
				return err
			}
			ids, inserted = append(ids, id), append(inserted, now)
		}
		if err := answers.QueryRow().Scan(&w.crowded); err != nil {
			return err
		}
		return answers.Close()
	})
	if err != nil {
		w.errors++
		for _, t := range batch {
			w.doubtful[t.token] = t.enqueued()
		}
		return
	}
	for i, id := range ids {
		t := batch[i]
		q := t.enqueued()
		q.Task = id
		if t.key == nil && t.limit == nil && t.kind != capped && t.queue == "default" {
			q.Due = observer.At(inserted[i]).Add(time.Duration(t.delayInMS) * time.Millisecond)
		}
		w.enqueued[id] = &q
	}
	w.recent = append(w.recent, ids...)
	w.recent = w.recent[max(0, len(w.recent)-60):]
	for _, t := range batch {
		w.tokens = append(w.tokens, t.token)
	}
	w.tokens = w.tokens[max(0, len(w.tokens)-60):]
}

// cancel cancels one of the last tasks, whatever it is doing.
func (w *workload) cancel() {
	if len(w.recent) == 0 {
		return
	}
	id := w.recent[w.rand.IntN(len(w.recent))]
	ctx, cancel := context.WithTimeout(context.Background(), time.Second) // the row may be locked for long
	defer cancel()
	w.enqueued[id].Cancelled = true // also if the answer is lost
	_, _ = w.c.operator.Exec(ctx, `SELECT onejob.cancel($1)`, id)
}

// repeat enqueues a task with the unique_key of one of the last ones, as somebody does who
// does not know that it is there. It must be declined while that one has not ended.
func (w *workload) repeat() {
	if len(w.tokens) == 0 {
		return
	}
	token := w.tokens[w.rand.IntN(len(w.tokens))]
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	q := checker.Enqueued{Kind: "noop", MaxAttempts: defaultAttempts}
	from := time.Now()
	var id int64
	err := w.c.operator.QueryRow(ctx, `
INSERT INTO onejob.tasks (kind, unique_key)
VALUES ('noop', $1)
    ON CONFLICT DO NOTHING
RETURNING id`, token).Scan(&id)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		w.declined = append(w.declined, checker.Declined{UniqueKey: token, From: observer.At(from), To: observer.At(time.Now())})
	case err != nil:
		w.doubtful[token] = q
	default:
		q.Task = id
		w.enqueued[id] = &q
	}
}

// settle finds out which of the INSERTs were made whose answer was lost, and
// returns all that were.
func (w *workload) settle(ctx context.Context) ([]checker.Enqueued, error) {
	type made struct {
		ID    int64
		Token string
	}
	found, err := rows(ctx, w.c, `SELECT id, unique_key FROM onejob.tasks WHERE unique_key = ANY ($1)`,
		pgx.RowToStructByPos[made], slices.Collect(maps.Keys(w.doubtful)))
	if err != nil {
		return nil, err
	}
	for _, m := range found {
		if w.enqueued[m.ID] != nil { // another one with the same token
			continue
		}
		q := w.doubtful[m.Token]
		q.Task = m.ID
		w.enqueued[m.ID] = &q
	}
	list := make([]checker.Enqueued, 0, len(w.enqueued))
	for _, id := range slices.Sorted(maps.Keys(w.enqueued)) {
		list = append(list, *w.enqueued[id])
	}
	return list, nil
}
