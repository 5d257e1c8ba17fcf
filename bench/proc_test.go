package main

import (
	"os"
	"os/exec"
	"testing"
	"time"
)

func TestParseStat(t *testing.T) {
	line := "4242 (a) b (c) S 17 4242 4242 0 -1 4194304 100 200 0 0 120 30 7 5 20 0 1 0 100 1000 10"
	got, err := parseStat([]byte(line))
	if err != nil {
		t.Fatal(err)
	}
	want := procStat{parent: 17, own: 1500 * time.Millisecond, dead: 120 * time.Millisecond}
	if got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if _, err := parseStat([]byte("4242 (short) S 1")); err == nil {
		t.Error("a line that is cut off was accepted")
	}
}

// burn is a shell that uses the processor for a while and then says so.
const burn = `i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done`

// Time that a child has used is not lost when it ends.
func TestCPUTimeCountsDeadChildren(t *testing.T) {
	before, err := cpuTime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("sh", "-c", burn).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	after, err := cpuTime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if after-before < 5*tick {
		t.Errorf("a busy child that has ended added %v", after-before)
	}
}

func TestCPUTimeCountsLivingChildren(t *testing.T) {
	cmd := exec.Command("sh", "-c", burn+`; echo done; read line`)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	before, err := cpuTime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = in.Close(); _ = cmd.Wait() }()
	if _, err := out.Read(make([]byte, 8)); err != nil {
		t.Fatal(err)
	}
	own, err := readStat(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	without, err := cpuTime(os.Getpid(), cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	with, err := cpuTime(os.Getpid()) // the later one, for our own time goes on
	if err != nil {
		t.Fatal(err)
	}
	if own.parent != os.Getpid() || own.own < 5*tick || with-before < own.own {
		t.Errorf("the child says %+v, all together used %v", own, with-before)
	}
	if with-without < own.own {
		t.Errorf("with the child %v, without it %v, it says %+v", with, without, own)
	}
}
