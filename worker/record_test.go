package worker

import (
	"context"
	"encoding/json"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"

	"onejob/tasks"
)

// recordKept is a Postgres and a Consul that hold what the test puts there. Real ones
// would have to be led through a change of Consul and back within one session's absence.
type recordKept struct {
	mu      sync.Mutex
	session string
	report  tasks.ServerReport
	after   func() // is called when the server has been asked, before its answer arrives
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
