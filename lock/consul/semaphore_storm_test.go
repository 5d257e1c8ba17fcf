package consul

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/boottime"
	"onejob/internal/testenv"
	"onejob/lock"
)

// An observer counts who is inside, without a word from Consul. Who enters
// connects to it and says when it asked for its slot. It stays until the observer,
// which has counted it out by then, tells it to leave; then it gives the slot
// back. Who is killed is gone with its connection.
type observer struct {
	listener net.Listener
	wg       sync.WaitGroup

	mu      sync.Mutex
	news    sync.Cond // something below has changed
	limits  []limitFrom
	hold    bool        // nobody leaves before as many are inside as may be
	inside  map[int]int // by process
	count   int
	most    int
	entries int
	over    []string
}

type limitFrom struct {
	at    boottime.Instant
	slots int
}

func newObserver(t *testing.T, slots int) *observer {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &observer{listener: listener, inside: map[int]int{}}
	w.news.L = &w.mu
	w.limit(slots)
	w.wg.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			w.wg.Go(func() { w.serve(conn) })
		}
	})
	return w
}

// limit says that so many may be inside from now on. A raise is told before it
// is made, a fall after.
func (w *observer) limit(slots int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.limits = append(w.limits, limitFrom{boottime.Now(), slots})
	w.news.Broadcast()
}

// keep says whether those inside stay until as many are as may be.
func (w *observer) keep(hold bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hold = hold
	w.news.Broadcast()
}

func (w *observer) serve(conn net.Conn) {
	defer conn.Close()
	var pid int
	var asked int64
	if _, err := fmt.Fscanln(conn, &pid, &asked); err != nil {
		return
	}
	w.mu.Lock()
	// It may have been granted by any limit since it asked.
	allowed := 0
	for i, l := range w.limits {
		if i+1 == len(w.limits) || w.limits[i+1].at >= boottime.Instant(asked) {
			allowed = max(allowed, l.slots)
		}
	}
	w.inside[pid]++
	w.count++
	w.entries++
	w.most = max(w.most, w.count)
	if w.count > allowed {
		w.over = append(w.over, fmt.Sprintf("entry %d: %d inside where %d may be", w.entries, w.count, allowed))
	}
	w.mu.Unlock()

	hungUp := false
	var reading sync.WaitGroup
	reading.Go(func() {
		_, _ = conn.Read(make([]byte, 1)) // there is nothing to come
		w.mu.Lock()
		defer w.mu.Unlock()
		hungUp = true
		w.news.Broadcast()
	})
	time.Sleep(rand.N(4 * time.Millisecond)) // the work
	w.mu.Lock()
	for !hungUp && w.hold && w.count <= w.limits[len(w.limits)-1].slots {
		w.news.Wait()
	}
	w.inside[pid]--
	w.count--
	w.mu.Unlock()
	fmt.Fprintln(conn, "leave")
	reading.Wait() // until it has hung up
}

// full reports whether as many are inside as may be.
func (w *observer) full() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.count == w.limits[len(w.limits)-1].slots
}

// somebody returns a process that is inside, or 0.
func (w *observer) somebody() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	for pid, n := range w.inside {
		if n > 0 {
			return pid
		}
	}
	return 0
}

func (w *observer) granted() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.entries
}

// contenderEnv makes this test binary a process that enters and leaves until its
// standard input ends: it is set to the addresses of Consul and the observer, and
// the prefix.
const contenderEnv = "ONEJOB_TEST_CONTENDER"

// TestContender is the body of the processes of TestStorm.
func TestContender(t *testing.T) {
	env := os.Getenv(contenderEnv)
	if env == "" {
		return // not such a process
	}
	if err := contend(strings.Fields(env)); err != nil {
		fmt.Fprintln(os.Stderr, "contender:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func contend(env []string) error {
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	client := api.DefaultConfig()
	client.Address = env[0]
	l, err := New(Config{
		Client: client, Prefix: env[2], LockDelay: lockDelay,
		CheckTTL: 5 * time.Second, Heartbeat: 300 * time.Millisecond, Margin: time.Second,
	})
	if err != nil {
		return err
	}
	runCtx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = l.Run(runCtx, nil) })
	defer running.Wait()
	defer stop()

	errs := make([]error, 2)
	together(len(errs), func(i int) { errs[i] = contendOne(ctx, l, env[1]) })
	return errors.Join(errs...)
}

// contendOne enters and leaves, one at a time, until ctx ends.
func contendOne(ctx context.Context, l *Locker, observer string) error {
	s := l.Semaphores()
	for {
		if l.Ready(ctx) != nil {
			return nil
		}
		asked := boottime.Now()
		leases, err := s.Take(ctx, "k", 1, []byte(fmt.Sprint(os.Getpid())))
		switch {
		case ctx.Err() != nil:
			for _, lease := range leases {
				_ = lease.Release(ctx)
			}
			return nil
		case errors.Is(err, lock.ErrFull), errors.Is(err, lock.ErrDelayed):
			if err := s.Await(ctx, "k"); err != nil && ctx.Err() == nil && !errors.Is(err, context.DeadlineExceeded) {
				return err
			}
			continue
		case errors.Is(err, lock.ErrLost):
			continue
		case errors.Is(err, context.DeadlineExceeded): // Consul is slow on a machine that is busy
			fmt.Fprintln(os.Stderr, "contender tries again:", err)
			continue
		case err != nil:
			return err
		}
		if err := visit(leases[0].Context(), observer, asked); err != nil {
			return err
		}
		if err := leases[0].Release(ctx); err != nil && !errors.Is(err, lock.ErrLost) && !errors.Is(err, context.DeadlineExceeded) {
			return err // what was not given back in time comes free with its session
		}
	}
}

