//go:build linux

package guard

import (
	"cmp"
	"errors"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"onejob/boottime"
	"onejob/internal/procfs"
	"onejob/internal/testenv"
)

func itoa(n int) string { return strconv.Itoa(n) }

func TestNothingIsLeft(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		script string
		end    func(*Process)
		want   Exit
		grace  time.Duration // if it is another than that of all
	}{
		"after Stop": {
			stubborn, (*Process).Stop,
			Exit{Code: 143, Signal: syscall.SIGTERM, Reason: Stopped}, 0,
		},
		"after Stop of what ignores it": {
			`trap "" TERM; ` + stubborn, (*Process).Stop,
			Exit{Code: 137, Signal: syscall.SIGKILL, Reason: Stopped}, 0,
		},
		"after Stop of what is stopped": {
			`trap 'exit 4' TERM; echo ready; kill -STOP $$; sleep 1000`, (*Process).Stop,
			Exit{Code: 4, Reason: Stopped}, time.Minute,
		},
		"after Kill": {
			`trap "exit 0" TERM; ` + stubborn, (*Process).Kill,
			Exit{Code: 137, Signal: syscall.SIGKILL, Reason: Stopped}, 0,
		},
		"after Stop and Kill": {
			`trap "" TERM; ` + stubborn, func(p *Process) { p.grace = time.Hour; p.Stop(); p.Kill() },
			Exit{Code: 137, Signal: syscall.SIGKILL, Reason: Stopped}, 0,
		},
		"after the deadline": {
			stubborn, func(p *Process) { p.Extend(boottime.Now().Add(50 * time.Millisecond)) },
			Exit{Code: 143, Signal: syscall.SIGTERM, Reason: LeaseEnded}, 0,
		},
		"after a deadline that was revived": {
			`trap "" TERM; ` + stubborn,
			func(p *Process) { p.Extend(boottime.Now()); p.Extend(boottime.Now().Add(time.Minute)) },
			Exit{Code: 137, Signal: syscall.SIGKILL, Reason: LeaseEnded}, 0,
		},
		"after the command exits": {
			`setsid -f sh -c 'trap "" TERM; echo ready; exec sleep 1000'; sleep 1000 & read line <"$FIFO"; exit 5`, func(*Process) {},
			Exit{Code: 5}, 0,
		},
		"after many have forked": {
			`i=0; while [ $i -lt 25 ]; do setsid -f sh -c 'trap "" TERM; sleep 1000; sleep 1000'; i=$((i+1)); done; echo ready; sleep 1000`,
			(*Process).Stop,
			Exit{Code: 143, Signal: syscall.SIGTERM, Reason: Stopped}, 0,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out testenv.Output
			s, mark := script(t, test.script, &out)
			s.Grace = cmp.Or(test.grace, s.Grace)
			fifo := t.TempDir() + "/fifo"
			if err := syscall.Mkfifo(fifo, 0o600); err != nil {
				t.Fatal(err)
			}
			s.Env = append(s.Env, "FIFO="+fifo)
			p := mustStart(t, s)
			untilReady(t, &out)
			if strings.Contains(test.script, "$FIFO") {
				if err := os.WriteFile(fifo, []byte("go on\n"), 0); err != nil {
					t.Fatal(err)
				}
			}
			test.end(p)
			if exit := mustWait(t, p); exit != test.want {
				t.Errorf("%+v, want %+v", exit, test.want)
			}
			wantNoneLeft(t, mark)
		})
	}
}

// A process that lives for less time than it takes to find it in /proc, because it goes on in a
// child in a session of its own, does not get away.
func TestChainsOfForks(t *testing.T) {
	t.Parallel()
	perl, err := exec.LookPath("perl")
	if err != nil {
		t.Skip("this needs perl, to fork fast enough")
	}
	var out testenv.Output
	s, mark := script(t, "", &out)
	s.NoCgroup = true
	s.Path, s.Args = perl, []string{"-MPOSIX", "-e", `
		$SIG{TERM} = "IGNORE";
		my $end = time + 20;
		for (1 .. 12) { fork or last }
		syswrite STDOUT, "ready\n";
		while (time < $end) { fork and POSIX::_exit(0); POSIX::setsid() }`}
	p := mustStart(t, s)
	untilReady(t, &out)
	p.Kill()
	if _, err := p.Wait(); err != nil { // the guard was too slow
		t.Error(err)
	}
	wantNoneLeft(t, mark)
}

