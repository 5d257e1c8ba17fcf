package rabbitmq

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"onejob/internal/testenv"
	"onejob/lock"
)

// fighterEnv makes the test binary a fighter; its value is the broker's URL.
const fighterEnv = "ONEJOB_TEST_FIGHTER"

// fight takes slots of the limit "ring" and gives them back, until it is killed
// or its input ends. It tells the outsider before it tries, and when it is inside,
// and goes on when the outsider lets it: the second time, to let go.
func fight() {
	input := bufio.NewReader(os.Stdin)
	notice := func(word string) {
		fmt.Println(word)
		if _, err := input.ReadString('\n'); err != nil {
			os.Exit(0)
		}
	}
	fail := func(err error) {
		fmt.Fprintln(os.Stderr, "fighter:", err)
		os.Exit(1)
	}
	// A fighter that loses its session while it is inside would be out without a word. A longer heartbeat
	// would keep the slots of the dead shut for longer.
	s, err := New(Config{URL: os.Getenv(fighterEnv), Heartbeat: 5 * time.Second, Verify: 200 * time.Millisecond, Margin: 500 * time.Millisecond})
	if err != nil {
		fail(err)
	}
	ctx := context.Background()
	go func() { _ = s.Run(ctx) }()
	if err := s.Ready(ctx); err != nil {
		fail(err)
	}
	for {
		notice("try")
		leases, err := s.Take(ctx, "ring", 1, nil)
		if errors.Is(err, lock.ErrFull) || errors.Is(err, lock.ErrDelayed) {
			if err := s.Await(ctx, "ring"); err != nil {
				fail(err)
			}
			continue
		}
		if err != nil && (errors.Is(err, lock.ErrLost) || Unavailable(err)) { // on a busy machine
			if err := s.Ready(ctx); err != nil {
				fail(err)
			}
			time.Sleep(100 * time.Millisecond)
			continue
		}
		if err != nil {
			fail(err)
		}
		notice(fmt.Sprint("in ", leases[0].(*slot).number))
		if err := leases[0].Release(ctx); err != nil && !Unavailable(err) { // then it is given back later
			fail(err)
		}
	}
}

// An outsider counts who is inside.
type outsider struct {
	mu      sync.Mutex
	news    sync.Cond // something below has changed
	limits  []int     // all that were in force, the present one last; during a change, the higher
	hold    bool      // nobody leaves before as many are inside as may be
	stay    *fighter  // or nil; does not leave at all
	inside  int
	entries int
	most    int
	wrong   []string
}

func (w *outsider) limit(n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.limits = append(w.limits, n)
	w.news.Broadcast()
}

// keep says whether those inside stay until as many are as may be.
func (w *outsider) keep(hold bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hold = hold
	w.news.Broadcast()
}

// let makes one fighter stay inside until the next call; nil makes none.
func (w *outsider) let(stay *fighter) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stay = stay
	w.news.Broadcast()
}

// full reports whether as many are inside as may be.
func (w *outsider) full() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.inside == w.limits[len(w.limits)-1]
}

func (w *outsider) granted() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.entries
}

// A fighter is a process, as the outsider knows it.
type fighter struct {
	w     *outsider
	cmd   *exec.Cmd
	input io.WriteCloser
	since int // the first limit that its present try may go by
	slot  int // that it is inside by; 0 if it is not
	dead  bool
	done  chan struct{}
}

func (w *outsider) send(t *testing.T, v *testenv.Vhost) *fighter {
	t.Helper()
	f := &fighter{w: w, cmd: exec.Command(os.Args[0]), done: make(chan struct{})}
	f.cmd.Env = append(os.Environ(), fighterEnv+"="+v.URL, "GOMAXPROCS=2")
	f.cmd.Stderr = os.Stderr
	output, err := f.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if f.input, err = f.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := f.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(f.done)
		for lines := bufio.NewScanner(output); lines.Scan(); {
			f.heard(lines.Text())
			if _, err := io.WriteString(f.input, "\n"); err != nil {
				break
			}
		}
		_ = f.cmd.Wait()
	}()
	return f
}

// heard returns when the fighter may go on.
func (f *fighter) heard(word string) {
	w := f.w
	w.mu.Lock()
	defer w.mu.Unlock()
	if f.dead {
		return
	}
	if word == "try" {
		f.since = len(w.limits) - 1
		return
	}
	f.slot, _ = strconv.Atoi(strings.TrimPrefix(word, "in "))
	w.inside++
	w.entries++
	w.most = max(w.most, w.inside)
	if allowed := slices.Max(w.limits[f.since:]); w.inside > allowed {
		w.wrong = append(w.wrong, fmt.Sprintf("entry %d: %d inside, where %d may be", w.entries, w.inside, allowed))
	}
	w.mu.Unlock()
	time.Sleep(rand.N(3 * time.Millisecond)) // the work
	w.mu.Lock()
	for !f.dead && (w.stay == f || w.hold && w.inside <= w.limits[len(w.limits)-1]) {
		w.news.Wait()
	}
	f.out()
}

