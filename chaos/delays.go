package main

import (
	"slices"
	"sync"
	"time"

	"onejob/chaos/checker"
	"onejob/chaos/observer"
)

// delays are the times by which this program was late, though it asked for nothing but to
// be woken. The machine is busy with something else then, or stands still.
type delays struct {
	stop func()

	mu   sync.Mutex
	list []checker.Delay
}

const (
	delayTick  = 50 * time.Millisecond
	delayCount = 200 * time.Millisecond // less is not worth a note
)

// watchDelays watches until end is called.
func watchDelays() *delays {
	stop := make(chan struct{})
	d := &delays{stop: sync.OnceFunc(func() { close(stop) })}
	go func() {
		for {
			due := time.Now().Add(delayTick)
			select {
			case <-stop:
				return
			case <-time.After(delayTick):
			}
			if late := time.Since(due); late >= delayCount {
				d.mu.Lock()
				d.list = append(d.list, checker.Delay{Begin: observer.At(due), For: late})
				d.mu.Unlock()
			}
		}
	}()
	return d
}

// end stops the watch and returns what it saw.
func (d *delays) end() []checker.Delay {
	d.stop()
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.list)
}
