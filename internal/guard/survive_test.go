//go:build linux

package guard

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"onejob/boottime"
	"onejob/internal/procfs"
	"onejob/internal/testenv"
	"onejob/internal/testenv/cgroups"
)

// modes are the ways to run a command. Whether there are cgroups is up to the
// machine.
var modes = []struct {
	name     string
	noCgroup bool
}{{"with a cgroup", false}, {"without a cgroup", true}}

func needCgroups(t *testing.T) {
	t.Helper()
	cgroups.Need(t, CgroupError())
}

var swarms atomic.Int64

// swarm returns a script whose processes do all that they can to stay: they
// fork twice, have sessions of their own, ignore signals, close their files, and
// start another one every 50 ms, 200 at most. Where they are in a cgroup they
// have no environment either. All have tag in their command line.
func swarm(noCgroup bool) (text, tag string) {
	tag = fmt.Sprintf("1000.%07d%03d", os.Getpid(), swarms.Add(1)) // none is the beginning of another
	shed := ""
	if !noCgroup {
		shed = "env -i "
	}
	return `PATH=/usr/bin:/bin
setsid -f ` + shed + `sh -c 'trap "" HUP INT QUIT TERM USR1 USR2 PIPE ALRM
	exec <&- >&- 2>&-
	i=0; while [ $i -lt 200 ]; do setsid -f sleep ` + tag + `; sleep 0.05; i=$((i+1)); done; sleep ` + tag + `'
echo ready
`, tag
}

// tagged returns the living processes with tag in their command line.
func tagged(t *testing.T, tag string) (pids []int) {
	t.Helper()
	all, err := procfs.Processes()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range all {
		line, _ := os.ReadFile("/proc/" + itoa(p.PID) + "/cmdline")
		if !p.Dead && bytes.Contains(line, []byte(tag)) {
			pids = append(pids, p.PID)
		}
	}
	return pids
}

func untilSwarming(t *testing.T, tag string) {
	t.Helper()
	until(t, "the command has started others", func() bool { return len(tagged(t, tag)) > 4 })
}

func wantNoneTagged(t *testing.T, tag string) {
	t.Helper()
	if left := tagged(t, tag); len(left) > 0 {
		t.Errorf("processes %v are still there", left)
	}
}

func killTagged(t *testing.T, tag string) {
	until(t, "what the test has left is gone", func() bool {
		left := tagged(t, tag)
		for _, pid := range left {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		return len(left) == 0
	})
}

// All is dead before Wait returns.
func TestSwarmIsDeadBeforeWaitReturns(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		for name, end := range map[string]func(*Process, string){
			"normal end":   func(_ *Process, done string) { _ = os.WriteFile(done, nil, 0o600) },
			"stop":         func(p *Process, _ string) { p.Stop() },
			"deadline":     func(p *Process, _ string) { p.Extend(boottime.Now().Add(50 * time.Millisecond)) },
			"guard killed": func(p *Process, _ string) { _ = syscall.Kill(p.guard.Pid, syscall.SIGKILL) },
		} {
			t.Run(mode.name+", "+name, func(t *testing.T) {
				t.Parallel()
				if !mode.noCgroup {
					needCgroups(t)
				}
				text, tag := swarm(mode.noCgroup)
				done := t.TempDir() + "/done"
				s, _ := script(t, text+`while [ ! -e "$DONE" ]; do sleep 0.05; done`, nil)
				s.NoCgroup, s.Env = mode.noCgroup, append(s.Env, "DONE="+done)
				p := mustStart(t, s)
				t.Cleanup(func() { killTagged(t, tag) })
				untilSwarming(t, tag)
				end(p, done)
				if _, err := p.Wait(); err != nil && (name != "guard killed" || !errors.Is(err, ErrGuardDied)) {
					t.Error(err)
				}
				wantNoneTagged(t, tag)
				if p.group != nil {
					if _, err := os.Stat(p.group.dir); err == nil {
						t.Errorf("cgroup %s is still there", p.group.dir)
					}
				}
			})
		}
	}
}

func TestSwarmDiesWithItsDaemon(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		t.Run(mode.name, func(t *testing.T) {
			t.Parallel()
			if !mode.noCgroup {
				needCgroups(t)
			}
			text, tag := swarm(mode.noCgroup)
			d, _, _, _ := startDaemon(t, time.Minute, text+"sleep "+tag, noCgroup(mode.noCgroup))
			t.Cleanup(func() { killTagged(t, tag) })
			untilSwarming(t, tag)
			sendSignal(t, d.Process.Pid, syscall.SIGKILL)
			until(t, "nothing is left", func() bool { return len(tagged(t, tag)) == 0 })
		})
	}
}

