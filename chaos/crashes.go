package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"regexp"
	"time"

	"onejob/chaos/checker"
	"onejob/chaos/observer"
)

// crashes returns which working processes have crashed, as supervisors have logged.
func (c *cluster) crashes() (all []checker.Crash, err error) {
	var errs []error
	for _, r := range c.replicas {
		log, err := os.ReadFile(r.log())
		if err != nil {
			return nil, err
		}
		some, err := crashesIn(log, r.name)
		all, errs = append(all, some...), append(errs, err)
	}
	return all, errors.Join(errs...)
}

var (
	crashed = []byte(`"event":"worker_crashed"`)
	started = []byte(`"event":"replica_started"`)
	logged  = regexp.MustCompile(`"time":"([^"]+)"`)
	words   = regexp.MustCompile(`^(onejob|panic|fatal error): .*`)
)

// crashesIn returns those of one log, of a replica. A line that was cut off, as by a full disk, counts
// if it says when.
func crashesIn(log []byte, replica string) (all []checker.Crash, err error) {
	said := "" // by the working process of now
	for line := range bytes.Lines(log) {
		if found := words.Find(line); found != nil && said == "" {
			said = string(found[:min(len(found), 300)])
		}
		if bytes.Contains(line, started) {
			said = ""
		}
		if !bytes.Contains(line, crashed) {
			continue
		}
		when := logged.FindSubmatch(line)
		if when == nil {
			return nil, fmt.Errorf("the log of %s says not when a working process crashed: %s", replica, line)
		}
		at, err := time.Parse(time.RFC3339Nano, string(when[1]))
		if err != nil {
			return nil, fmt.Errorf("the log of %s: %w", replica, err)
		}
		var end struct {
			Code   *int   `json:"exit_code"`
			Signal string `json:"signal"`
			Error  string `json:"error"`
		}
		_ = json.Unmarshal(line, &end) // or else it is unknown
		how := "unknown"
		if end.Code != nil {
			how = cmp.Or(end.Signal, end.Error, fmt.Sprint("exit code ", *end.Code))
		}
		all = append(all, checker.Crash{Replica: replica, At: observer.At(at), How: how, Said: said})
		said = ""
	}
	return all, nil
}

// lastWords returns what a process said last, near the end of the log of its replica: it has ended a moment ago.
func lastWords(path string) (said string) {
	const end = 16 << 10
	log, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	for line := range bytes.Lines(log[max(0, len(log)-end):]) {
		if found := words.Find(line); found != nil {
			said = string(found[:min(len(found), 300)])
		}
	}
	return said
}
