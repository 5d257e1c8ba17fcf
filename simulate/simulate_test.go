//go:build simulate

package simulate

import (
	"bufio"
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"testing"
	"time"
)

var (
	seed     = flag.Uint64("sim.seed", 0, "the first seed; 0 means one that follows from the time")
	count    = flag.Int("sim.n", 0, "how many schedules; 0 means as many as fit into the time, or as a test has by itself")
	duration = flag.Duration("sim.duration", 20*time.Second, "how long")
	trace    = flag.Bool("sim.trace", false, "write down everything that happens")
	goOn     = flag.Bool("sim.goon", false, "do not stop at a schedule that fails, nor minimise it")
	digests  = flag.Bool("sim.digests", false, "write down a digest of each schedule")
	feed     = flag.Bool("sim.feed", false, "read seeds, see TestFeed")
)

func TestMain(m *testing.M) {
	// Or else a seed gives another schedule each time.
	runtime.GOMAXPROCS(1)
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(4 << 30) // a schedule takes some 10 MB; one that asks without end must not take all
	flag.Parse()
	os.Exit(m.Run())
}

// warm runs a schedule: what is made once in a process, as caches are, is made in the first.
func warm(t *testing.T) {
	for seed := range uint64(3) {
		Run(t, NewPlan(seed), io.Discard)
	}
}

// TestSchedules runs one plan after the other, until one breaks a promise unless told to go on.
func TestSchedules(t *testing.T) {
	warm(t)
	first := *seed
	if first == 0 {
		first = uint64(time.Now().UnixNano()/1e6) % 1e9 * 1000
	}
	n := *count
	if n == 0 && *seed != 0 && *trace {
		n = 1
	}
	var simulated time.Duration
	requests, begun := 0, 0
	began, said := time.Now(), time.Now()
	tell := func(done int) {
		took := time.Since(began)
		fmt.Printf("%d schedules (seeds %d to %d), %.0f simulated minutes, %d requests, %d leases in %v: %.0f schedules and %.0f simulated minutes a minute\n",
			done, first, first+uint64(done)-1, simulated.Minutes(), requests, begun, took.Round(time.Second),
			float64(done)/took.Minutes(), simulated.Minutes()/took.Minutes())
	}
	i := 0
	for ; n == 0 && time.Since(began) < *duration || i < n; i++ {
		plan := NewPlan(first + uint64(i))
		if *trace {
			fmt.Print(plan)
			var lines bytes.Buffer // a system call lets other goroutines go first, or not
			result := Run(t, plan, &lines)
			_, _ = lines.WriteTo(os.Stdout)
			fmt.Printf("digest %016x\n", result.Digest)
			for _, v := range result.Violations {
				t.Errorf("seed %d: %v", plan.Seed, v)
			}
			continue
		}
		result := Run(t, plan, nil)
		if *digests {
			fmt.Printf("digest %d %016x\n", plan.Seed, result.Digest)
		}
		simulated += result.Simulated
		requests += result.Requests
		begun += result.Begun
		if len(result.Violations) > 0 && *goOn {
			t.Errorf("seed %d fails: %v", plan.Seed, result.Violations[0])
		} else if len(result.Violations) > 0 {
			tell(i + 1)
			t.Fatal(report(t, result, plan))
		}
		if time.Since(said) > 15*time.Second {
			said = time.Now()
			tell(i + 1)
		}
	}
	tell(i)
}

// TestFeed runs the schedules that it reads about, until the end of its input: each line has a
// first seed and a number of schedules. It answers each line with what it has done.
func TestFeed(t *testing.T) {
	if !*feed {
		t.Skip("for onejob/simulate/run")
	}
	warm(t)
	for in := bufio.NewReader(os.Stdin); ; {
		var first, n uint64
		if _, err := fmt.Fscanln(in, &first, &n); err == io.EOF {
			return
		} else if err != nil {
			t.Fatal(err)
		}
		failed, requests, begun := 0, 0, 0
		var simulated time.Duration
		for seed := first; seed < first+n; seed++ {
			plan := NewPlan(seed)
			result := Run(t, plan, nil)
			simulated += result.Simulated
			requests += result.Requests
			begun += result.Begun
			switch {
			case len(result.Violations) == 0:
			case *goOn:
				failed++
				fmt.Printf("seed %d fails: %v\n", seed, result.Violations[0])
			default:
				t.Fatal(report(t, result, plan))
			}
		}
		fmt.Println("done", n, failed, int64(simulated), requests, begun)
	}
}

// TestSameSeedSameSchedule: a seed gives the same schedule each time, request by request,
// whatever ran before it in the same process.
func TestSameSeedSameSchedule(t *testing.T) {
	warm(t)
	first := make([]uint64, cmp.Or(*count, 60))
	for seed := range first {
		first[seed] = Run(t, NewPlan(uint64(seed)), nil).Digest
	}
	for seed := uint64(len(first)); seed > 0; {
		seed--
		var a, b bytes.Buffer
		if Run(t, NewPlan(seed), &a).Digest == first[seed] {
			continue
		}
		Run(t, NewPlan(seed), &b)
		x, y := bytes.Split(a.Bytes(), []byte("\n")), bytes.Split(b.Bytes(), []byte("\n"))
		for i := range min(len(x), len(y)) {
			if !bytes.Equal(x[i], y[i]) {
				t.Fatalf("seed %d: line %d is\n%s\nand then\n%s", seed, i, x[i], y[i])
			}
		}
		t.Fatalf("seed %d: two digests", seed)
	}
}