func noCgroup(yes bool) []string {
	if yes {
		return []string{"GUARD_TEST_NO_CGROUP=1"}
	}
	return nil
}

// What outlives guard and daemon is killed by the next sweep. A guard that is
// frozen while its daemon dies is as good as dead.
func TestSweepKillsSurvivors(t *testing.T) {
	for _, mode := range modes {
		for _, guardIs := range []string{"killed", "frozen"} {
			t.Run(mode.name+", guard "+guardIs, func(t *testing.T) {
				if !mode.noCgroup {
					needCgroups(t)
				}
				text, tag := swarm(mode.noCgroup)
				d, guard, _, _ := startDaemon(t, time.Minute, text+"sleep "+tag, noCgroup(mode.noCgroup))
				t.Cleanup(func() { killTagged(t, tag) })
				untilSwarming(t, tag)
				mine := map[int]bool{}
				for _, pid := range tagged(t, tag) {
					mine[pid] = true
				}

				// Alive, they are nobody's to kill.
				swept, err := Sweep()
				if err != nil {
					t.Error(err)
				}
				for _, s := range swept {
					if mine[s.PID] {
						t.Fatalf("%v was killed while its daemon lived", s)
					}
				}

				// Both are stopped first, so that neither sees the other die.
				testenv.Freeze(t, d.Process.Pid)
				testenv.Freeze(t, guard)
				sendSignal(t, d.Process.Pid, syscall.SIGKILL)
				_ = d.Wait()
				if guardIs == "killed" {
					sendSignal(t, guard, syscall.SIGKILL)
					until(t, "the guard is gone", func() bool { return gone(guard) })
				}
				survivors := len(tagged(t, tag))
				swept, err = Sweep()
				if err != nil {
					t.Error(err)
				}
				if len(swept) > 0 {
					wantNoneTagged(t, tag)
				}
				// A replica that starts elsewhere on this machine may have swept, and be at it: a guard that it
				// has killed runs for a moment before it is gone.
				until(t, "nothing is left", func() bool { return len(tagged(t, tag)) == 0 && gone(guard) })
				t.Logf("%d processes survived, and %d were swept", survivors, len(swept))
			})
		}
	}
}

// One that does not end takes all the time that there is to wait, and none of the others' death.
func TestSweepKillsThoughTimeIsUp(t *testing.T) {
	t.Parallel()
	h := hierarchy{base: testCgroup(t, os.Getuid())}
	var pids []int
	for _, name := range []string{"a", "b"} {
		dir := filepath.Join(h.attempts(), name)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		c := exec.Command("/bin/sleep", "1000")
		inCgroup(t, dir, c)
		pids = append(pids, c.Process.Pid)
	}
	killed := map[int]string{}
	if err := h.sweep(killed, time.Now().Add(-time.Second)); err != nil {
		t.Error(err)
	}
	for _, pid := range pids {
		if killed[pid] == "" || !gone(pid) {
			t.Errorf("process %d is still there, killed were %v", pid, killed)
		}
	}
}

func gone(pid int) bool {
	p, err := procfs.Read(pid)
	return err != nil || p.Dead
}

// A guard whose daemon is dead still gives its command the grace.
func TestSweepLeavesWhatAGuardOwns(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		t.Run(mode.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			d, _, _, _ := startDaemon(t, time.Minute,
				`trap 'echo >`+dir+`/asked; while [ ! -e `+dir+`/swept ]; do sleep 0.01; done; echo >`+dir+`/cleaned; exit' TERM; echo ready; while :; do sleep 0.01; done`,
				append(noCgroup(mode.noCgroup), "GUARD_TEST_GRACE=1m"))
			sendSignal(t, d.Process.Pid, syscall.SIGKILL)
			there := func(name string) func() bool {
				return func() bool { _, err := os.Stat(filepath.Join(dir, name)); return err == nil }
			}
			until(t, "the command was asked to end", there("asked"))
			if _, err := Sweep(); err != nil {
				t.Error(err)
			}
			if err := os.WriteFile(dir+"/swept", nil, 0o600); err != nil {
				t.Fatal(err)
			}
			until(t, "the command has cleaned up", there("cleaned"))
		})
	}
}

