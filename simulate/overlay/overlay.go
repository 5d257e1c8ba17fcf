// Package overlay makes a Go runtime that is the same each time.
//
// A bubble of testing/synctest has a clock of its own, and what runs in it is still chosen at
// random: which case of a select, which of two timers of one moment, where the iteration over
// a map begins, what math/rand returns; and the scheduler preempts goroutines by the real
// clock. A schedule could not be repeated from its seed. So simulations are built with -overlay,
// which replaces a few lines of the runtime:
//
//   - within a bubble all of that comes from a seed, see runtime.Simulate;
//   - contexts cancel their children in the order in which those were made;
//   - goroutines are not preempted, and a mutex does not become starving by the real clock;
//   - a goroutine that waits for a mutex counts as blocked: a simulated process may be frozen
//     while it holds one;
//   - a goroutine knows to which simulated process it belongs, as all do that it starts.
//
// With GOMAXPROCS=1 and no garbage collection while a schedule runs, a seed then gives the
// same schedule, request by request.
//
// The lines are found by their text. A Go release that has changed one of them is refused, and
// TestPatches says which.
package overlay

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"

	"onejob/internal/mutants"
)

// A patch is one of these, without the names of its fields.
type patch struct{ file, old, new string }

// patches are those of Go's own files.
var patches = []patch{
	{"math/rand/v2/rand.go", "//go:linkname runtime_rand runtime.rand\n", "//go:linkname runtime_rand runtime.simulationRand\n"},
	{"runtime/rand.go", "func maps_rand() uint64 {\n", `func maps_rand() uint64 {
	if simulation.on && getg().bubble != nil {
		return simulation.maps
	}
`},
	{"runtime/rand.go", "func rand32() uint32 {\n", `func rand32() uint32 {
	if simulation.on && getg().bubble != nil {
		return uint32(simulation.maps)
	}
`},
	{"runtime/select.go", "j := cheaprandn(uint32(norder + 1))", "j := simulationRandn(uint32(norder + 1))"},
	{"runtime/time.go", "t.rand = cheaprand()", "t.rand = uint32(simulation.timers.next())"},
	{"runtime/alg.go", "key[i] = bootstrapRand()", "key[i] = 0x9e3779b97f4a7c15 * uint64(i+1)"},
	{"runtime/proc.go", "const forcePreemptNS = 10 * 1000 * 1000 ", "const forcePreemptNS = 3600 * 1000 * 1000 * 1000 "},
	{"runtime/runtime2.go", "	waitReasonSyncCondWait:          true,\n", `	waitReasonSyncCondWait:          true,
	waitReasonSyncMutexLock:         true,
	waitReasonSyncRWMutexRLock:      true,
	waitReasonSyncRWMutexLock:       true,
`},
	{"internal/sync/mutex.go", "starvationThresholdNs = 1e6", "starvationThresholdNs = 1e18"},

	// Goroutines begin with a stack that they need not leave: requests are many, and all of
	// them encode JSON.
	{"runtime/stack.go", "var startingStackSize uint32 = fixedStack\n", "var startingStackSize uint32 = 16 << 10\n"},
	{"runtime/runtime1.go", "debug.adaptivestackstart = 1 ", "debug.adaptivestackstart = 0 "},

	// A profile must not take for labels what SetSimulatedProcess has put there.
	{"runtime/proc.go", "tagPtr = &gp.m.curg.labels", "tagPtr = nil"},

	// A goroutine that yields goes into the global queue, and how soon it leaves that depends
	// on how often the runtime's own goroutines have run.
	{"runtime/proc.go", "if pp.schedtick%61 == 0 && !sched.runq.empty() {", "if pp.schedtick%61 == 0 && !simulation.on && !sched.runq.empty() {"},

	// The children of a context are cancelled in the order in which they were made, not in
	// that of their addresses.
	{"context/context.go", "	children map[canceler]struct{} // set to nil by the first cancel call\n", "	children map[canceler]int // set to nil by the first cancel call\n	born     int\n"},
	{"context/context.go", "p.children = make(map[canceler]struct{})", "p.children = make(map[canceler]int)"},
	{"context/context.go", "p.children[child] = struct{}{}", "p.born++\n			p.children[child] = p.born"},
	{"context/context.go", "	for child := range c.children {\n", `	list := make([]canceler, 0, len(c.children))
	for child, born := range c.children {
		i := len(list)
		list = append(list, nil)
		for ; i > 0 && c.children[list[i-1]] > born; i-- {
			list[i] = list[i-1]
		}
		list[i] = child
	}
	for _, child := range list {
`},
}

