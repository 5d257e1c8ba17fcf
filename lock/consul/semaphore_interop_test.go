package consul

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/internal/testenv"
	"onejob/lock"
)

// binary is the Consul server's, which is also the command line.
func binary(t *testing.T) string {
	t.Helper()
	cmd := exec.Command("../../scripts/consul.sh")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("find consul: %v", err)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	return lines[len(lines)-1]
}

// script is a "consul lock" whose command says when it begins, and ends with its
// standard input.
type script struct {
	cmd    *exec.Cmd
	stdin  io.Closer
	stdout *bufio.Reader
	stderr strings.Builder
}

func consulLock(t *testing.T, kv *testenv.KV, limit, name string) *script {
	t.Helper()
	s := &script{cmd: exec.Command(binary(t), "lock", "-http-addr="+kv.Addr, "-n="+limit, "-pass-stdin", "-shell=false",
		kv.Prefix+"/limits/"+name, "sh", "-c", "echo inside; cat")}
	s.cmd.Stderr = &s.stderr
	stdin, err := s.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := s.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	s.stdin, s.stdout = stdin, bufio.NewReader(stdout)
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.cmd.Process.Kill(); _ = s.cmd.Wait() })
	return s
}

// inside waits until the script's command runs.
func (s *script) inside(t *testing.T) {
	t.Helper()
	if line, err := s.stdout.ReadString('\n'); line != "inside\n" {
		t.Fatalf("consul lock said %q, %v; %s", line, err, s.stderr.String())
	}
}

// end lets the script end.
func (s *script) end(t *testing.T) {
	t.Helper()
	s.stdin.Close()
	if err := s.cmd.Wait(); err != nil {
		t.Errorf("consul lock: %v; %s", err, s.stderr.String())
	}
}

// takeOne takes a slot, again if Consul has not answered in time. The slot may be there then for a while.
func takeOne(t testing.TB, l *Locker, name string) lock.Lease {
	t.Helper()
	var leases []lock.Lease
	late := false
	testenv.Eventually(t, maxWait, "Consul answers", func() bool {
		var err error
		leases, err = l.Semaphores().Take(t.Context(), name, 1, []byte("ours"))
		if late = late || Unavailable(err); err != nil && !late {
			t.Fatalf("take one of %s: %v", name, err)
		}
		return err == nil
	})
	return leases[0]
}

