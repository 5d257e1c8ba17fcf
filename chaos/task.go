package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
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
}

var errMeant = errors.New("it fails, as it was told to")

// perform does the work under the observer's eyes.
func perform(ctx context.Context, addr string, c observer.Claim, w work) error {
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
	var errs [3]error
	c.Task, errs[0] = strconv.ParseInt(os.Getenv("ONEJOB_TASK_ID"), 10, 64)
	c.Attempt, errs[1] = strconv.Atoi(os.Getenv("ONEJOB_ATTEMPT"))
	c.Fence, errs[2] = strconv.ParseInt(os.Getenv("ONEJOB_FENCE"), 10, 64)
	if err := errors.Join(errs[:]...); err != nil {
		return err
	}
	if w.Stubborn {
		signal.Reset(syscall.SIGTERM)
		signal.Ignore(syscall.SIGTERM)
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
	w.Child, w.Stubborn, w.Failures = false, true, 0
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
