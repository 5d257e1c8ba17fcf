package exec_test

import (
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"onejob/internal/guard"
	"onejob/internal/testenv/cgroups"
	execkind "onejob/tasks/kinds/exec"
)

func TestSize(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]execkind.Size{
		"0": 0, "65536": 65536, "64KiB": 65536, "512 MiB": 512 << 20, "2GiB": 2 << 30, "1TiB": 1 << 40,
	} {
		var s, again execkind.Size
		if err := s.UnmarshalText([]byte(text)); err != nil || s != want {
			t.Errorf("%s: %d, %v", text, s, err)
		}
		if err := again.UnmarshalText([]byte(s.String())); err != nil || again != s {
			t.Errorf("%s is written %s, which is %d, %v", text, s, again, err)
		}
	}
	for _, text := range []string{"", "MiB", "-1", "1.5GiB", "64M", "64 mib", "9999999TiB"} {
		var s execkind.Size
		if err := s.UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q is accepted as %d", text, s)
		}
	}
}

func TestUser(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("this needs root, to become another user")
	}
	for name, test := range map[string]struct {
		change func(*execkind.Command)
		want   string
	}{
		"user by name":      {func(c *execkind.Command) { c.User = "nobody" }, "65534 65534"},
		"user by number":    {func(c *execkind.Command) { c.User = "65534" }, "65534 65534"},
		"user and group":    {func(c *execkind.Command) { c.User, c.Group = "nobody", "daemon" }, "65534 1"},
		"numbers of nobody": {func(c *execkind.Command) { c.User, c.Group = "3999999", "4999999" }, "3999999 4999999"},
		"group alone":       {func(c *execkind.Command) { c.Group = "daemon" }, "0 1"},
		"neither":           {func(*execkind.Command) {}, "0 0"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := attempt()
			if _, err := run(t.Context(), script(`echo $(id -u) $(id -g)`, test.change), a); err != nil {
				t.Fatal(err)
			}
			if got := strings.TrimSpace(a.Output.String()); got != test.want {
				t.Errorf("it ran as %s, want %s", got, test.want)
			}
		})
	}
	t.Run("with the groups of the user alone", func(t *testing.T) {
		t.Parallel()
		want, err := exec.Command("id", "-G", "nobody").Output()
		if err != nil {
			t.Fatal(err)
		}
		a := attempt()
		if _, err := run(t.Context(), script("id -G", func(c *execkind.Command) { c.User = "nobody" }), a); err != nil {
			t.Fatal(err)
		}
		if a.Output.String() != string(want) {
			t.Errorf("groups %q, want %q", a.Output.String(), want)
		}
	})
}

// Who is not root learns before the start that user cannot be had.
func TestUserNeedsRoot(t *testing.T) {
	if os.Getenv("EXEC_TEST_NOT_ROOT") != "" {
		for user, want := range map[execkind.Name]string{"root": "only root can run a command as another user", "65534": ""} {
			e := script("", func(c *execkind.Command) { c.User = user })
			if _, err := execkind.New(e); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
				t.Errorf("user %s: error %v", user, err)
			}
		}
		return
	}
	if os.Geteuid() != 0 {
		t.Skip("this needs root, to become another user")
	}
	c := exec.Command("/proc/self/exe", "-test.run", "^TestUserNeedsRoot$")
	c.Env, c.Dir = append(os.Environ(), "EXEC_TEST_NOT_ROOT=1"), "/"
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if out, err := c.CombinedOutput(); err != nil || !strings.Contains(string(out), "PASS") {
		t.Errorf("%s%v", out, err)
	}
}

func TestNoNewPrivs(t *testing.T) {
	t.Parallel()
	a := attempt()
	if _, err := run(t.Context(), script("grep NoNewPrivs: /proc/self/status", func(c *execkind.Command) { c.NoNewPrivs = true }), a); err != nil {
		t.Fatal(err)
	}
	if a.Output.String() != "NoNewPrivs:\t1\n" {
		t.Errorf("%q", a.Output.String())
	}
}

func TestLimits(t *testing.T) {
	limited := script(`head -c 200000000 /dev/zero | tail -c 200000000 >/dev/null`, func(c *execkind.Command) { c.MemoryMax = 32 << 20 })
	if err := limited.EnableLimits(); err != nil {
		// Then a replica does not start, and a command that is run anyway
		// does not run without its limit.
		if !strings.Contains(err.Error(), `memory_max, pids_max or cpu_max of command "it": `) || !strings.Contains(err.Error(), "Delegate=yes") {
			t.Errorf("error %v", err)
		}
		a := attempt()
		if _, err := run(t.Context(), limited, a); err == nil || !strings.Contains(err.Error(), "limit the ") {
			t.Errorf("error %v", err)
		}
		t.Skipf("the rest needs the controller memory of cgroup v2: %v", err)
	}
	_, err := run(t.Context(), limited, attempt())
	if err == nil || !strings.Contains(err.Error(), "killed: out of memory (memory_max 32MiB)") {
		t.Errorf("error %v", err)
	}
}

func TestEnableNoLimits(t *testing.T) {
	t.Parallel()
	if err := script("exit 0").EnableLimits(); err != nil {
		t.Error(err)
	}
}

// Where cgroups can be had, every command is in one.
func TestUsesACgroup(t *testing.T) {
	t.Parallel()
	cgroups.Need(t, guard.CgroupError())
	a := attempt()
	if _, err := run(t.Context(), script("grep ^0:: /proc/self/cgroup"), a); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(a.Output.String(), "/onejob-attempts/") {
		t.Errorf("it was in %q", a.Output.String())
	}
}
