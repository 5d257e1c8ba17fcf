//go:build linux

package guard

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"onejob/boottime"
	"onejob/internal/testenv"
)

func TestLocate(t *testing.T) {
	t.Parallel()
	const both = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
	for name, test := range map[string]struct{ mountinfo, cgroup, want, err string }{
		"alone":                  {"30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n", "0::/system.slice/a.service\n", "/sys/fs/cgroup/system.slice/a.service", ""},
		"beside v1":              {both, "4:memory:/x\n0::/\n", "/sys/fs/cgroup/unified", ""},
		"part mounted":           {"30 24 0:26 /docker/x /sys/fs/cgroup ro - cgroup2 cgroup ro\n", "0::/docker/x/y\n", "/sys/fs/cgroup/y", ""},
		"outside":                {"30 24 0:26 /docker/x /sys/fs/cgroup ro - cgroup2 cgroup ro\n", "0::/docker/xy\n", "", "outside"},
		"another space":          {both, "0::/../x\n", "", "outside"},
		"mount of another space": {"41 31 0:38 /.. /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n42 31 0:38 / /new rw - cgroup2 cgroup2 rw\n", "0::/\n", "/new", ""},
		"name with room":         {`30 24 0:26 / /a\040b rw - cgroup2 cgroup2 rw` + "\n", "0::/c\n", "/a b/c", ""},
		"not mounted":            {"32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n", "0::/\n", "", "no cgroup hierarchy"},
		"v1 alone":               {both, "4:memory:/x\n", "", "in no cgroup"},
	} {
		got, err := locate(test.mountinfo, test.cgroup)
		if got != test.want || (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}

func TestCommandIsBornInItsCgroup(t *testing.T) {
	t.Parallel()
	needCgroups(t)
	for name, moveIn := range map[string]bool{"by clone3": false, "as on old kernels": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out testenv.Output
			s, _ := script(t, `grep ^0:: /proc/self/cgroup; grep ^0:: /proc/$PPID/cgroup`, &out)
			s.moveIn = moveIn
			p := mustStart(t, s)
			if exit := mustWait(t, p); exit != (Exit{}) {
				t.Errorf("%+v", exit)
			}
			own, guards, _ := strings.Cut(out.String(), "\n")
			if want := "/" + attemptsDir + "/" + filepath.Base(p.group.dir); !strings.HasSuffix(own, want) || strings.Contains(guards, attemptsDir) {
				t.Errorf("the command is in %q, its guard in %q", own, guards)
			}
			if _, err := os.Stat(p.group.dir); err == nil {
				t.Error("the cgroup is still there")
			}
		})
	}
	t.Run("what cannot be started leaves none", func(t *testing.T) {
		s, _ := script(t, "", nil)
		s.Path = "/nowhere"
		h, _ := ourHierarchy()
		g, err := h.newCgroup(Limits{})
		if err != nil {
			t.Fatal(err)
		}
		defer g.destroy()
		if _, err := Start(s); err == nil {
			t.Error("it started")
		}
	})
}

// A command may make cgroups below its own, if it may write there.
func TestCgroupsOfTheCommandAreRemoved(t *testing.T) {
	t.Parallel()
	needCgroups(t)
	if os.Geteuid() != 0 {
		t.Skip("only root may write to the cgroup")
	}
	_, tag := swarm(false)
	s, _ := script(t, `mkdir -p $CGROUPS/a/b && setsid -f sh -c 'echo 0 >'$CGROUPS'/a/b/cgroup.procs; exec sleep `+tag+`'
		while [ -z "$(cat $CGROUPS/a/b/cgroup.procs)" ]; do sleep 0.01; done`, nil)
	h, _ := ourHierarchy()
	s.Args[1] = strings.ReplaceAll(s.Args[1], "$CGROUPS", h.attempts()+"/$(sed -n 's:^0.*/::p' /proc/self/cgroup)")
	p := mustStart(t, s)
	if exit := mustWait(t, p); exit != (Exit{}) {
		t.Errorf("%+v", exit)
	}
	wantNoneTagged(t, tag)
	if _, err := os.Stat(p.group.dir); err == nil {
		t.Error("the cgroup is still there")
	}
}

