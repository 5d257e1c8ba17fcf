package main

import (
	"strings"
	"testing"
)

func TestReadPlace(t *testing.T) {
	all := map[string]string{
		"ONEJOB_REPLICA": "naive-1", "ONEJOB_POSTGRES_DSN": "postgres://h/db", "ONEJOB_CONSUL_ADDRESS": "h:8500",
		"CHAOS_WITNESS": "h:1", "CHAOS_COMMAND": "/bin/true", "CHAOS_EFFECT": "SELECT $1",
	}
	p, err := readPlace(func(name string) string { return all[name] })
	if want := (place{"naive-1", "postgres://h/db", "h:8500", "h:1", "/bin/true", "SELECT $1"}); err != nil || p != want {
		t.Errorf("got %+v, %v; want %+v", p, err, want)
	}
	_, err = readPlace(func(string) string { return "" })
	for name := range all {
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("without any variable: %v, which does not name %s", err, name)
		}
	}
}

func TestParsePayload(t *testing.T) {
	for text, want := range map[string]payload{
		`{}`:                         {},
		`{"ms": 150, "failures": 2}`: {MS: 150, Failures: 2},
		`{"command": "work", "data": {"ms": 150}}`: {}, // for the command alone
		`{"url": "http://h/work?ms=1"}`:            {URL: "http://h/work?ms=1"},
	} {
		if p, err := parsePayload([]byte(text)); err != nil || p != want {
			t.Errorf("%s: got %+v, %v; want %+v", text, p, err, want)
		}
	}
	p, err := parsePayload([]byte(`{"statement": "effect", "params": {"seconds": 1.5}}`))
	if err != nil || p.Params.Seconds != 1.5 {
		t.Errorf("of an sql task: got %+v, %v", p, err)
	}
	if _, err := parsePayload([]byte(`[1]`)); err == nil {
		t.Error("a payload that is no object was accepted")
	}
}

func TestRunRefusesUnknownWays(t *testing.T) {
	for _, args := range [][]string{nil, {"onejob"}, {"naive", "apilock"}} {
		if err := run(t.Context(), args, func(string) string { return "x" }); err == nil || !strings.Contains(err.Error(), "naive or apilock") {
			t.Errorf("%v: %v", args, err)
		}
	}
}

// A task that is in hand, or that somebody else just had, is not tried.
func TestTakeAndPut(t *testing.T) {
	r := newRunner(place{}, ways["naive"], nil, nil)
	if !r.take(1) || r.take(1) || !r.take(2) {
		t.Error("a task that is in hand can be taken, or one that is not cannot")
	}
	r.put(1, 0)
	r.put(2, again)
	if !r.take(1) || r.take(2) {
		t.Error("what was put down cannot be taken, or what somebody else has can")
	}
}