// out counts the fighter out. w.mu is held.
func (f *fighter) out() {
	if f.slot != 0 {
		f.slot = 0
		f.w.inside--
	}
}

// leave counts the fighter out for good, and then ends it.
func (f *fighter) leave(how func()) {
	f.w.mu.Lock()
	f.dead = true
	f.out()
	f.w.news.Broadcast()
	f.w.mu.Unlock()
	how()
	<-f.done
}

// TestFight lets eight processes fight for a few slots. The limit moves between 1
// and 5, and some are killed inside, which shuts their slots for a while; nobody ever
// enters above the limit, and in the end nothing is left. It makes two rounds; with
// TEST_FIGHT=6 it makes six.
func TestFight(t *testing.T) {
	t.Parallel()
	const fighters, perStep = 8, 70
	rounds, err := strconv.Atoi(cmp.Or(os.Getenv("TEST_FIGHT"), "2"))
	if err != nil {
		t.Fatal(err)
	}
	const stepWait = 5 * time.Minute // a step takes seconds, and much longer where the processes get little time
	v := testenv.RabbitMQ(t)
	admin := create(t, config(t, v))
	createLimit(t, admin, "ring", 3)
	w := &outsider{limits: []int{3}}
	w.news.L = &w.mu
	var all []*fighter
	defer func() {
		for _, f := range all {
			f.leave(func() { f.input.Close() })
		}
	}()
	for range fighters {
		all = append(all, w.send(t, v))
	}
	began := time.Now()
	limit, killed, moved := 3, 0, 0
	for range rounds {
		for step, to := range rand.Perm(5) {
			to++
			// They fill the ring, and may be killed there. Then the limit moves, and
			// they come and go.
			w.keep(true)
			testenv.Eventually(t, stepWait, fmt.Sprintf("all %d slots are held at once", limit), w.full)
			if step == 0 {
				victim := w.highest(all)
				all[victim].leave(func() { all[victim].cmd.Process.Kill() })
				killed++
				all[victim] = w.send(t, v)
			}
			if to > 1 { // who has the highest slot stays there, likely above the limit
				w.let(all[w.highest(all)])
			}
			w.limit(max(limit, to))
			if err := persist(func() error { return admin.Resize(t.Context(), "ring", to) }); err != nil {
				t.Fatal(err)
			}
			w.limit(to)
			limit = to
			moved++
			w.keep(false)
			enough := w.granted() + perStep
			testenv.Eventually(t, stepWait, "more slots are taken", func() bool { return w.granted() >= enough })
			w.let(nil)
		}
	}
	t.Logf("%d slots taken in %v by %d processes, %d of them killed; the limit was moved %d times; at most %d were inside at once",
		w.granted(), time.Since(began).Round(time.Millisecond), fighters+killed, killed, moved, w.most)
	for _, f := range all {
		f.leave(func() { f.input.Close() })
	}
	all = nil
	for _, wrong := range w.wrong {
		t.Error(wrong)
	}
	if w.most != 5 {
		t.Errorf("at most %d were inside at once, where 5 could be", w.most)
	}

	if err := persist(func() error { return admin.Resize(t.Context(), "ring", 3) }); err != nil {
		t.Error(err)
	}
	testenv.Eventually(t, stepWait, "all holders are gone", func() bool {
		sem, err := admin.Inspect(t.Context(), "ring")
		return err == nil && len(sem.Holders) == 0
	})
	want := []string{"onejob/ring/1-A", "onejob/ring/2-A", "onejob/ring/3-A"}
	var left []string
	for range testenv.Tries(maxWait) { // what connections had that were cut is gone soon
		left = slices.DeleteFunc(v.Queues(t), func(queue string) bool { return queue == "onejob/ring/bell" })
		if len(left) == 4 {
			break
		}
	}
	if len(left) != 4 || !slices.Equal(left[:3], want) {
		t.Errorf("left are %q, want %q and a reach", left, want)
	}
	destroyLimit(t, admin, "ring")
	for range testenv.Tries(maxWait) {
		if left = v.Queues(t); len(left) == 0 {
			break
		}
	}
	if len(left) != 0 {
		t.Errorf("after the end there are %q", left)
	}
}

// highest returns who of all is inside by the highest slot.
func (w *outsider) highest(all []*fighter) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	top := 0
	for i, f := range all {
		if f.slot > all[top].slot {
			top = i
		}
	}
	return top
}
