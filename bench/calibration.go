package main

import (
	"runtime"
	"syscall"
	"time"
)

// A calibration is a piece of work that is always the same: a tenth of a second of
// looking up and changing numbers all over 64 MB, which is what databases do. On a
// machine that others use as well it takes longer when they are busy.
type calibration []uint32

func newCalibration() calibration { return make(calibration, 1<<24) }

// measure does the work and returns the processor time that it took, which waiting
// for a processor is no part of.
func (y calibration) measure() (time.Duration, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	began, err := threadTime()
	if err != nil {
		return 0, err
	}
	at := uint32(1)
	for range 400_000 {
		at = (at*1_664_525 + 1_013_904_223 + y[at]) % uint32(len(y))
		y[at]++
	}
	ended, err := threadTime()
	return ended - began, err
}

// threadTime returns the processor time of this thread.
func threadTime() (time.Duration, error) {
	const thisThread = 1 // RUSAGE_THREAD, getrusage(2)
	var u syscall.Rusage
	if err := syscall.Getrusage(thisThread, &u); err != nil {
		return 0, err
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()), nil
}
