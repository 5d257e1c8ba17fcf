package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// What others on the machine do while we measure: it is written down with every
// figure, as a figure from a busy machine is worth less.

// calmShare is how much of the machine others may use for it to be called calm.
const calmShare = 0.1

// calmDifference is how far the shares of two runs may be apart that are compared with each
// other: where others took more of one, the ratio is partly theirs.
const calmDifference = 0.02

// processorUse is how much of the processors was used up to a moment. They are those that this
// program may run on, as with taskset: what others do on the rest takes nothing from it.
type processorUse struct {
	at         time.Time
	processors int
	all        time.Duration // by everybody, and by other machines on the same hardware
	own        time.Duration // by this program, its servers and its subjects
}

func readProcessorUse() (u processorUse, err error) {
	var ours unix.CPUSet
	if err := unix.SchedGetaffinity(0, &ours); err != nil {
		return u, fmt.Errorf("which processors this program may run on: %w", err)
	}
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return u, err
	}
	busy, err := parseBusy(string(text))
	if err != nil {
		return u, err
	}
	if u.all, u.processors, err = ofOurs(busy, &ours); err != nil {
		return u, err
	}
	u.at = time.Now()
	u.own, err = cpuTime(os.Getpid())
	return u, err
}

// parseBusy returns for how long each processor was busy from /proc/stat.
func parseBusy(text string) (map[int]time.Duration, error) {
	busy := map[int]time.Duration{}
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) == 0 || !strings.HasPrefix(fields[0], "cpu") || fields[0] == "cpu" { // the last one is the sum of all
			continue
		}
		processor, err := strconv.Atoi(fields[0][len("cpu"):])
		// cpu0 user nice system idle iowait irq softirq steal; user has what guests used
		if err != nil || len(fields) < 9 {
			return nil, fmt.Errorf("%q is no line of /proc/stat", line)
		}
		for _, i := range []int{1, 2, 3, 6, 7, 8} {
			n, err := strconv.ParseInt(fields[i], 10, 64)
			if err != nil {
				return nil, fmt.Errorf("%q is no line of /proc/stat: %w", line, err)
			}
			busy[processor] += time.Duration(n) * tick
		}
	}
	return busy, nil
}

// ofOurs sums up the processors that this program may run on, and counts them. Some containers
// show no others, and number them anew.
func ofOurs(busy map[int]time.Duration, ours *unix.CPUSet) (all time.Duration, processors int, err error) {
	for processor, used := range busy {
		if ours.IsSet(processor) || len(busy) == ours.Count() {
			all, processors = all+used, processors+1
		}
	}
	if processors == 0 {
		return 0, 0, errors.New("/proc/stat has no line of a processor that this program may run on")
	}
	return all, processors, nil
}

// othersShare returns which share of the processors others used between two moments.
func othersShare(from, to processorUse) float64 {
	whole := to.at.Sub(from.at) * time.Duration(to.processors)
	return max(0, float64((to.all-from.all)-(to.own-from.own))/float64(whole))
}

// calmly waits until others leave the machine to us, but no longer than maxWait, calls f, and
// returns which share of the processors others used meanwhile.
func calmly(ctx context.Context, maxWait time.Duration, f func() error) (others float64, err error) {
	if err := calm(ctx, maxWait); err != nil {
		return 0, err
	}
	before, err := readProcessorUse()
	if err != nil {
		return 0, err
	}
	if err := f(); err != nil {
		return 0, err
	}
	after, err := readProcessorUse()
	return othersShare(before, after), err
}

// calm waits until others leave the machine to us, but no longer than maxWait.
func calm(ctx context.Context, maxWait time.Duration) error {
	for end := time.Now().Add(maxWait); time.Now().Before(end); {
		before, err := readProcessorUse()
		if err != nil {
			return err
		}
		if err := sleep(ctx, 300*time.Millisecond); err != nil {
			return err
		}
		after, err := readProcessorUse()
		if err != nil || othersShare(before, after) < calmShare {
			return err
		}
	}
	return nil
}