// still are what the product asks of the system when a worker begins: system calls let other
// goroutines go first, or not.
var still = []patch{
	{"worker/worker.go", "host, _ := os.Hostname()", `host := "h"`},
	{"worker/worker.go", "Machine: procfs.Machine(), Started: procfs.Started()", `Machine: func() string { _ = procfs.Gone; return "" }(), Started: 1`},
}

// stalls lets a worker notice that its process was frozen, as the monotonic clock of a real one
// does: the bubble's goes on meanwhile. A pause of the machine stops both clocks.
var stalls = []patch{
	{"worker/stalls.go", `"onejob/internal/retry"`, "\"onejob/boottime\"\n	\"onejob/internal/retry\""},
	{"worker/stalls.go", "	now := time.Now()\n", "	now := time.Unix(0, int64(boottime.Now()))\n"},
	{"worker/stalls.go", "time.Since(s.at) < stallMemory", "time.Unix(0, int64(boottime.Now())).Sub(s.at) < stallMemory"},
}

// added is a file of the runtime's own.
const added = `package runtime

import "unsafe"

// Each purpose has numbers of its own, so that one more of one kind changes no other.
var simulation struct {
	on                     bool
	rand, selects, timers  simulationSource
	maps                   uint64 // what maps get for a random number
}

// Simulate makes everything that is random within a bubble follow from a seed. One bubble may
// be there at a time.
func Simulate(seed uint64) {
	source := simulationSource(seed)
	simulation.rand = simulationSource(source.next())
	simulation.selects = simulationSource(source.next())
	simulation.timers = simulationSource(source.next())
	simulation.maps = source.next()
	simulation.on = true
}

// SimulatedProcess returns to which simulated process the goroutine belongs.
func SimulatedProcess() uintptr { return uintptr(getg().labels) }

// SetSimulatedProcess says to which simulated process the goroutine belongs, and those that it
// starts. The value must not be that of a pointer. A profile of processor time has no labels.
func SetSimulatedProcess(p uintptr) { getg().labels = unsafe.Pointer(p) }

// simulationSource is splitmix64.
type simulationSource uint64

//go:nosplit
func (s *simulationSource) next() uint64 {
	*s += 0x9e3779b97f4a7c15
	z := uint64(*s)
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// simulationRand is what math/rand/v2 asks.
//
//go:linkname simulationRand
func simulationRand() uint64 {
	if simulation.on && getg().bubble != nil {
		return simulation.rand.next()
	}
	return rand()
}

//go:nosplit
func simulationRandn(n uint32) uint32 {
	if !simulation.on || getg().bubble == nil {
		return cheaprandn(n)
	}
	return uint32(uint64(uint32(simulation.selects.next())) * uint64(n) >> 32)
}
`

// Write writes the replaced files into a folder, and the file that -overlay takes. It returns
// the path of that. A mutant replaces a part of the product as well.
func Write(folder string, m mutants.Mutant) (string, error) {
	product, err := mutants.Root()
	if err != nil {
		return "", err
	}
	out, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOROOT: %w", err)
	}
	src := filepath.Join(strings.TrimSpace(string(out)), "src")
	files := mutants.Overlay{filepath.Join(src, "runtime/simulation.go"): added}
	for root, all := range map[string][]patch{src: patches, product: append(stalls, still...)} {
		for _, p := range all {
			if err := files.Apply(root, mutants.Patch{File: p.file, Old: p.old, New: p.new}); err != nil {
				return "", err
			}
		}
	}
	if err := m.Apply(product, files); err != nil {
		return "", err
	}
	return files.Write(folder)
}