// The processes of a group get the grace, even if its leader, a shell for example, ends at the first
// signal, or has ended before it.
func TestStopLeavesTheGraceToTheWholeGroup(t *testing.T) {
	t.Parallel()
	const cleans = `trap "sleep 0.1; echo cleaned up; exit" TERM; echo ready; while :; do sleep 0.01; done`
	for name, text := range map[string]string{
		"the leader ends at the signal": `sh -c '` + cleans + `' & wait`,
		"there is no leader":            `setsid sh -c '{ ` + cleans + `; } &'; sleep 1000`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out testenv.Output
			s, _ := script(t, text, &out)
			s.Grace = time.Minute
			p := mustStart(t, s)
			untilReady(t, &out)
			p.Stop()
			mustWait(t, p)
			if !strings.Contains(out.String(), "cleaned up\n") {
				t.Errorf("%q", out.String())
			}
		})
	}
}

func TestGraceEndsAtTheDeadline(t *testing.T) {
	t.Parallel()
	var out testenv.Output
	s, mark := script(t, `trap "" TERM; `+stubborn, &out)
	s.Grace = time.Hour
	p := mustStart(t, s)
	untilReady(t, &out)
	p.Stop()
	p.Extend(boottime.Now().Add(300 * time.Millisecond))
	if exit := mustWait(t, p); exit.Signal != syscall.SIGKILL || exit.Reason != Stopped {
		t.Errorf("%+v", exit)
	}
	wantNoneLeft(t, mark)
}

// The margin of a lease leaves room for the lapse and a tenth of a second: no grace may be longer.
func TestNoGraceOutlivesTheLease(t *testing.T) {
	t.Parallel()
	for grace, want := range map[time.Duration]time.Duration{0: 0, 100 * time.Millisecond: 100 * time.Millisecond, time.Hour: MinMargin - 100*time.Millisecond} {
		k := reaper{grace: grace, deadline: boottime.Now()}
		if got := k.lapsed().Sub(k.deadline); got != want {
			t.Errorf("with a grace of %v a command is dead %v after its lease; want %v", grace, got, want)
		}
	}
}

func TestAnExtendedLeaseLasts(t *testing.T) {
	t.Parallel()
	var out testenv.Output
	s, _ := script(t, `echo ready; sleep 2.3; exit 9`, &out)
	first := boottime.Now().Add(2 * time.Second)
	s.Deadline = first
	p := mustStart(t, s)
	untilReady(t, &out)
	p.Extend(first.Add(time.Minute))
	if exit := mustWait(t, p); exit != (Exit{Code: 9}) {
		t.Errorf("%+v", exit)
	}
}