// inCgroup starts a program in a cgroup; it is killed in the end.
func inCgroup(t *testing.T, dir string, c *exec.Cmd) {
	t.Helper()
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if c.SysProcAttr == nil {
		c.SysProcAttr = &syscall.SysProcAttr{}
	}
	c.SysProcAttr.UseCgroupFD, c.SysProcAttr.CgroupFD = true, int(f.Fd())
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
}

// testCgroup returns a cgroup below this process's own, removed in the end with
// all that is in it.
func testCgroup(t *testing.T, owner int) string {
	t.Helper()
	needCgroups(t)
	h, _ := ourHierarchy()
	dir, err := os.MkdirTemp(h.base, "guard-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { g := &cgroup{dir: dir}; g.killAll(time.Time{}); g.remove() })
	for _, file := range []string{"", "cgroup.procs", "cgroup.subtree_control", "cgroup.threads"} {
		if err := os.Chown(filepath.Join(dir, file), owner, owner); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestKillWithoutCgroupKill(t *testing.T) {
	t.Parallel()
	dir := testCgroup(t, os.Getuid())
	text, tag := swarm(false)
	inCgroup(t, dir, exec.Command("/bin/sh", "-c", text+"sleep "+tag))
	untilSwarming(t, tag)
	g := &cgroup{dir: dir}
	until(t, "all are dead", func() bool { g.killEach(); return !g.populated() })
	wantNoneTagged(t, tag)
}

func TestOutOfMemory(t *testing.T) {
	t.Parallel()
	g := &cgroup{dir: t.TempDir()}
	for events, want := range map[string]bool{
		"":                                      false,
		"low 0\nmax 3\noom 0\noom_kill 0\n":     false,
		"oom 1\noom_kill 2\noom_group_kill 1\n": true,
	} {
		if err := os.WriteFile(g.dir+"/memory.events", []byte(events), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := g.outOfMemory(); got != want {
			t.Errorf("%q: %t", events, got)
		}
	}
	if (*cgroup)(nil).outOfMemory() {
		t.Error("without a cgroup")
	}
}

// A daemon whose cgroup must give controllers to its children moves to a leaf.
func TestEnableLimitsMovesTheDaemonToALeaf(t *testing.T) {
	var restore func()
	t.Cleanup(func() { // after dir is gone
		if restore != nil {
			restore()
		}
	})
	dir := testCgroup(t, os.Getuid())
	top := filepath.Dir(dir)
	if readLine(dir+"/cgroup.controllers") == "" {
		controllers := strings.Fields(readLine(top + "/cgroup.controllers"))
		if len(controllers) == 0 {
			t.Skip("this needs a cgroup v2 controller, and all belong to version 1 here")
		}
		if err := write(top+"/cgroup.subtree_control", "+"+controllers[0]); err != nil {
			t.Skipf("this needs a cgroup v2 controller: %v", err)
		}
		restore = func() {
			if err := write(top+"/cgroup.subtree_control", "-"+controllers[0]); err != nil {
				t.Error(err)
			}
		}
	}
	controller := strings.Fields(readLine(dir + "/cgroup.controllers"))[0]
	enable := func() *testenv.Output {
		var out testenv.Output
		d := exec.Command("/proc/self/exe")
		d.Env = append(os.Environ(), "GUARD_TEST_DAEMON=enable", "GUARD_TEST_ENABLE="+controller)
		d.Stdout, d.Stderr = &out, &out
		inCgroup(t, dir, d)
		until(t, "the daemon has said it", func() bool { return strings.Contains(out.String(), "done\n") })
		return &out
	}

	// In a container, which has a namespace of its own, all are moved.
	t.Run("in a container", func(t *testing.T) {
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		box := testCgroup(t, os.Getuid())
		var out testenv.Output
		d := exec.Command("unshare", "--cgroup", "--mount", "sh", "-c", `mount -t cgroup2 none "$1" && { sleep 1000 & "$0"; }`, self, t.TempDir())
		d.Env = append(os.Environ(), "GUARD_TEST_DAEMON=enable", "GUARD_TEST_ENABLE="+controller)
		d.Stdout, d.Stderr = &out, &out
		inCgroup(t, box, d)
		until(t, "the daemon has said it", func() bool { return strings.Contains(out.String(), "done\n") })
		if want := "error <nil>\n0::/" + daemonLeaf + "\ndone\n"; out.String() != want {
			t.Errorf("%q, want %q", out.String(), want)
		}
		if all := strings.Fields(readAll(box + "/" + daemonLeaf + "/cgroup.procs")); len(all) != 3 { // sh, sleep, the daemon
			t.Errorf("processes %q are in the leaf", all)
		}
		(&cgroup{dir: box}).killAll(time.Time{}) // sh and the others die with it
	})

	// So are the guards of commands that run already, as when a reload brings the first limit.
	t.Run("while a command runs", func(t *testing.T) {
		busy := testCgroup(t, os.Getuid())
		var out testenv.Output
		d := exec.Command("/proc/self/exe")
		d.Env = append(os.Environ(), "GUARD_TEST_DAEMON=enable", "GUARD_TEST_ENABLE="+controller, "GUARD_TEST_SCRIPT=exec sleep 1000")
		d.Stdout, d.Stderr = &out, &out
		inCgroup(t, busy, d)
		until(t, "the daemon has said it", func() bool { return strings.Contains(out.String(), "done\n") })
		if want := "error <nil>\n" + readOwn(t, filepath.Base(busy)) + "/" + daemonLeaf + "\ndone\n"; out.String() != want {
			t.Errorf("%q, want %q", out.String(), want)
		}
		if all := strings.Fields(readAll(busy + "/" + daemonLeaf + "/cgroup.procs")); len(all) != 2 { // the daemon and the guard
			t.Errorf("processes %q are in the leaf", all)
		}
		if all := (&cgroup{dir: busy + "/" + attemptsDir}).processes(); len(all) != 1 {
			t.Errorf("processes %v are in cgroups of attempts, and not the command alone", all)
		}
	})

	// Somebody else in its cgroup prevents that, and is named.
	other := exec.Command("/bin/sleep", "1000")
	inCgroup(t, dir, other)
	if said := enable().String(); !strings.Contains(said, fmt.Sprintf("holds [%q]; under systemd", itoa(other.Process.Pid))) {
		t.Errorf("%q", said)
	}
	_ = other.Process.Kill()
	_ = other.Wait()
	out := enable()
	want := "error <nil>\n" + readOwn(t, filepath.Base(dir)) + "/" + daemonLeaf + "\ndone\n"
	if out.String() != want {
		t.Errorf("%q, want %q", out.String(), want)
	}
	for _, d := range []string{dir, dir + "/" + attemptsDir} {
		if got := readLine(d + "/cgroup.subtree_control"); got != controller {
			t.Errorf("%s: %q is enabled", d, got)
		}
	}
}

func readOwn(t *testing.T, below string) string {
	for line := range strings.Lines(readAll("/proc/self/cgroup")) {
		if own, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			return "0::" + filepath.Join(own, below)
		}
	}
	t.Fatal("no cgroup of version 2")
	return ""
}

func TestLimitsAreNeverDropped(t *testing.T) {
	t.Parallel()
	limits := Limits{Memory: 64 << 20, PIDs: 20, CPU: 0.5}
	t.Run("without a cgroup", func(t *testing.T) {
		t.Parallel()
		s, _ := script(t, "exit 0", nil)
		s.NoCgroup, s.Limits = true, limits
		if _, err := Start(s); err == nil || !strings.Contains(err.Error(), "no cgroup") {
			t.Errorf("error %v", err)
		}
	})
	t.Run("without a controller", func(t *testing.T) {
		t.Parallel()
		needCgroups(t)
		h, _ := ourHierarchy()
		if enabled(h.attempts(), limits.controllers()) {
			t.Skip("the controllers are enabled here")
		}
		s, _ := script(t, "exit 0", nil)
		s.Limits = limits
		if _, err := Start(s); err == nil || !strings.Contains(err.Error(), "limit the memory of the command to 67108864") {
			t.Errorf("error %v", err)
		}
		for _, c := range limits.controllers() {
			if err := h.enable([]string{c}); strings.Contains(readLine(h.base+"/cgroup.controllers"), c) == (err != nil) {
				t.Errorf("%s: error %v", c, err)
			} else if err != nil && !strings.Contains(err.Error(), "set Delegate=yes") {
				t.Errorf("%v: it does not say what to do", err)
			}
		}
	})
}

func TestLimitsHold(t *testing.T) {
	needCgroups(t)
	if err := EnableLimits(Limits{Memory: 1, PIDs: 1, CPU: 1}); err != nil {
		t.Skipf("this needs the controllers memory, pids and cpu of cgroup v2: %v", err)
	}
	t.Run("memory", func(t *testing.T) {
		s, _ := script(t, `exec head -c 200000000 /dev/zero | tail -c 200000000 >/dev/null`, nil)
		s.Limits.Memory = 32 << 20
		if exit := mustWait(t, mustStart(t, s)); !exit.OutOfMemory || exit.Signal != syscall.SIGKILL {
			t.Errorf("%+v", exit)
		}
	})
	t.Run("processes", func(t *testing.T) {
		var out testenv.Output
		s, _ := script(t, `for i in 1 2 3 4 5 6 7 8; do sleep 1000 & done; echo all`, &out)
		s.Limits.PIDs = 4
		if exit := mustWait(t, mustStart(t, s)); exit.Code == 0 || strings.Contains(out.String(), "all") {
			t.Errorf("%+v, %q", exit, out.String())
		}
	})
	t.Run("processes, of a command that cannot be started", func(t *testing.T) {
		s, _ := script(t, strings.Repeat("x", 200000), nil)
		s.Limits.PIDs = 1
		if _, err := Start(s); err == nil || !strings.Contains(err.Error(), "argument list too long") {
			t.Errorf("error %.200v", err)
		}
	})
	t.Run("processor time", func(t *testing.T) {
		var out testenv.Output
		s, _ := script(t, `cat /sys/fs/cgroup$(sed -n s/^0:://p /proc/self/cgroup)/cpu.max`, &out)
		s.Limits.CPU = 0.25
		mustWait(t, mustStart(t, s))
		if out.String() != "25000 100000\n" {
			t.Errorf("%q", out.String())
		}
	})
	t.Run("processor time, where somebody has removed the empty cgroup of all attempts", func(t *testing.T) {
		h, err := ourHierarchy()
		if err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, time.Minute, "the cgroup is empty and removed", func() bool { return syscall.Rmdir(h.attempts()) == nil })
		var out testenv.Output
		s, _ := script(t, `cat /sys/fs/cgroup$(sed -n s/^0:://p /proc/self/cgroup)/cpu.max`, &out)
		s.Limits.CPU = 0.5
		mustWait(t, mustStart(t, s))
		if out.String() != "50000 100000\n" {
			t.Errorf("%q", out.String())
		}
	})
}

// enableAndSay is a daemon that enables a controller, while a command runs if it has a script.
func enableAndSay() {
	if script := os.Getenv("GUARD_TEST_SCRIPT"); script != "" {
		if _, err := Start(Spec{Path: "/bin/sh", Args: []string{"-c", script}, Deadline: boottime.Now().Add(time.Minute)}); err != nil {
			panic(err)
		}
	}
	h, err := ourHierarchy()
	if err == nil {
		err = h.enable([]string{os.Getenv("GUARD_TEST_ENABLE")})
	}
	fmt.Println("error", err)
	for line := range strings.Lines(readAll("/proc/self/cgroup")) {
		if strings.HasPrefix(line, "0::") {
			fmt.Print(line)
		}
	}
	fmt.Println("done")
	time.Sleep(time.Minute) // until it is killed
}