// awaitOne takes a slot as soon as there may be one.
func awaitOne(t testing.TB, l *Locker, name string) lock.Lease {
	t.Helper()
	if err := l.Semaphores().Await(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	return takeOne(t, l, name)
}

func notOne(t testing.TB, l *Locker, name string, want error) {
	t.Helper()
	var leases []lock.Lease
	err := persist(func() (err error) {
		leases, err = l.Semaphores().Take(t.Context(), name, 1, nil)
		return err
	})
	for _, lease := range leases {
		release(t, lease)
	}
	if !errors.Is(err, want) {
		t.Fatalf("take one of %s: got error %v, want %v", name, err, want)
	}
}

func look(t testing.TB, l *Locker, name string) lock.Semaphore {
	t.Helper()
	var sem lock.Semaphore
	err := persist(func() (err error) {
		sem, err = l.Semaphores().Inspect(t.Context(), name)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return sem
}

// createLimit creates a limit, which may be there if Consul has not answered in time.
func createLimit(t testing.TB, l *Locker, name string, slots int) {
	t.Helper()
	late := false
	err := persist(func() error {
		err := l.Semaphores().Create(t.Context(), name, slots)
		if late && errors.Is(err, lock.ErrExists) {
			err = nil
		}
		late = true
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestConsulLock shares slots with scripts under the real "consul lock".
func TestConsulLock(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	l := start(t, config(t, kv))
	s := l.Semaphores()
	if err := s.Create(t.Context(), "k", 2); err != nil {
		t.Fatal(err)
	}

	first := consulLock(t, kv, "2", "k")
	first.inside(t)
	lease := takeOne(t, l, "k")
	notOne(t, l, "k", lock.ErrFull)
	if sem := look(t, l, "k"); len(sem.Holders) != 2 || sem.Waiting != 0 {
		t.Errorf("with a script and a task inside: %+v", sem)
	}

	second := consulLock(t, kv, "2", "k")
	testenv.Eventually(t, maxWait, "another script waits", func() bool { return look(t, l, "k").Waiting == 1 })
	release(t, lease)
	second.inside(t) // our release let it in
	notOne(t, l, "k", lock.ErrFull)

	awaited := make(chan error, 1)
	go func() { awaited <- s.Await(t.Context(), "k") }()
	first.end(t)
	if err := <-awaited; err != nil { // its release wakes us
		t.Errorf("await: %v", err)
	}
	lease = takeOne(t, l, "k")

	// Another limit is a conflict; a live change of ours is too, for those to come.
	conflict := func(limit, want string) {
		t.Helper()
		other := consulLock(t, kv, limit, "k")
		_, _ = io.Copy(io.Discard, other.stdout)
		if err := other.cmd.Wait(); err == nil || !strings.Contains(other.stderr.String(), want) {
			t.Errorf("consul lock -n %s: %v, %s; want it to say %q", limit, err, other.stderr.String(), want)
		}
	}
	conflict("5", "semaphore limit conflict (lock: 2, local: 5)")
	if err := s.Resize(t.Context(), "k", 3); err != nil {
		t.Fatal(err)
	}
	conflict("2", "semaphore limit conflict (lock: 3, local: 2)")
	third := consulLock(t, kv, "3", "k")
	third.inside(t)

	// The last to leave deletes the .lock. Ours is made anew from the record.
	release(t, lease)
	second.end(t)
	third.end(t)
	if pair := get(t, kv, "limits/k/.lock"); pair != nil {
		t.Errorf("consul lock left %s", pair.Value)
	}
	if sem := look(t, l, "k"); sem.Slots != 3 || len(sem.Holders) != 0 {
		t.Errorf("after consul lock deleted the .lock: %+v", sem)
	}
	// It might have been deleted under holders, so this takes a moment.
	lease = awaitOne(t, l, "k")
	conflict("5", "semaphore limit conflict (lock: 3, local: 5)")
	release(t, lease)
}

// TestTheirSemaphore shares slots of a semaphore that "consul lock" made.
func TestTheirSemaphore(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	l := start(t, config(t, kv))
	theirs := consulLock(t, kv, "2", "k")
	theirs.inside(t)
	lease := takeOne(t, l, "k")
	notOne(t, l, "k", lock.ErrFull)
	if sem := look(t, l, "k"); sem.Slots != 2 || len(sem.Holders) != 2 {
		t.Errorf("with a script and a task inside: %+v", sem)
	}
	if err := l.Semaphores().Create(t.Context(), "k", 2); !errors.Is(err, lock.ErrExists) {
		t.Errorf("create: got error %v, want %v", err, lock.ErrExists)
	}
	release(t, lease)
	theirs.end(t)
	notOne(t, l, "k", lock.ErrNoSemaphore) // it went with the last of them

	theirs = consulLock(t, kv, "2", "k")
	theirs.inside(t)
	if err := l.Semaphores().Resize(t.Context(), "k", 1); err != nil { // which makes it ours
		t.Fatal(err)
	}
	notOne(t, l, "k", lock.ErrFull)
	theirs.end(t)
	release(t, awaitOne(t, l, "k"))
}

// TestConsulMutex finds a mutex where the semaphore should be: without -n, the
// same command takes the same key for that.
func TestConsulMutex(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	l := start(t, config(t, kv))
	theirs := consulLock(t, kv, "1", "k")
	theirs.inside(t)
	notOne(t, l, "k", lock.ErrForeign)
	if err := l.Semaphores().Create(t.Context(), "k", 2); !errors.Is(err, lock.ErrForeign) {
		t.Errorf("create: got error %v, want %v", err, lock.ErrForeign)
	}
	theirs.end(t)
}

// TestAPISemaphore shares slots with a program that uses HashiCorp's library.
func TestAPISemaphore(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	l := start(t, config(t, kv))
	s := l.Semaphores()
	if err := s.Create(t.Context(), "k", 2); err != nil {
		t.Fatal(err)
	}
	theirs := func(limit int) (*api.Semaphore, <-chan struct{}, error) {
		sem, err := kv.Client.SemaphoreOpts(&api.SemaphoreOptions{
			Prefix: kv.Prefix + "/limits/k", Limit: limit, Value: []byte("theirs"), SessionTTL: "10s",
			SemaphoreTryOnce: true, SemaphoreWaitTime: 200 * time.Millisecond,
		})
		if err != nil {
			t.Fatal(err)
		}
		lost, err := sem.Acquire(nil)
		return sem, lost, err
	}

	one := takeOne(t, l, "k")
	sem, lost, err := theirs(2)
	if err != nil || lost == nil {
		t.Fatalf("their acquire: %v", err)
	}
	notOne(t, l, "k", lock.ErrFull)
	if _, lost, err := theirs(2); err != nil || lost != nil {
		t.Errorf("they entered a full semaphore (%v)", err)
	}
	var values []string
	for _, h := range look(t, l, "k").Holders {
		values = append(values, string(h.Value))
	}
	slices.Sort(values)
	if want := []string{"ours", "theirs"}; !slices.Equal(values, want) {
		t.Errorf("holders: got %q, want %q", values, want)
	}
	if _, _, err := theirs(3); err == nil || !strings.Contains(err.Error(), "semaphore limit conflict (lock: 2, local: 3)") {
		t.Errorf("their acquire with another limit: got error %v", err)
	}

	// Our comings and goings do not disturb them.
	release(t, one)
	release(t, takeOne(t, l, "k"))
	if err := s.Resize(t.Context(), "k", 1); err != nil {
		t.Fatal(err)
	}
	select {
	case <-lost:
		t.Error("their slot was lost")
	case <-time.After(100 * time.Millisecond):
	}
	notOne(t, l, "k", lock.ErrFull)
	awaited := make(chan error, 1)
	go func() { awaited <- s.Await(t.Context(), "k") }()
	if err := sem.Release(); err != nil {
		t.Errorf("their release: %v", err)
	}
	if err := <-awaited; err != nil {
		t.Errorf("await: %v", err)
	}
	one = takeOne(t, l, "k")

	// Theirs who dies is waited for.
	if err := s.Resize(t.Context(), "k", 2); err != nil {
		t.Fatal(err)
	}
	sem, lost, err = theirs(2)
	if err != nil || lost == nil {
		t.Fatalf("their acquire: %v", err)
	}
	holders := look(t, l, "k").Holders
	began := time.Now()
	for _, h := range holders {
		if string(h.Value) == "theirs" {
			destroySession(t, kv, h.Session)
		}
	}
	<-lost
	notOne(t, l, "k", lock.ErrDelayed)
	if err := s.Await(t.Context(), "k"); err != nil {
		t.Errorf("await: %v", err)
	}
	two := takeOne(t, l, "k")
	took := time.Since(began)
	t.Logf("a dead holder's slot was granted after %v", took.Round(time.Millisecond))
	if took < lockDelay {
		t.Errorf("that is before the lock-delay of %v was over", lockDelay)
	}
	_ = sem.Release()
	release(t, one)
	release(t, two)
}

// TestGuide shares slots with a program that follows the guide to the letter,
// with plain requests and a list of holders.
func TestGuide(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	l := start(t, config(t, kv))
	folder := kv.Prefix + "/limits/k/"
	session, _, err := kv.Client.Session().Create(&api.SessionEntry{Name: "db-semaphore"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { destroySession(t, kv, session) })
	if ok, _, err := kv.Client.KV().Acquire(&api.KVPair{Key: folder + session, Session: session}, nil); !ok || err != nil {
		t.Fatalf("contender entry: %v, %v", ok, err)
	}
	type guide struct {
		Limit   int
		Holders []string
	}
	write := func(g guide, index uint64) bool {
		t.Helper()
		b, err := json.Marshal(g)
		if err != nil {
			t.Fatal(err)
		}
		ok, _, err := kv.Client.KV().CAS(&api.KVPair{Key: folder + ".lock", Value: b, ModifyIndex: index}, nil)
		if err != nil {
			t.Fatal(err)
		}
		return ok
	}
	read := func() (g guide, index uint64) {
		t.Helper()
		pair := get(t, kv, "limits/k/.lock")
		if err := json.Unmarshal(pair.Value, &g); err != nil {
			t.Fatalf("the guide's program cannot read %s: %v", pair.Value, err)
		}
		return g, pair.ModifyIndex
	}
	if !write(guide{2, []string{session}}, 0) {
		t.Fatal("the .lock was there")
	}

	lease := takeOne(t, l, "k")
	notOne(t, l, "k", lock.ErrFull)
	g, index := read()
	if len(g.Holders) != 2 || g.Limit != 2 || !slices.Contains(g.Holders, session) {
		t.Errorf("the .lock is %+v", g)
	}
	g.Holders = slices.DeleteFunc(g.Holders, func(h string) bool { return h == session })
	if !write(g, index) {
		t.Fatal("the guide's program lost a race against nobody")
	}
	other := takeOne(t, l, "k")
	release(t, lease)
	release(t, other)
	if g, _ := read(); len(g.Holders) != 0 {
		t.Errorf("at the end the .lock is %+v", g)
	}
}