// A process is killed only if its daemon and its guard, of this very place, are
// both dead; numbers that others have by now do not count.
func TestSweepIsStrict(t *testing.T) {
	t.Parallel()
	us := fmt.Sprintf("%d.%d", os.Getpid(), startOf(os.Getpid()))
	earlier := fmt.Sprintf("%d.%d", os.Getpid(), startOf(os.Getpid())-1)
	for name, test := range map[string]struct {
		value string
		dies  bool
	}{
		"daemon and guard dead":         {here() + "/" + earlier + "/" + earlier + "/x", true},
		"daemon alive":                  {here() + "/" + us + "/" + earlier + "/x", false},
		"guard alive":                   {here() + "/" + earlier + "/" + us + "/x", false},
		"another user or namespace":     {"9" + here() + "/" + earlier + "/" + earlier + "/x", false},
		"a mark that is no mark":        {"ABCDEF", false},
		"the mark of an older version":  {"WTL2HDJ2PTOBXAJ3EBTXSFJQ2A", false},
		"a daemon that is not a number": {here() + "/me/" + earlier + "/x", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := exec.Command("/bin/sleep", "1000")
			c.Env = []string{envKey + "=" + test.value}
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = c.Process.Kill(); _ = c.Wait() }()
			until(t, "it has its environment", func() bool { mark, err := markOf(c.Process.Pid); return mark != "" && err == nil })
			killed, err := Sweep()
			if err != nil {
				t.Error(err)
			}
			if dead := gone(c.Process.Pid); dead != test.dies {
				t.Errorf("dead: %t; swept: %v", dead, killed)
			}
		})
	}
}

// What a process says of itself harms no others: root would kill a session that it names.
func TestSweepBelievesNobodyOfOthers(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root, which alone can kill others")
	}
	// A process whose session's leader has ended, as that of a job of a shell that was closed.
	dir := t.TempDir()
	leader := exec.Command("/bin/sh", "-c", `sleep 1000 & echo $! >"$0"/pid`, dir)
	leader.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := leader.Run(); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(dir + "/pid")
	if err != nil {
		t.Fatal(err)
	}
	victim, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Kill(victim, syscall.SIGKILL) }()

	session := leader.Process.Pid
	earlier := fmt.Sprintf("%d.%d", os.Getpid(), startOf(os.Getpid())-1)
	forger := exec.Command("/bin/sleep", "1000")
	forger.Env = []string{fmt.Sprintf("%s=%s/%s/%d.1/x", envKey, here(), earlier, session)}
	if err := forger.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = forger.Process.Kill(); _ = forger.Wait() }()
	until(t, "it has its environment, or another test's sweep has found it", func() bool {
		mark, err := markOf(forger.Process.Pid)
		return mark != "" && err == nil || gone(forger.Process.Pid)
	})
	if _, err := Sweep(); err != nil {
		t.Error(err)
	}
	until(t, "the forger is dead", func() bool { return gone(forger.Process.Pid) })
	if p, err := procfs.Read(victim); err != nil || p.Dead || p.Session != session {
		t.Errorf("the victim is %+v, %v", p, err)
	}
}

// What cannot be killed is looked at again and again, not without a pause.
func TestPausesWhileKilling(t *testing.T) {
	t.Parallel()
	k := reaper{phase: killing}
	for range 200 {
		if wait := k.maxWait(); wait < 0 || wait > mostPause {
			t.Fatalf("it waits %v", wait)
		}
	}
	if wait := k.maxWait(); wait != mostPause {
		t.Errorf("in the end it waits %v, want %v", wait, mostPause)
	}
}

func TestMark(t *testing.T) {
	t.Parallel()
	text := guardMark(os.Getpid(), "random")
	m, ok := parseMark(text)
	us := identity{os.Getpid(), startOf(os.Getpid())}
	if !ok || m != (mark{here(), us, us}) || us.start == 0 {
		t.Errorf("%s became %+v, %t", text, m, ok)
	}
	for _, bad := range []string{"", "ONEJOB_GUARD=", "ONEJOB_GUARD=ABCDEF", "ONEJOB_GUARD=x/1.2/3.4", "ONEJOB_GUARD=x/0.2/3.4/r", "ONEJOB_GUARD=x/1/3.4/r"} {
		if m, ok := parseMark(bad); ok {
			t.Errorf("%q became %+v", bad, m)
		}
	}
}

func TestGuardsNameDoesNotHoldTheDaemons(t *testing.T) {
	t.Parallel()
	path := t.TempDir() + "/OneJob-onejob"
	if err := os.Symlink("/bin/sleep", path); err != nil {
		t.Fatal(err)
	}
	s, _ := script(t, "", nil)
	s.Path, s.Args = path, []string{"1000"}
	p := mustStart(t, s)
	line, err := os.ReadFile("/proc/" + itoa(p.guard.Pid) + "/cmdline")
	if want := "task-guard:\x00one-job-one-job\x00"; err != nil || string(line) != want {
		t.Errorf("%q, %v, want %q", line, err, want)
	}
	if name := nameOf(p.guard.Pid); name != "task-guard" || strings.Contains(name, "onejob") {
		t.Errorf("%q", name)
	}
}
