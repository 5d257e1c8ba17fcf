package main

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"strconv"
	"time"

	"onejob/chaos/observer"
)

// envObserver is the variable with the address of the observer.
const envObserver = "HA_OBSERVER"

// work is the payload of an exec task.
type work struct {
	MS int `json:"ms"` // how long it takes
}

// beTask is the life of an exec task's command. ctx ends with SIGTERM.
func beTask(ctx context.Context) error {
	var payload struct {
		Data work `json:"data"`
	}
	if err := json.NewDecoder(os.Stdin).Decode(&payload); err != nil {
		return err
	}
	c := observer.Claim{Key: os.Getenv("ONEJOB_LOCK_KEY"), Kind: "exec", Replica: os.Getenv("ONEJOB_REPLICA"), PID: os.Getpid(), Parent: os.Getppid()}
	var errs [3]error
	c.Task, errs[0] = strconv.ParseInt(os.Getenv("ONEJOB_TASK_ID"), 10, 64)
	c.Attempt, errs[1] = strconv.Atoi(os.Getenv("ONEJOB_ATTEMPT"))
	c.Fence, errs[2] = strconv.ParseInt(os.Getenv("ONEJOB_FENCE"), 10, 64)
	if err := errors.Join(errs[:]...); err != nil {
		return err
	}
	v, err := observer.Enter(ctx, os.Getenv(envObserver), c)
	if err != nil {
		return err
	}
	if err := v.Stay(ctx, time.Duration(payload.Data.MS)*time.Millisecond); err != nil {
		return errors.Join(err, v.Leave(observer.Stopped))
	}
	return v.Leave(observer.Succeeded)
}
