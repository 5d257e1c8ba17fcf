package consul

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/internal/testenv"
	"onejob/lock"
)

// holderEnv makes this test binary a replica that holds a lock until it is
// killed: it is set to the address of Consul and the prefix.
const holderEnv = "ONEJOB_TEST_HOLDER"

func holdUntilKilled() {
	addr, prefix, _ := strings.Cut(os.Getenv(holderEnv), " ")
	client := api.DefaultConfig()
	client.Address = addr
	l, err := New(Config{
		Client: client, Prefix: prefix, LockDelay: lockDelay,
		CheckTTL: 2 * time.Second, Heartbeat: 300 * time.Millisecond, Margin: 300 * time.Millisecond,
	})
	if err == nil {
		go l.Run(context.Background(), nil)
		if err = l.Ready(context.Background()); err == nil {
			_, err = try(l, "k")
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(l.Session())
	select {}
}

// TestHolderKilled kills a replica with -9: its session ends when the check's
// TTL is over, and its key is free after the lock-delay.
func TestHolderKilled(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	l := start(t, config(t, kv))

	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), holderEnv+"="+kv.Addr+" "+kv.Prefix)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	session, err := bufio.NewReader(out).ReadString('\n')
	session = strings.TrimSpace(session)
	if err != nil || holder(t, kv, "tasks/k") != session {
		t.Errorf("session %q does not hold the key (%v)", session, err)
	}
	testenv.Eventually(t, maxWait, "it is in sight", func() bool {
		l.membership.mu.Lock()
		defer l.membership.mu.Unlock()
		return l.membership.alive[session] != 0
	})
	killed := time.Now()
	held := killed // read before the last look that found the key
	_ = cmd.Process.Signal(syscall.SIGKILL)
	_ = cmd.Wait()

	testenv.Eventually(t, maxWait, "the key is gone", func() bool {
		now := time.Now()
		if holder(t, kv, "tasks/k") == "" {
			return true
		}
		held = now
		return false
	})
	gone := time.Since(killed)
	early, err := try(l, "k")
	if within := time.Since(held); !errors.Is(err, lock.ErrDelayed) && within < lockDelay {
		t.Errorf("acquire in the lock-delay, %v after the key was seen: got error %v, want %v", within, err, lock.ErrDelayed)
	}
	if err == nil {
		release(t, early)
	}
	testenv.Eventually(t, maxWait, "the session is dead", func() bool {
		dead, err := l.Dead(t.Context(), []string{session})
		return err == nil && len(dead) == 1
	})
	dead := time.Since(killed)
	testenv.Eventually(t, maxWait, "the key can be locked", func() bool {
		lease, err := try(l, "k")
		if err == nil {
			release(t, lease)
		}
		return err == nil
	})
	free := time.Since(killed)
	t.Logf("after kill -9: session gone %.2f s, dead %.2f s, key free %.2f s (check TTL 2 s, lock-delay %v)",
		gone.Seconds(), dead.Seconds(), free.Seconds(), lockDelay)
	if after := killed.Add(dead).Sub(held); after < lockDelay {
		t.Errorf("the session was called dead %v after its key was seen, before the lock-delay was over", after)
	}
}

// TestEndWithoutReply destroys the session of a replica that cannot hear of it. Until
// its own deadline it works on, so nobody may call it dead before, however short
// the lock-delay is.
func TestEndWithoutReply(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	cfg := config(t, kv)
	cfg.CheckTTL, cfg.LockDelay = 5*time.Second, 100*time.Millisecond
	observer := start(t, cfg)
	p := testenv.NewProxy(t, kv.Addr)
	through := cfg
	through.Client = api.DefaultConfig()
	through.Client.Address = p.Addr
	l := start(t, through)
	lease := acquire(t, l, "k")
	session := l.Session()
	testenv.Eventually(t, maxWait, "the replica is seen", func() bool {
		observer.membership.mu.Lock()
		defer observer.membership.mu.Unlock()
		return observer.membership.alive[session] != 0
	})

	p.Cut()
	if _, err := kv.Client.Session().Destroy(session, nil); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, maxWait, "the session is dead", func() bool {
		dead, err := observer.Dead(t.Context(), []string{session})
		return err == nil && len(dead) == 1
	})
	if left := lease.Deadline().Until(); left > 0 {
		t.Errorf("the session was called dead %v before the lease of its holder ended", left)
	}
	_ = lease.Release(t.Context())
}
