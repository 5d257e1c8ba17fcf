package main

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// What others on the machine do while we measure: it is written down with every
// figure, as a figure from a busy machine is worth less.

// calmShare is how much of the machine others may use for it to be called calm.
const calmShare = 0.1

// processorUse is how much of the processors was used up to a moment.
type processorUse struct {
	at  time.Time
	all time.Duration // by everybody, and by other machines on the same hardware
	own time.Duration // by this program, its servers and its subjects
}

func readProcessorUse() (u processorUse, err error) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return u, err
	}
	if u.all, err = parseBusy(string(text)); err != nil {
		return u, err
	}
	u.at = time.Now()
	u.own, err = cpuTime(os.Getpid())
	return u, err
}

// parseBusy returns the time that all processors were busy from /proc/stat.
func parseBusy(text string) (time.Duration, error) {
	line, _, _ := strings.Cut(text, "\n")
	fields := strings.Fields(line)
	// cpu user nice system idle iowait irq softirq steal; user has what guests used
	if len(fields) < 9 || fields[0] != "cpu" {
		return 0, fmt.Errorf("%q is no line of /proc/stat", line)
	}
	var busy int64
	for _, i := range []int{1, 2, 3, 6, 7, 8} {
		n, err := strconv.ParseInt(fields[i], 10, 64)
		if err != nil {
			return 0, fmt.Errorf("%q is no line of /proc/stat: %w", line, err)
		}
		busy += n
	}
	return time.Duration(busy) * tick, nil
}

// othersShare returns which share of the machine others used between two moments.
func othersShare(from, to processorUse) float64 {
	whole := to.at.Sub(from.at) * time.Duration(runtime.NumCPU())
	return max(0, float64((to.all-from.all)-(to.own-from.own))/float64(whole))
}

// calm waits until others leave the machine to us, but no longer than patience.
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