func TestGuardKilled(t *testing.T) {
	t.Parallel()
	var out testenv.Output
	// One of them clears its environment, one leaves the session.
	s, mark := script(t, `env -i PATH="$PATH" sh -c 'trap "" TERM; exec sleep 1234567' & `+stubborn, &out)
	p := mustStart(t, s)
	untilReady(t, &out)
	session := p.guard.Pid
	if err := syscall.Kill(session, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Wait(); !errors.Is(err, ErrGuardDied) {
		t.Errorf("error %v", err)
	}
	wantNoneLeft(t, mark)
	all, err := procfs.Processes()
	if err != nil {
		t.Fatal(err)
	}
	for _, q := range all {
		if q.Session == session && !q.Dead {
			t.Errorf("%+v is left", q)
		}
	}
}

// What has ended its main thread looks like a zombie, and has neither an environment nor
// a command line. It is found by its other threads.
func TestGuardOfAProcessWithoutMainThread(t *testing.T) {
	t.Parallel()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var out testenv.Output
	path := t.TempDir() + "/pid"
	s, mark := script(t, `setsid -f "$SELF"; while [ ! -s "$GUARD_TEST_HEADLESS" ]; do sleep 0.01; done; `+stubborn, &out)
	s.NoCgroup, s.Env = true, append(s.Env, "SELF="+self, "GUARD_TEST_HEADLESS="+path)
	p := mustStart(t, s)
	untilReady(t, &out)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	pid, _ := strconv.Atoi(string(text))
	t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
	if left := marked(t, mark); !slices.Contains(left, pid) {
		t.Fatalf("process %d is not seen among %v", pid, left)
	}
	if err := syscall.Kill(p.guard.Pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Wait(); !errors.Is(err, ErrGuardDied) {
		t.Errorf("error %v", err)
	}
	if q, err := procfs.Read(pid); err == nil && !q.Dead {
		t.Errorf("%+v is left", q)
	}
}

// A command may be a daemon itself, as "onejob lock" is, whose commands have a guard, a session and a mark of
// their own. Without a cgroup they are found by the outer mark.
func TestGuardOfADaemon(t *testing.T) {
	t.Parallel()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var out testenv.Output
	s, mark := script(t, `exec "$SELF"`, &out)
	below := newMark(t)
	s.NoCgroup = true
	s.Env = append(s.Env, "SELF="+self, "GUARD_TEST_DAEMON="+below, "GUARD_TEST_LEASE=1h", "GUARD_TEST_GRACE=1m", "GUARD_TEST_NO_CGROUP=1", "GUARD_TEST_SCRIPT="+stubborn)
	p := mustStart(t, s)
	untilReady(t, &out)
	if len(marked(t, below)) == 0 {
		t.Fatal("nothing runs below")
	}
	if err := syscall.Kill(p.guard.Pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Wait(); !errors.Is(err, ErrGuardDied) {
		t.Errorf("error %v", err)
	}
	wantNoneLeft(t, mark)
	wantNoneLeft(t, below)
}

func TestGuardFrozen(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*Process){
		"while the lease lasts": func(p *Process) { p.Extend(boottime.Now().Add(time.Hour)) },
		"past the deadline":     func(p *Process) { p.Extend(boottime.Now().Add(100 * time.Millisecond)) },
		"when it should stop": func(p *Process) {
			p.Stop()
			p.Extend(boottime.Now().Add(time.Hour))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out testenv.Output
			s, mark := script(t, stubborn, &out)
			p := mustStart(t, s)
			untilReady(t, &out)
			testenv.Freeze(t, p.guard.Pid)
			end(p)
			ended := make(chan error, 1)
			go func() {
				_, err := p.Wait()
				ended <- err
			}()
			until(t, "the attempt has ended", func() bool { return len(ended) > 0 })
			if err := <-ended; !errors.Is(err, ErrGuardDied) {
				t.Errorf("error %v", err)
			}
			wantNoneLeft(t, mark)
		})
	}
}

// startDaemon runs this test binary as a daemon; see daemon. It returns when
// the script is ready.
func startDaemon(t *testing.T, lease time.Duration, text string, env ...[]string) (d *exec.Cmd, guard int, out *testenv.Output, mark string) {
	t.Helper()
	return startDaemonAs(t, os.Geteuid(), "", lease, text, slices.Concat(env...))
}

// startDaemonAs does it as another user, and in another cgroup if one is given.
func startDaemonAs(t *testing.T, user int, cgroup string, lease time.Duration, text string, env []string) (d *exec.Cmd, guard int, out *testenv.Output, mark string) {
	t.Helper()
	out, mark = &testenv.Output{}, newMark(t)
	d = exec.Command("/proc/self/exe")
	d.Env = append(os.Environ(),
		"GUARD_TEST_DAEMON="+mark, "GUARD_TEST_LEASE="+lease.String(), "GUARD_TEST_SCRIPT="+text)
	d.Env = append(d.Env, env...)
	d.Stdout, d.Stderr = out, os.Stderr
	if user != os.Geteuid() {
		d.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(user), Gid: uint32(user)}}
	}
	if cgroup != "" {
		inCgroup(t, cgroup, d)
	} else if err := d.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = d.Process.Kill()
		_ = d.Wait()
		until(t, "nothing is left", func() bool { return len(marked(t, mark)) == 0 })
	})
	untilReady(t, out)
	until(t, "the guard is known", func() bool { return strings.Contains(out.String(), "guard ") })
	_, rest, _ := strings.Cut(out.String(), "guard ")
	until(t, "its line is complete", func() bool {
		_, rest, _ = strings.Cut(out.String(), "guard ")
		return strings.Contains(rest, "\n")
	})
	line, _, _ := strings.Cut(rest, "\n")
	guard, err := strconv.Atoi(line)
	if err != nil {
		t.Fatal(err)
	}
	return d, guard, out, mark
}

func sendSignal(t *testing.T, pid int, sig syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(pid, sig); err != nil {
		t.Fatal(err)
	}
}

func wantExit(t *testing.T, d *exec.Cmd, out *testenv.Output, want string) {
	t.Helper()
	if err := d.Wait(); err != nil {
		t.Error(err)
	}
	if !strings.Contains(out.String(), want) {
		t.Errorf("the daemon did not say %q but:\n%s", want, out.String())
	}
}

