package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"onejob/chaos/observer"
)

// execPayload is the payload of an exec task.
type execPayload struct {
	Command string `json:"command"`
	Data    work   `json:"data"`
}

// work is the payload of a task of the kinds exec and go.
type work struct {
	MS       int    `json:"ms"`                 // how long it takes
	Failures int    `json:"failures,omitempty"` // the first attempts fail
	Limit    string `json:"limit,omitempty"`    // the row's, for the observer
	Stubborn bool   `json:"stubborn,omitempty"` // exec alone: SIGTERM does not end it
	Child    bool   `json:"child,omitempty"`    // exec alone: a process that it starts works too
	Print    int    `json:"print,omitempty"`    // exec alone: so many bytes of output

	// A payload that is large, and its sum, by which it is known that all of it arrived.
	Pad    string `json:"pad,omitempty"`
	PadSum uint32 `json:"pad_sum,omitempty"`
}

// print prints as much as the work asks for, in a form that shows whether the head and the
// tail are kept.
func (w work) print() error {
	if w.Print == 0 {
		return nil
	}
	_, err := fmt.Printf("%s%s%s\n", printHead, strings.Repeat("0123456789abcde\n", w.Print/16), printTail)
	return err
}

const (
	printHead = "the head of the output\n"
	printTail = "the tail of the output"
)

var errMeant = errors.New("it fails, as it was told to")

// perform does the work under the observer's eyes.
func perform(ctx context.Context, addr string, c observer.Claim, w work) error {
	if crc32.ChecksumIEEE([]byte(w.Pad)) != w.PadSum {
		return fmt.Errorf("the payload is not as it was enqueued: %d bytes of padding", len(w.Pad))
	}
	v, err := observer.Enter(ctx, addr, c)
	if err != nil {
		return err
	}
	switch err := v.Stay(ctx, time.Duration(w.MS)*time.Millisecond); {
	case ctx.Err() != nil:
		return errors.Join(context.Cause(ctx), v.Leave(observer.Stopped))
	case err != nil:
		return err
	case c.Attempt <= w.Failures:
		return errors.Join(errMeant, v.Leave(observer.Failed))
	}
	return v.Leave(observer.Succeeded)
}

// Variables of exec tasks' commands.
const (
	envObserver = "CHAOS_WITNESS" // where it is
	envPart     = "CHAOS_PART"    // which process of an attempt this is

	// Of commands that are no tasks', but run under "onejob lock".
	envOutsider = "CHAOS_OUTSIDER" // the command's name
	envStarter  = "CHAOS_STARTER"  // the name of who started it
	envKey      = "CHAOS_KEY"      // the lock key
)

// beTask is the life of an exec task's command. ctx ends with SIGTERM.
func beTask(ctx context.Context) int {
	err := execTask(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func execTask(ctx context.Context) error {
	var p execPayload
	if err := json.NewDecoder(os.Stdin).Decode(&p); err != nil {
		return err
	}
	w := p.Data
	c := observer.Claim{Key: os.Getenv("ONEJOB_LOCK_KEY"), Limit: w.Limit, Kind: "exec", Replica: os.Getenv("ONEJOB_REPLICA"),
		Part: os.Getenv(envPart), PID: os.Getpid(), Parent: os.Getppid()}
	if c.Outsider = os.Getenv(envOutsider); c.Outsider != "" {
		c.Key, c.Replica, c.Attempt = os.Getenv(envKey), os.Getenv(envStarter), 1
	} else {
		var errs [3]error
		c.Task, errs[0] = strconv.ParseInt(os.Getenv("ONEJOB_TASK_ID"), 10, 64)
		c.Attempt, errs[1] = strconv.Atoi(os.Getenv("ONEJOB_ATTEMPT"))
		c.Fence, errs[2] = strconv.ParseInt(os.Getenv("ONEJOB_FENCE"), 10, 64)
		if err := errors.Join(errs[:]...); err != nil {
			return err
		}
	}
	if w.Stubborn {
		signal.Reset(syscall.SIGTERM)
		signal.Ignore(syscall.SIGTERM)
	}
	if err := w.print(); err != nil {
		return err
	}
	if !w.Child {
		return perform(ctx, os.Getenv(envObserver), c, w)
	}
	child, err := startChild(w)
	if err != nil {
		return err
	}
	err = perform(ctx, os.Getenv(envObserver), c, w)
	return errors.Join(err, child.Wait())
}

// startChild starts a process that works as well, and that tries to get away: it
// has a session of its own and does not mind SIGTERM.
func startChild(w work) (*exec.Cmd, error) {
	w.Child, w.Stubborn, w.Failures, w.Print = false, true, 0, 0
	payload, err := json.Marshal(execPayload{Data: w})
	if err != nil {
		return nil, err
	}
	in, out, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer in.Close()
	defer out.Close()
	cmd := exec.Command("/proc/self/exe", partTask)
	cmd.Env = append(os.Environ(), envPart+"=child")
	cmd.Stdin = in
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	_, err = out.Write(payload)
	return cmd, err
}
