package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"

	"onejob/lock"
	"onejob/tasks"
)

// recordKept is a Postgres and a Consul that hold what the test puts there. Real ones
// would have to be led through a change of Consul and back within one session's absence.
type recordKept struct {
	mu      sync.Mutex
	session string
	report  tasks.ServerReport
	after   func() // is called when the server has been asked, before its answer arrives
	first   func() // is called before the next write to the record, which comes too late then
	record  []byte
	version uint64
}

func (k *recordKept) Session() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.session
}

func (k *recordKept) Database(context.Context) ([]byte, uint64, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.record, k.version, nil
}

func (k *recordKept) SetDatabase(_ context.Context, record []byte, version uint64) (uint64, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.first != nil {
		k.first()
		k.first = nil
		return 0, lock.ErrChanged
	}
	k.record, k.version = record, version+1
	return k.version, nil
}

func (k *recordKept) Server(context.Context) (tasks.ServerReport, error) {
	k.mu.Lock()
	report, after := k.report, k.after
	k.mu.Unlock()
	if after != nil {
		after()
	}
	return report, nil
}

func (k *recordKept) Recorded(_ context.Context, from int64) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.report.FencesFrom = max(k.report.FencesFrom, from)
	return nil
}

func (k *recordKept) Refuse(tasks.Server)                       {}
func (k *recordKept) Follow(context.Context, tasks.Server) bool { return false }

// lookedAt returns a database that was looked at in the session "first", and what claims are given of it.
func lookedAt(t *testing.T) (*database, *recordKept, tasks.Claim, int64) {
	t.Helper()
	server := tasks.Server{System: "1", Timeline: 1, Started: time.Unix(1_700_000_000, 0)}
	k := &recordKept{session: "first", report: tasks.ServerReport{Server: server, Now: time.Now(), LastFence: 10, FencesFrom: -1}}
	d := &database{store: k, locks: k, log: zap.NewNop(), replica: "r", doubts: make(chan struct{}, 1), found: func() {}}
	d.look(t.Context())
	var c tasks.Claim
	before, ok := d.put(&c, "first")
	if !ok {
		t.Fatal("the database is not known after it was looked at")
	}
	return d, k, c, before
}

// A record that looks as it did during an earlier session does not bring back the fences
// of that time: others may have worked with another Consul, and higher ones, meanwhile.
func TestRecordIsLookedAtForEachSession(t *testing.T) {
	d, k, c, _ := lookedAt(t)

	k.mu.Lock()
	k.session, k.report.FencesFrom, k.report.LastFence = "second", c.FencesFrom+1_000_000, 20 // and the record is as it was
	k.mu.Unlock()
	if _, ok := d.put(&c, "second"); ok {
		t.Error("a claim goes by what was found during an earlier session")
	}
	for range 3 { // it may be put on record anew in between
		d.look(t.Context())
	}
	noted := c.FencesFrom + 1_000_000
	if _, ok := d.put(&c, "second"); !ok || c.FencesFrom < noted {
		t.Errorf("known %v, fences from %d, want at least the %d that Postgres has noted", ok, c.FencesFrom, noted)
	}
	var r databaseRecord
	if err := json.Unmarshal(k.record, &r); err != nil || r.FencesFrom != c.FencesFrom {
		t.Errorf("on record are fences from %d (%v), the claim has %d", r.FencesFrom, err, c.FencesFrom)
	}
}

// A claim that is answered while the server is asked for its last fence has a higher one.
// Its fences have not gone back.
func TestClaimsBesideTheQuestion(t *testing.T) {
	d, k, c, before := lookedAt(t)
	k.mu.Lock()
	k.session = "second"
	k.after = func() {
		if !d.rising([]*tasks.Task{{Fence: before + 5}}, before) {
			t.Error("the claim's fences do not rise")
		}
	}
	k.mu.Unlock()
	d.look(t.Context())
	if highest, ok := d.put(&c, "second"); !ok || d.back || highest != before+5 {
		t.Errorf("known %v, gone back %v, the highest fence is %d, want %d", ok, d.back, highest, before+5)
	}

	k.mu.Lock()
	k.session, k.after, k.report.LastFence = "third", nil, 12 // the sequence was set back
	k.mu.Unlock()
	d.look(t.Context())
	if _, ok := d.put(&c, "third"); ok || !d.back {
		t.Errorf("fences that went back: known %v, gone back %v", ok, d.back)
	}
}

// consuls are several Consuls for one Postgres, which may fail over to a standby.
type consuls struct {
	t *testing.T
	recordKept
	records [4]consulRecord
	standby tasks.ServerReport // as it was replicated last
	used    map[int64]bool
	history []string
}

// consulRecord is what one of them has.
type consulRecord struct {
	text    []byte
	version uint64
}

