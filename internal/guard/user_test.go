//go:build linux

package guard

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"onejob/internal/testenv"
)

const nobody = 65534

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("this needs root, to become another user")
	}
}

func TestUser(t *testing.T) {
	t.Parallel()
	needRoot(t)
	var out testenv.Output
	s, _ := script(t, `id -u; id -g; id -G; echo again >/dev/stdout; cat /dev/stdin`, &out)
	s.User, s.Stdin = &Credential{UID: nobody, GID: 12345, Groups: []uint32{23456}}, []byte("in")
	mustWait(t, mustStart(t, s))
	if want := "65534\n12345\n12345 23456\nagain\nin"; out.String() != want {
		t.Errorf("%q, want %q", out.String(), want)
	}
}

func TestUserIsKilledWithAll(t *testing.T) {
	t.Parallel()
	needRoot(t)
	for _, mode := range modes {
		t.Run(mode.name, func(t *testing.T) {
			t.Parallel()
			text, tag := swarm(mode.noCgroup)
			s, _ := script(t, text+"sleep "+tag, nil)
			s.User, s.NoCgroup = &Credential{UID: nobody, GID: nobody}, mode.noCgroup
			p := mustStart(t, s)
			t.Cleanup(func() { killTagged(t, tag) })
			untilSwarming(t, tag)
			p.Stop()
			mustWait(t, p)
			wantNoneTagged(t, tag)
		})
	}
}

func TestNoNewPrivs(t *testing.T) {
	t.Parallel()
	for _, on := range []bool{false, true} {
		var out testenv.Output
		s, _ := script(t, `grep NoNewPrivs: /proc/self/status`, &out)
		s.NoNewPrivs = on
		mustWait(t, mustStart(t, s))
		if want := map[bool]string{false: "NoNewPrivs:\t0\n", true: "NoNewPrivs:\t1\n"}[on]; out.String() != want {
			t.Errorf("%t: %q", on, out.String())
		}
	}
}

// nosy looks at the daemon and the guard from inside.
const nosy = `read -r _ _ _ daemon _ </proc/$PPID/stat
for pid in $daemon $PPID; do
	cat /proc/$pid/environ >/dev/null 2>&1 && echo "environ of $pid can be read"
	ls /proc/$pid/fd/ >/dev/null 2>&1 && echo "files of $pid can be listed"
	head -c 1 /proc/$pid/mem >/dev/null 2>&1 && echo "memory of $pid can be opened"
done
(echo '{"Deadline":9000000000000000000}' >/proc/$PPID/fd/3) 2>/dev/null && echo "an order was forged"
{ tr '\0' '\n' </proc/$daemon/environ | grep SECRET; } 2>/dev/null
id -u
echo ready
sleep 1000`

// A command of the daemon's own user, which is not root, learns nothing of it.
func TestDaemonIsHiddenFromItsCommands(t *testing.T) {
	t.Parallel()
	needRoot(t)
	for name, exposed := range map[string]bool{"hidden": false, "the test would notice": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			env := []string{"SECRET_DSN=swordfish"}
			if exposed {
				env = append(env, "GUARD_TEST_EXPOSED=1")
			}
			_, _, out, _ := startDaemonAs(t, nobody, "", time.Minute, nosy, env)
			said := ""
			for line := range strings.Lines(out.String()) {
				if line != "ready\n" && !strings.HasPrefix(line, "guard ") {
					said += line
				}
			}
			if exposed {
				for _, want := range []string{"SECRET_DSN=swordfish", "files of"} {
					if !strings.Contains(said, want) {
						t.Errorf("%q does not contain %q", said, want)
					}
				}
			} else if said != "65534\n" {
				t.Errorf("%q", said)
			}
			if strings.Contains(said, "forged") {
				t.Error("an order was forged")
			}
		})
	}
}

// The socket is closed to root as well, who could open a pipe through /proc.
func TestOrdersCannotBeForged(t *testing.T) {
	t.Parallel()
	var out testenv.Output
	s, _ := script(t, `exec 2>&1; (echo '{"Kill":true}' >/proc/$PPID/fd/3) || echo refused; echo ready; sleep 1000`, &out)
	mustStart(t, s)
	untilReady(t, &out)
	if !strings.Contains(out.String(), "refused\n") {
		t.Errorf("%q", out.String())
	}
}

// A user to whom a cgroup was delegated needs no root.
func TestDelegatedCgroup(t *testing.T) {
	t.Parallel()
	needRoot(t)
	dir := testCgroup(t, nobody)
	text, tag := swarm(false)
	d, guard, _, _ := startDaemonAs(t, nobody, dir, time.Minute, text+"sleep "+tag, nil)
	t.Cleanup(func() { killTagged(t, tag) })
	untilSwarming(t, tag)
	if entries, _ := os.ReadDir(dir + "/" + attemptsDir); len(entries) == 0 {
		t.Fatal("it has not used its cgroup")
	}
	testenv.Freeze(t, d.Process.Pid)
	sendSignal(t, guard, syscall.SIGKILL)
	sendSignal(t, d.Process.Pid, syscall.SIGKILL)
	_ = d.Wait()
	until(t, "the guard is gone", func() bool { return gone(guard) })
	if len(tagged(t, tag)) == 0 {
		t.Error("nothing has survived")
	}
	var out testenv.Output
	next := exec.Command("/proc/self/exe")
	next.Env = append(os.Environ(), "GUARD_TEST_DAEMON=sweep")
	next.Stdout, next.Stderr = &out, &out
	next.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	inCgroup(t, dir, next)
	until(t, "it has swept", func() bool { return strings.Contains(out.String(), "done\n") })
	wantNoneTagged(t, tag)
	if !strings.Contains(out.String(), "sleep") || !strings.Contains(out.String(), "<nil>") {
		t.Errorf("%q", out.String())
	}
}

// sweepAndSay is a daemon that sweeps.
func sweepAndSay() {
	killed, err := Sweep()
	fmt.Println(killed, err)
	fmt.Println("done")
	time.Sleep(time.Minute) // until it is killed
}
