package rabbitmq

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"sync"
	"testing"
	"time"

	"onejob/internal/testenv"
	"onejob/lock"
)

// fighterEnv makes the test binary a fighter; its value is the broker's URL.
const fighterEnv = "ONEJOB_TEST_FIGHTER"

// fight takes slots of the limit "ring" and gives them back, until it is killed
// or its input ends. It tells the witness before it tries, when it is inside, and
// before it lets go, and goes on when the witness has heard it.
func fight() {
	input := bufio.NewReader(os.Stdin)
	tell := func(word string) {
		fmt.Println(word)
		if _, err := input.ReadString('\n'); err != nil {
			os.Exit(0)
		}
	}
	fail := func(err error) {
		fmt.Fprintln(os.Stderr, "fighter:", err)
		os.Exit(1)
	}
	s, err := New(Config{URL: os.Getenv(fighterEnv), Cooldown: time.Nanosecond})
	if err != nil {
		fail(err)
	}
	ctx := context.Background()
	go func() { _ = s.Run(ctx) }()
	if err := s.Ready(ctx); err != nil {
		fail(err)
	}
	for {
		tell("try")
		leases, err := s.Take(ctx, "ring", 1, nil)
		if errors.Is(err, lock.ErrFull) {
			pause(ctx, rand.N(5*time.Millisecond))
			continue
		}
		if err != nil {
			fail(err)
		}
		tell("in")
		stay := 3 * time.Millisecond
		if rand.N(10) == 0 {
			stay = 200 * time.Millisecond // long enough to see the limit fall below one's slot
		}
		pause(ctx, rand.N(stay))
		tell("out")
		if err := leases[0].Release(ctx); err != nil {
			fail(err)
		}
	}
}

// A witness counts who is inside.
type witness struct {
	mu      sync.Mutex
	limits  []int // all that were in force, the present one last; during a change, the higher
	inside  int
	entries int
	most    int
	wrong   []string
}

func (w *witness) limit(n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.limits = append(w.limits, n)
}

// A fighter is a process, as the witness knows it.
type fighter struct {
	w      *witness
	cmd    *exec.Cmd
	input  io.WriteCloser
	since  int // the first limit that its present try may go by
	inside bool
	dead   bool
	done   chan struct{}
}

func (w *witness) send(t *testing.T, v *testenv.Vhost) *fighter {
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

func (f *fighter) heard(word string) {
	w := f.w
	w.mu.Lock()
	defer w.mu.Unlock()
	if f.dead {
		return
	}
	switch word {
	case "try":
		f.since = len(w.limits) - 1
	case "in":
		f.inside = true
		w.inside++
		w.entries++
		w.most = max(w.most, w.inside)
		if allowed := slices.Max(w.limits[f.since:]); w.inside > allowed {
			w.wrong = append(w.wrong, fmt.Sprintf("entry %d: %d inside, where %d may be", w.entries, w.inside, allowed))
		}
	case "out":
		f.inside = false
		w.inside--
	}
}

// leave counts the fighter out for good, and then ends it.
func (f *fighter) leave(how func()) {
	f.w.mu.Lock()
	f.dead = true
	if f.inside {
		f.w.inside--
	}
	f.w.mu.Unlock()
	how()
	<-f.done
}

// TestFight lets eight processes fight for three slots. Some are killed, and the
// limit is moved; nobody ever enters above it, and in the end nothing is left.
func TestFight(t *testing.T) {
	t.Parallel()
	const fighters, want = 8, 1000
	v := testenv.RabbitMQ(t)
	admin := create(t, config(t, v))
	if err := admin.Create(t.Context(), "ring", 3); err != nil {
		t.Fatal(err)
	}
	w := &witness{limits: []int{3}}
	var all []*fighter
	for range fighters {
		all = append(all, w.send(t, v))
	}
	began := time.Now()
	killed, moved := 0, 0
	tick := time.NewTicker(150 * time.Millisecond)
	defer tick.Stop()
	for limit, enough := 3, false; !enough; {
		<-tick.C
		next := 1 + rand.IntN(5)
		w.limit(max(limit, next))
		if err := admin.Resize(t.Context(), "ring", next); err != nil {
			t.Fatal(err)
		}
		w.limit(next)
		limit = next
		moved++
		if moved%4 == 0 {
			victim := rand.IntN(fighters)
			all[victim].leave(func() { all[victim].cmd.Process.Kill() })
			killed++
			all[victim] = w.send(t, v)
		}
		w.mu.Lock()
		enough = w.entries >= want || len(w.wrong) > 0
		w.mu.Unlock()
		if time.Since(began) > 2*patience {
			t.Errorf("only %d slots were taken in %v", w.entries, 2*patience)
			break
		}
	}
	t.Logf("%d slots taken in %v by %d processes, %d of them killed; the limit was moved %d times; at most %d were inside at once",
		w.entries, time.Since(began).Round(time.Millisecond), fighters+killed, killed, moved, w.most)
	for _, f := range all {
		f.leave(func() { f.input.Close() })
	}
	for _, wrong := range w.wrong {
		t.Error(wrong)
	}

	if err := admin.Resize(t.Context(), "ring", 3); err != nil {
		t.Error(err)
	}
	testenv.Eventually(t, patience, "all holders are gone", func() bool {
		sem, err := admin.Inspect(t.Context(), "ring")
		return err == nil && len(sem.Holders) == 0
	})
	want3 := []string{"onejob/ring/1-A", "onejob/ring/2-A", "onejob/ring/3-A"}
	if queues := v.Queues(t); len(queues) != 4 || !slices.Equal(queues[:3], want3) {
		t.Errorf("left are %q, want %q and a reach", queues, want3)
	}
	if err := admin.Destroy(t.Context(), "ring", false); err != nil {
		t.Error(err)
	}
	if queues := v.Queues(t); len(queues) != 0 {
		t.Errorf("after the end there are %q", queues)
	}
}