// visit is inside until the observer says so, or the lease is over.
func visit(ctx context.Context, observer string, asked boottime.Instant) error {
	conn, err := net.Dial("tcp", observer)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	fmt.Fprintln(conn, os.Getpid(), int64(asked))
	_, err = bufio.NewReader(conn).ReadString('\n')
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// contender is a process of the storm.
type contender struct {
	cmd   *exec.Cmd
	stdin io.Closer
}

func startContender(t *testing.T, kv *testenv.KV, w *observer) *contender {
	t.Helper()
	c := &contender{cmd: exec.Command(os.Args[0], "-test.run=^TestContender$")}
	c.cmd.Env = append(os.Environ(), contenderEnv+"="+kv.Addr+" "+w.listener.Addr().String()+" "+kv.Prefix)
	c.cmd.Stdout, c.cmd.Stderr = os.Stderr, os.Stderr
	var err error
	if c.stdin, err = c.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return c
}

// TestStorm lets 8 processes, two contenders in each, fight for a few slots. The
// limit moves between 1 and 5, and who is inside is killed with -9 now and then.
func TestStorm(t *testing.T) {
	t.Parallel()
	const processes, rounds, perStep = 8, 6, 90
	const stepWait = 5 * time.Minute // a step takes seconds, and much longer where the processes get little time
	kv := testenv.Consul(t)
	l := start(t, config(t, kv))
	s := l.Semaphores()
	if err := s.Create(t.Context(), "k", 3); err != nil {
		t.Fatal(err)
	}
	w := newObserver(t, 3)
	contenders := map[int]*contender{}
	add := func() {
		c := startContender(t, kv, w)
		contenders[c.cmd.Process.Pid] = c
	}
	defer func() {
		w.keep(false)
		for _, c := range contenders {
			_ = c.cmd.Process.Kill()
			_ = c.cmd.Wait()
		}
		w.listener.Close()
		w.wg.Wait()
	}()
	for range processes {
		add()
	}

	began := time.Now()
	limit, moves, killed := 3, 0, 0
	for range rounds {
		fatal := rand.N(5)
		for step, to := range rand.Perm(5) {
			to++
			// They fill the house, and may be killed there. Then the limit moves, and
			// they come and go.
			w.keep(true)
			testenv.Eventually(t, stepWait, fmt.Sprintf("all %d slots are held at once", limit), w.full)
			if step == fatal {
				pid := w.somebody()
				victim := contenders[pid]
				delete(contenders, pid)
				_ = victim.cmd.Process.Signal(syscall.SIGKILL)
				_ = victim.cmd.Wait()
				killed++
				add()
			}
			if to > limit {
				w.limit(to)
			}
			if err := s.Resize(t.Context(), "k", to); err != nil {
				t.Fatal(err)
			}
			if to < limit {
				w.limit(to)
			}
			limit = to
			moves++
			w.keep(false)
			enough := w.granted() + perStep
			testenv.Eventually(t, stepWait, "more slots are granted", func() bool { return w.granted() >= enough })
		}
	}
	took := time.Since(began)

	for _, c := range contenders {
		c.stdin.Close()
	}
	for pid, c := range contenders {
		if err := c.cmd.Wait(); err != nil {
			t.Errorf("contender %d: %v", pid, err)
		}
		delete(contenders, pid)
	}
	w.mu.Lock()
	t.Logf("%d slots granted to %d processes in %v, at most %d at once; the limit was moved %d times, %d processes were killed inside",
		w.entries, processes, took.Round(time.Millisecond), w.most, moves, killed)
	for _, over := range w.over {
		t.Error(over)
	}
	if w.count != 0 || w.most != 5 {
		t.Errorf("%d are inside at the end, and %d were at most", w.count, w.most)
	}
	w.mu.Unlock()

	// Nothing leaked: all slots can be had once the dead are given up.
	w.limit(5)
	if err := s.Resize(t.Context(), "k", 5); err != nil {
		t.Fatal(err)
	}
	var leases []lock.Lease
	testenv.Eventually(t, maxWait, "all slots", func() bool {
		var err error
		leases, err = s.Take(t.Context(), "k", 5, nil)
		return err == nil
	})
	for _, lease := range leases {
		release(t, lease)
	}
	keys, _, err := kv.Client.KV().Keys(kv.Prefix+"/limits/", "", nil)
	if err != nil || len(keys) != 1 || string(get(t, kv, "limits/k/.lock").Value) != `{"Limit":5,"Holders":{}}` {
		t.Errorf("at the end there are the keys %q (%v)", keys, err)
	}
}
