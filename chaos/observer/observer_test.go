package observer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"onejob/boottime"
)

const maxWaitOfTests = 2 * time.Minute

// serve starts an observer within this process. The func that it returns sends it
// home and returns what it has seen.
func serve(t *testing.T) (Where, func() Seen) {
	t.Helper()
	stdin, home := io.Pipe()
	told, stdout := io.Pipe()
	path := filepath.Join(t.TempDir(), "seen.json")
	done := make(chan error, 1)
	go func() { done <- Serve(stdin, stdout, "127.0.0.1", path) }()
	var w Where
	if err := json.NewDecoder(told).Decode(&w); err != nil {
		t.Fatal(err)
	}
	sent := false
	end := func() Seen {
		sent = true
		home.Close()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		seen, err := Load(path)
		if err != nil {
			t.Fatal(err)
		}
		return seen
	}
	t.Cleanup(func() {
		if !sent {
			end()
		}
	})
	return w, end
}

func enter(t *testing.T, w Where, c Claim) *Visit {
	t.Helper()
	v, err := Enter(t.Context(), w.Tasks, c)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// of returns the stay of a fence.
func of(t *testing.T, seen Seen, fence int64) Stay {
	t.Helper()
	i := slices.IndexFunc(seen.Stays, func(s Stay) bool { return s.Fence == fence })
	if i < 0 {
		t.Fatalf("nobody with fence %d among %+v", fence, seen.Stays)
	}
	return seen.Stays[i]
}

func TestObserverSeesHowTasksEnd(t *testing.T) {
	w, end := serve(t)
	a := enter(t, w, Claim{Task: 1, Fence: 1, Key: "a", Kind: "exec"})
	for range 5 { // where the machine stands still, one stay may end without a beat
		if err := a.Stay(t.Context(), 4*Interval); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.Leave(Succeeded); err != nil {
		t.Fatal(err)
	}
	b := enter(t, w, Claim{Task: 2, Fence: 2, Key: "b"})
	b.conn.Close() // as when a process dies
	c := enter(t, w, Claim{Task: 3, Fence: 3, Key: "a"})
	told, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.Stay(told, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("who is told to stop gets %v", err)
	}
	if err := c.Leave(Stopped); err != nil {
		t.Fatal(err)
	}
	enter(t, w, Claim{Task: 4, Fence: 4, Key: "d"})

	seen := end()
	for fence, how := range map[int64]string{1: Succeeded, 2: Gone, 3: Stopped, 4: Open} {
		s := of(t, seen, fence)
		if s.How != how || s.End < s.Begin {
			t.Errorf("fence %d: %+v, want %s", fence, s, how)
		}
	}
	first, third := of(t, seen, 1), of(t, seen, 3)
	if first.Beats == 0 || first.End.Sub(first.Begin) < 4*Interval {
		t.Errorf("the first stay is %+v", first)
	}
	if first.End > third.Begin {
		t.Errorf("the first left at %d, after the third had come at %d", first.End, third.Begin)
	}
}

// An outsider has no fence: it may come after any, and any fence may come after it.
func TestOutsidersComeAndGo(t *testing.T) {
	w, end := serve(t)
	for _, c := range []Claim{{Task: 1, Fence: 7, Key: "k"}, {Outsider: "o/1", Key: "k", Replica: "o"}, {Task: 2, Fence: 8, Key: "k"}, {Outsider: "o/2", Key: "k", Replica: "o"}} {
		if err := enter(t, w, c).Leave(Succeeded); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Enter(t.Context(), w.Tasks, Claim{Task: 1, Fence: 7, Key: "k"}); !errors.Is(err, ErrStale) {
		t.Errorf("the lower fence after an outsider gets %v", err)
	}
	seen := end()
	if len(seen.Stays) != 4 || seen.Stays[1].Outsider != "o/1" {
		t.Errorf("the stays are %+v", seen.Stays)
	}
}

// The last report of a lease counts, and nobody gets a deadline that was not reported.
func TestLeasesAreTold(t *testing.T) {
	w, end := serve(t)
	teller, err := Tell(t.Context(), w.Tasks, 7)
	if err != nil {
		t.Fatal(err)
	}
	at := boottime.Now().Add(time.Hour)
	deadline := teller.Deadline(func() boottime.Instant { return at })
	if deadline() != at {
		t.Error("another deadline is passed on")
	}
	at = at.Add(time.Hour)
	deadline()
	deadline() // nothing new
	later := MarkClient{URL: w.Target}
	for until := time.Now().Add(maxWaitOfTests); ; {
		leases, err := later.Leases()
		if err != nil {
			t.Fatal(err)
		}
		if d := leases[7].Deadline.Sub(leases[7].Told); d > 119*time.Minute {
			break
		}
		if time.Now().After(until) {
			t.Fatalf("the observer knows %+v", leases)
		}
		time.Sleep(time.Millisecond)
	}
	if err := teller.Close(); err != nil {
		t.Fatal(err)
	}
	at = 1
	if deadline() != at {
		t.Error("after the end another deadline is passed on")
	}
	l := end().Leases[7]
	if d := l.Over().Sub(l.Told); d < 119*time.Minute || d > 121*time.Minute {
		t.Errorf("the lease is over %v after that was said, want 2h", d)
	}
	if (Lease{Deadline: 5, Told: 9}).Over() != 9 {
		t.Error("a lease that was said to have ended before is over before")
	}
}

func TestObserverRefusesLowerFences(t *testing.T) {
	w, end := serve(t)
	v := enter(t, w, Claim{Task: 1, Fence: 7, Key: "k"})
	if _, err := Enter(t.Context(), w.Tasks, Claim{Task: 1, Fence: 6, Key: "k"}); !errors.Is(err, ErrStale) {
		t.Errorf("the lower fence gets %v", err)
	}
	other := enter(t, w, Claim{Task: 2, Fence: 6, Key: "other"})
	child := enter(t, w, Claim{Task: 1, Fence: 7, Key: "k", Part: "child"})
	for _, v := range []*Visit{v, other, child} {
		if err := v.Leave(Succeeded); err != nil {
			t.Error(err)
		}
	}
	seen := end()
	if len(seen.Stale) != 1 || seen.Stale[0].Fence != 6 || seen.Stale[0].Key != "k" {
		t.Errorf("stale are %+v", seen.Stale)
	}
	if len(seen.Stays) != 3 {
		t.Errorf("%d stays, want 3", len(seen.Stays))
	}
}

// Who has closed the connection is stamped before who begins after that, even if
// nobody has read the connection yet.
func TestStampsAreInTheOrderOfWhatHappened(t *testing.T) {
	l := newLedger()
	theirs, ours := connection(t)
	g, err := l.begin(Claim{Fence: 1, Key: "k"}, ours)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := theirs.Write([]byte("beats that nobody reads")); err != nil {
		t.Fatal(err)
	}
	_, second := connection(t)
	if _, err := l.begin(Claim{Fence: 2, Key: "k"}, second); err != nil {
		t.Fatal(err)
	}
	if !l.inside[g] {
		t.Fatal("who has not closed the connection is stamped")
	}
	theirs.Close()
	_, third := connection(t)
	if _, err := l.begin(Claim{Fence: 3, Key: "k"}, third); err != nil {
		t.Fatal(err)
	}
	l.end(g, Succeeded) // is read late, and does not count any more
	seen := l.close()
	first, last := of(t, seen, 1), of(t, seen, 3)
	if first.How != Gone || first.End > last.Begin {
		t.Errorf("the first: %+v, the last: %+v", first, last)
	}
}

func TestWhoIsGoneIsNotLetIn(t *testing.T) {
	l := newLedger()
	theirs, ours := connection(t)
	theirs.Close()
	if _, err := l.begin(Claim{Fence: 1, Key: "k"}, ours); !errors.Is(err, errGone) {
		t.Errorf("who is gone gets %v", err)
	}
	if seen := l.close(); len(seen.Stays)+len(seen.Stale) != 0 {
		t.Errorf("the ledger has %+v", seen)
	}
}

// connection returns both ends of one.
func connection(t *testing.T) (theirs, ours net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if theirs, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if ours, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { theirs.Close(); ours.Close() })
	return theirs, ours
}

// call is an http task's request.
func call(ctx context.Context, url string, task, attempt, fence int) (status int, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, err
	}
	for name, n := range map[string]int{"Onejob-Task-Id": task, "Onejob-Attempt": attempt, "Onejob-Fence": fence} {
		req.Header.Set(name, strconv.Itoa(n))
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode, err
}

func TestTarget(t *testing.T) {
	w, end := serve(t)
	quick := w.WorkURL("k", "narrow", 10*time.Millisecond, 1)
	for i, want := range []int{http.StatusServiceUnavailable, http.StatusOK} {
		if status, err := call(t.Context(), quick, 5, i+1, 10+i); status != want || err != nil {
			t.Errorf("attempt %d: %d, %v; want %d", i+1, status, err, want)
		}
	}
	if status, err := call(t.Context(), quick, 5, 1, 9); status != http.StatusConflict || err != nil {
		t.Errorf("a lower fence: %d, %v", status, err)
	}

	// A caller that gives up is gone.
	ctx, cancel := context.WithCancel(t.Context())
	gaveUp := make(chan error, 1)
	go func() {
		_, err := call(ctx, w.WorkURL("", "", time.Hour, 0), 6, 1, 20)
		gaveUp <- err
	}()
	markClient := MarkClient{URL: w.Target}
	inside := func(n int) {
		t.Helper()
		for deadline := time.Now().Add(maxWaitOfTests); ; time.Sleep(5 * time.Millisecond) {
			stays, err := markClient.Inside()
			if err != nil {
				t.Fatal(err)
			}
			if len(stays) == n {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("inside are %+v, want %d", stays, n)
			}
		}
	}
	inside(1)
	cancel()
	if err := <-gaveUp; !errors.Is(err, context.Canceled) {
		t.Errorf("who gave up got %v", err)
	}
	inside(0)

	seen := end()
	for fence, want := range map[int64]Stay{
		10: {How: Failed, Claim: Claim{Task: 5, Attempt: 1, Fence: 10, Key: "k", Limit: "narrow", Kind: "http"}},
		11: {How: Succeeded, Claim: Claim{Task: 5, Attempt: 2, Fence: 11, Key: "k", Limit: "narrow", Kind: "http"}},
		20: {How: Gone, Claim: Claim{Task: 6, Attempt: 1, Fence: 20, Key: "6", Kind: "http"}},
	} {
		if s := of(t, seen, fence); s.Claim != want.Claim || s.How != want.How {
			t.Errorf("fence %d: %+v, want %+v", fence, s, want)
		}
	}
	if len(seen.Stale) != 1 || seen.Stale[0].Fence != 9 {
		t.Errorf("stale are %+v", seen.Stale)
	}
}

func TestMarks(t *testing.T) {
	w, end := serve(t)
	markClient := MarkClient{URL: w.Target}
	before, err := markClient.Now()
	if err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		if err := markClient.Begin(Mark{ID: i + 1, Kind: "kill", Target: fmt.Sprint("r", i), Alone: i == 0, Keys: []string{fmt.Sprint("k", i)}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := markClient.End(Mark{ID: 2}); err != nil {
		t.Fatal(err)
	}
	seen := end()
	if len(seen.Marks) != 2 {
		t.Fatalf("marks are %+v", seen.Marks)
	}
	a, b := seen.Marks[0], seen.Marks[1]
	if a.Target != "r0" || !a.Alone || a.Begin < before || a.End != 0 || !slices.Equal(a.Keys, []string{"k0"}) {
		t.Errorf("the first mark is %+v", a)
	}
	if b.Target != "r1" || b.Alone || b.End < b.Begin || b.Begin < a.Begin {
		t.Errorf("the second mark is %+v", b)
	}
}