func newConsuls(t *testing.T) *consuls {
	started := time.Unix(1_700_000_000, 0)
	c := &consuls{t: t, used: map[int64]bool{}}
	c.report = tasks.ServerReport{Server: tasks.Server{System: "1", Timeline: 1, Started: started}, Now: started, FencesFrom: -1}
	c.standby = c.report
	return c
}

// use lets replicas work with a Consul, and returns the fences that they use, in order.
func (c *consuls) use(at, claims int) (fences []int64) {
	c.t.Helper()
	c.history = append(c.history, fmt.Sprintf("Consul %d", at))
	c.record, c.version = c.records[at].text, c.records[at].version
	r, version, err := readRecord(c.t.Context(), c)
	if err == nil {
		r, _, err = settleDatabase(c.t.Context(), c, c, r, version, "r", false, false, 0)
	}
	if err != nil {
		c.t.Fatal(err)
	}
	c.records[at] = consulRecord{c.record, c.version}
	for range claims {
		c.report.LastFence++
		fence := r.FencesFrom + c.report.LastFence
		if c.used[fence] {
			c.t.Fatalf("fence %d was used before: %v", fence, c.history)
		}
		c.used[fence] = true
		fences = append(fences, fence)
	}
	return fences
}

func (c *consuls) replicate() {
	c.history = append(c.history, "replicated")
	c.standby = c.report
}

func (c *consuls) failOver() {
	c.history = append(c.history, "failover")
	c.standby.Now, c.standby.Timeline, c.standby.Started = c.report.Now, c.report.Timeline+1, c.report.Now.Add(time.Second)
	c.report = c.standby
}

func (c *consuls) restart() {
	c.history = append(c.history, "restart")
	c.report.Started = c.report.Now.Add(time.Microsecond)
	c.report.Now = c.report.Now.Add(2 * time.Second)
}

// Replicas change between Consuls, new ones and ones with a record of their own, as people
// give them wrong addresses, and Postgres fails over beside it to a standby that does not
// have what was noted last. No fence is given out a second time.
func TestFencesOfManyConsuls(t *testing.T) {
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 0))
		c, at := newConsuls(t), 0
		c.history = append(c.history, fmt.Sprintf("seed %d", seed))
		c.use(at, 1+r.IntN(5))
		for range 8 {
			c.report.Now = c.report.Now.Add(time.Duration(r.IntN(20)) * time.Second)
			switch r.IntN(4) {
			case 0, 1:
				at = r.IntN(len(c.records))
			case 2:
				c.replicate()
			case 3:
				c.failOver()
				at = r.IntN(len(c.records)) // the cluster's own by what the standby knows, or another
			}
			c.use(at, 1+r.IntN(5))
		}
	}
}

// A failover loses the change from one Consul to another. Fences that are given out with the
// first one are above those that were given out with the other.
func TestFencesAfterForgottenConsul(t *testing.T) {
	for _, away := range []string{"new", "with a record of its own"} {
		for _, pause := range []time.Duration{0, time.Minute, time.Hour} {
			c := newConsuls(t)
			if away != "new" {
				c.use(1, 1)
			}
			c.use(0, 1)
			c.replicate()
			c.report.Now = c.report.Now.Add(pause)
			other := c.use(1, 100)
			c.failOver()
			c.report.Now = c.report.Now.Add(pause)
			if own := c.use(0, 1); own[0] <= other[99] {
				t.Errorf("a Consul %s, pause %v: fence %d comes after %d", away, pause, own[0], other[99])
			}
		}
	}
}

// Consul and Postgres are both lost and restored from backups, after the server was restarted a
// few times. Only the clock knows of the fences since the backups, and is above them when each
// restart was 160 s ago: it moves ahead by a fence in each microsecond, and a restart by up to
// 160 million, however many numbers the sequence has given out.
func TestFencesAfterBothAreRestored(t *testing.T) {
	for restarts := range 5 {
		for i, consul := range []string{"restored", "empty", "restored", "empty"} {
			c := newConsuls(t)
			c.report.LastFence = int64(i/2) * 5_000_000_000
			c.use(0, 1)
			c.restart()
			c.use(0, 1)
			backup, record := c.report, c.records[0]
			if consul == "empty" {
				record = consulRecord{}
			}
			c.report.Now = c.report.Now.Add(10 * time.Hour)
			last := c.use(0, 100)
			for range restarts {
				c.restart()
				last = c.use(0, 100)
			}
			backup.Now = c.report.Now.Add(time.Duration(restarts)*160*time.Second + time.Second)
			c.report, c.records[0] = backup, record
			c.restart()
			if first := c.use(0, 1); first[0] <= last[99] {
				t.Errorf("%d restarts, Consul is %s: fence %d comes after %d", restarts, consul, first[0], last[99])
			}
		}
	}
}