func TestDaemonKilled(t *testing.T) {
	t.Parallel()
	d, guard, _, mark := startDaemon(t, time.Minute, stubborn)
	sendSignal(t, d.Process.Pid, syscall.SIGKILL)
	until(t, "nothing is left", func() bool { return len(marked(t, mark)) == 0 })
	until(t, "the guard is gone", func() bool {
		p, err := procfs.Read(guard)
		return err != nil || p.Dead
	})
}

// Writing to an output that nobody reads any more must not end the clean-up.
func TestDaemonKilledGivesTheGrace(t *testing.T) {
	t.Parallel()
	mark := t.TempDir() + "/mark"
	d, _, _, _ := startDaemon(t, time.Minute, `trap "head -c 200000 /dev/zero; echo >`+mark+`; exit" TERM; echo ready; while :; do sleep 0.01; done`,
		[]string{"GUARD_TEST_GRACE=1m"})
	sendSignal(t, d.Process.Pid, syscall.SIGKILL)
	until(t, "the command has cleaned up", func() bool {
		_, err := os.Stat(mark)
		return err == nil
	})
}

func TestDaemonFrozen(t *testing.T) {
	t.Parallel()
	const lease = 2 * time.Second
	d, _, out, mark := startDaemon(t, lease, stubborn)
	testenv.Freeze(t, d.Process.Pid)
	frozen := boottime.Now()
	until(t, "nothing is left", func() bool { return len(marked(t, mark)) == 0 })
	if took := boottime.Now().Sub(frozen); took > lease+20*time.Second {
		t.Errorf("it took %s", took)
	}
	sendSignal(t, d.Process.Pid, syscall.SIGCONT)
	wantExit(t, d, out, `exit {"Code":143,"Signal":15,"Reason":2} <nil>`)
}

// Both are frozen, as by a suspend; on waking the guard does not ask politely.
func TestDaemonAndGuardFrozen(t *testing.T) {
	t.Parallel()
	const lease = 2 * time.Second
	d, guard, out, mark := startDaemon(t, lease, `echo ready; exec sleep 1000`)
	testenv.Freeze(t, d.Process.Pid)
	testenv.Freeze(t, guard)
	late := boottime.Now().Add(lease + lapse + 100*time.Millisecond)
	until(t, "the deadline is long past", late.Passed)
	if len(marked(t, mark)) == 0 {
		t.Error("somebody else has killed it")
	}
	sendSignal(t, guard, syscall.SIGCONT)
	until(t, "nothing is left", func() bool { return len(marked(t, mark)) == 0 })
	sendSignal(t, d.Process.Pid, syscall.SIGCONT)
	wantExit(t, d, out, `exit {"Code":137,"Signal":9,"Reason":2} <nil>`)
}

// The guard dies while the daemon cannot notice: at least the command itself
// dies with it, and the rest as soon as the daemon wakes.
func TestGuardKilledWhileDaemonIsFrozen(t *testing.T) {
	t.Parallel()
	d, guard, out, mark := startDaemon(t, time.Minute, `trap "" TERM HUP; `+stubborn)
	commands := procfs.Children(guard)
	if len(commands) == 0 {
		t.Fatal("the guard has no child")
	}
	command, err := procfs.Read(commands[0]) // those that it started come to the guard when it is gone
	if err != nil {
		t.Fatal(err)
	}
	testenv.Freeze(t, d.Process.Pid)
	sendSignal(t, guard, syscall.SIGKILL)
	until(t, "the command is gone", func() bool { return procfs.Gone(command.PID, command.Start) })
	sendSignal(t, d.Process.Pid, syscall.SIGCONT)
	wantExit(t, d, out, ErrGuardDied.Error())
	wantNoneLeft(t, mark)
}

// Signals to the daemon's group are not the guard's business.
func TestGuardIgnoresSignals(t *testing.T) {
	t.Parallel()
	var out testenv.Output
	s, _ := script(t, stubborn, &out)
	p := mustStart(t, s)
	untilReady(t, &out)
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGPIPE, syscall.SIGQUIT} {
		sendSignal(t, p.guard.Pid, sig)
	}
	p.Stop()
	if exit := mustWait(t, p); exit.Reason != Stopped {
		t.Errorf("%+v", exit)
	}
}
