package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"onejob/internal/testenv"
	"onejob/lock/locktest"
)

// TestTicker is a command of TestLockHistory: it writes down for a while that it is
// there. With TICK_ON it goes on for longer than the lock may be kept after the death of its
// holder, and SIGTERM does not end it.
func TestTicker(t *testing.T) {
	name := os.Getenv("TICKS")
	if name == "" {
		return // it is not run as a command
	}
	f, err := os.OpenFile(name, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	on := os.Getenv("TICK_ON") != ""
	if on {
		signal.Ignore(syscall.SIGTERM)
	}
	for n := 0; n < 20 || on && n < 12_000; n++ {
		if _, err := fmt.Fprintln(f, time.Now().UnixNano()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// TestLockHistory: what many "onejob lock" do, of which one is killed while its command
// runs, could have been done one after the other. When each has got the lock and let go of
// it is seen from its command, and not asked.
func TestLockHistory(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name  string
		slots int
		args  []string
		env   func(t *testing.T) []string
	}{
		{"key", 1, []string{"door"}, consulEnv},
		{"slots", 2, []string{"-n", "2", "door"}, consulEnv},
		{"slots on RabbitMQ", 2, []string{"-n", "2", "door"}, func(t *testing.T) []string {
			return []string{"ONEJOB_LIMITS_BACKEND=rabbitmq", "ONEJOB_LIMITS_RABBITMQ_URL=" + testenv.RabbitMQ(t).URL}
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			self, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			dir := t.TempDir()
			bin := filepath.Join(dir, "onejob")
			install(t, bin)
			env := append(os.Environ(), test.env(t)...)
			h := &locktest.History{Slots: test.slots}
			full, killed := 0, 0
			var mu sync.Mutex
			// one runs a command under the lock, and ends "onejob lock" in the middle of
			// that if kill says so.
			one := func(id int, kill bool, flags ...string) {
				ticks := filepath.Join(dir, "ticks"+strconv.Itoa(id))
				args := append(append(append([]string{"lock"}, flags...), test.args...), "--", self, "-test.run=^TestTicker$")
				c := exec.Command(bin, args...)
				c.Env = append(slices.Clip(env), "TICKS="+ticks)
				if kill {
					c.Env = append(c.Env, "TICK_ON=1")
				}
				var out strings.Builder
				c.Stderr = &out
				call := time.Now().UnixNano()
				if err := c.Start(); err != nil {
					t.Error(err)
					return
				}
				if kill {
					for deadline := time.Now().Add(2 * patience); len(ticksIn(t, ticks)) == 0 && time.Now().Before(deadline); {
						time.Sleep(time.Millisecond)
					}
					_ = c.Process.Kill()
				}
				err := c.Wait() // until the command has closed its stderr, too
				end := time.Now().UnixNano()
				if kill {
					end = locktest.Never
				}
				seen := ticksIn(t, ticks)
				var exit *exec.ExitError
				mu.Lock()
				defer mu.Unlock()
				switch {
				case len(seen) > 0:
					h.Taken(1, call, seen[0])
					h.Released(1, seen[len(seen)-1], end)
					if kill {
						killed++
					} else if err != nil {
						t.Errorf("onejob %q: %v: %s", args, err, &out)
					}
				case errors.As(err, &exit) && exit.ExitCode() == 75: // not locked
					h.Full(1, call, end)
					full++
				default:
					t.Errorf("onejob %q: %v: %s", args, err, &out)
				}
			}
			var wg sync.WaitGroup
			var over atomic.Bool // what the killed one ran, beside which the others would be
			for i := range 4 {
				wg.Go(func() {
					for round := 0; round < 4 || i > 0 && !over.Load(); round++ {
						id := i*10_000 + round
						switch {
						case i == 0 && round == 1:
							one(id, true)
							over.Store(true)
						case i == 1:
							one(id, false, "--no-wait")
						default:
							one(id, false)
						}
					}
				})
			}
			wg.Wait()
			t.Logf("%d times not had, %d killed", full, killed)
			if killed != 1 {
				t.Errorf("%d were killed while their command ran", killed)
			}
			h.Check(t)
		})
	}
}

func consulEnv(t *testing.T) []string {
	kv := testenv.Consul(t)
	return []string{"CONSUL_HTTP_ADDR=" + kv.Addr, "ONEJOB_CONSUL_PREFIX=" + kv.Prefix}
}

// ticksIn returns the times that a command has written down.
func ticksIn(t *testing.T, name string) (at []int64) {
	text, err := os.ReadFile(name)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		t.Error(err)
	}
	for line := range strings.Lines(string(text)) {
		n, err := strconv.ParseInt(strings.TrimSuffix(line, "\n"), 10, 64)
		if err == nil && strings.HasSuffix(line, "\n") {
			at = append(at, n)
		}
	}
	return at
}