// A person knows of a fence that no store and no clock remembers.
func TestAdoptDatabaseAboveAFence(t *testing.T) {
	const seen = 5_000_000_000_000_000
	c := newConsuls(t)
	c.use(0, 1)
	c.record, c.version = c.records[0].text, c.records[0].version
	if _, err := AdoptDatabase(t.Context(), c, c, "a person", MaxFloor+1); err == nil {
		t.Error("fences may begin where JSON has no numbers left")
	}
	if _, err := AdoptDatabase(t.Context(), c, c, "a person", seen); err != nil {
		t.Fatal(err)
	}
	c.records[0] = consulRecord{c.record, c.version}
	if fence := c.use(0, 1)[0]; fence <= seen {
		t.Errorf("the next fence is %d, and %d was seen", fence, int64(seen))
	}
}

// noteless is a Postgres that fails to note where its fences begin.
type noteless struct {
	*recordKept
	err error
}

func (f noteless) Recorded(context.Context, int64) error { return f.err }

// A server that is put on record, and fails then, is the database. A person who reads only the
// error would believe that nothing has changed.
func TestAdoptDatabaseThatNotesNothing(t *testing.T) {
	_, k, _, _ := lookedAt(t)
	k.mu.Lock()
	k.report.System, k.report.Standby = "2", true
	k.mu.Unlock()
	broken := errors.New("the connection broke")
	const already = "the record in Consul names"
	if _, err := AdoptDatabase(t.Context(), noteless{k, broken}, k, "a person", 0); err == nil || strings.Contains(err.Error(), already) {
		t.Errorf("a server that is not put on record: %v", err)
	}

	k.mu.Lock()
	k.report.Standby = false
	k.mu.Unlock()
	_, err := AdoptDatabase(t.Context(), noteless{k, broken}, k, "a person", 0)
	if !errors.Is(err, broken) || !strings.Contains(err.Error(), already) || !strings.Contains(err.Error(), "repeat") {
		t.Errorf("a server that is on record and has not noted it: %v", err)
	}
	var r databaseRecord
	if err := json.Unmarshal(k.record, &r); err != nil || r.System != "2" {
		t.Fatalf("on record is %s, %v", k.record, err)
	}

	if _, err := AdoptDatabase(t.Context(), k, k, "a person", 0); err != nil {
		t.Fatal(err)
	}
	if k.report.FencesFrom != r.FencesFrom {
		t.Errorf("after another call fences from %d are noted, want %d", k.report.FencesFrom, r.FencesFrom)
	}
}

// A clock that is wrong by centuries leaves fences that JSON keeps.
func TestFencesOfAClockFarAhead(t *testing.T) {
	const largest = 1 << 53 // of the whole numbers that JSON's readers keep; RFC 8259, section 6
	c := newConsuls(t)
	c.use(0, 1)
	c.report.Now = time.Date(9000, 1, 1, 0, 0, 0, 0, time.UTC)
	var last int64
	for range 1000 {
		c.restart()
		fence := c.use(0, 1)[0]
		if fence <= last || fence > largest-1e14 {
			t.Fatalf("fence %d comes after %d", fence, last)
		}
		last = fence
	}
}

// Fences run out every ten million. The record is raised before one above its end is used:
// by the replica that has it, or by another one just before.
func TestFencesToIsRaised(t *testing.T) {
	d, k, c, _ := lookedAt(t)
	end := d.record.FencesTo
	task := &tasks.Task{Server: c.Server, Fence: end}
	before, err := d.cover(t.Context(), task)
	if err != nil || before != k.version || d.record.FencesTo != end {
		t.Fatalf("the last fence below the end: version %d of %d, the end is %d, %v", before, k.version, d.record.FencesTo, err)
	}

	task.Fence++
	version, err := d.cover(t.Context(), task)
	var r databaseRecord
	if err := errors.Join(err, json.Unmarshal(k.record, &r)); err != nil {
		t.Fatal(err)
	}
	if version == before || version != k.version || r.FencesTo != task.Fence+fenceBlock {
		t.Errorf("the first fence above the end: version %d after %d, on record %d, and fences to %d", version, before, k.version, r.FencesTo)
	}

	// Another replica is first. What is found on record then is enough.
	task.Fence = r.FencesTo + 1
	r.FencesTo += 2 * fenceBlock
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	k.first = func() { k.record, k.version = text, k.version+1 }
	version, err = d.cover(t.Context(), task)
	if err != nil || version != k.version || d.record.FencesTo != r.FencesTo {
		t.Errorf("another replica was first: version %d of %d, fences to %d, want %d, %v", version, k.version, d.record.FencesTo, r.FencesTo, err)
	}
}
