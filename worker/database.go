package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"go.uber.org/zap"

	"onejob/lock"
	"onejob/tasks"
)

// Fences rise, whatever happens to Postgres (docs/decisions/fences.md). Its sequence
// alone cannot see to that: a standby that takes over may not have its last numbers, an
// old primary may live on, a backup has none of the numbers since it was made. So the
// locks' backend has a record of which server is the database, and from where to where
// its fences go. A fence is the sum of FencesFrom and the next number of the sequence; those
// of a record are above FencesAbove, which is FencesFrom and the sequence's last number when it
// was made.
//
//   - A claim is taken only by the server that the replica has found on record.
//   - Consul locks a task only while the record is the one under which it was claimed.
//   - No fence above FencesTo is used. A replica that has a higher one raises it first.
//   - When another server is put on record, FencesAbove becomes more than the old FencesTo.
//
// databaseRecord is the record, as JSON.
type databaseRecord struct {
	tasks.Server
	Sequence    string    `json:"sequence"` // see [tasks.ServerReport]; empty if an older version wrote the record
	FencesFrom  int64     `json:"fences_from"`
	FencesAbove int64     `json:"fences_above"` // zero if an older version wrote the record; see above
	FencesTo    int64     `json:"fences_to"`
	By          string    `json:"by"` // the replica that wrote it
	At          time.Time `json:"at"` // by that one's clock, for people

	last int64 // fence that the server has given out, when it was asked
}

// same reports whether the record is of the server and of the sequence in its database.
func (r databaseRecord) same(server tasks.ServerReport) bool {
	return r.Same(server.Server) && (r.Sequence == "" || r.Sequence == server.Sequence)
}

// above returns above which fence those of the record are.
func (r databaseRecord) above() int64 { return max(r.FencesFrom, r.FencesAbove) }

const (
	// fenceBlock is by how much FencesTo is raised: a write to Consul for so many claims.
	fenceBlock = 10_000_000

	// fencesApart is how far beyond what is known and the clock fences begin, at random. A
	// failover may lose what the database had noted of another Consul and its record. The next
	// record is chosen without it, and must not begin where the lost one did.
	fencesApart = 50_000_000

	// lastClock is the last fence that a clock asks for, in the year 2223. A clock that is set
	// beyond it by mistake leaves a tenth of the numbers that JSON keeps, 2^53, to later records.
	lastClock = 8_000_000_000_000_000

	lookAtRecord     = 5 * time.Second // how often, while all is well
	lookForSuccessor = time.Second
)

// DatabaseStore tells about the server that answers. *store.Store is one.
type DatabaseStore interface {
	Server(context.Context) (tasks.ServerReport, error)

	// Recorded notes in the database where its fences begin, unless more is noted there.
	Recorded(ctx context.Context, fencesFrom int64) error

	// Refuse makes connections fail that lead to a server with an older timeline than the
	// given one.
	Refuse(older tasks.Server)

	// Follow makes connections lead to a primary that has taken the place of the given
	// server, and reports whether there is one.
	Follow(context.Context, tasks.Server) bool
}

// DatabaseLocks keeps the record. A [lock.Locker] is one.
type DatabaseLocks interface {
	Session() string
	Database(ctx context.Context) (record []byte, version uint64, err error)
	SetDatabase(ctx context.Context, record []byte, version uint64) (uint64, error)
}

// errOtherDatabase says that the server that answers is not the cluster's database.
type errOtherDatabase struct {
	event     string
	adoptable bool // a person may say that it is
	why       string
}

func (e *errOtherDatabase) Error() string { return e.why }

// database is what this replica knows of the record.
type database struct {
	store   DatabaseStore
	locks   DatabaseLocks
	log     *zap.Logger
	replica string
	doubts  chan struct{}
	found   func() // is called when there is a server that is known to be the database, again or another one

	asking sync.Mutex // held by those who read and write the record

	mu      sync.Mutex
	trusted bool   // the server on record is the one that answers
	session string // during which it was found so
	record  databaseRecord
	version uint64
	highest int64  // fence that was claimed here from this server
	back    bool   // its fences went back
	told    string // the event of the refusal that was logged last; empty once a database is trusted
	why     error  // there is no server that is known to be the database
}

// put fills in what a claim under the session needs. It reports whether there is a server
// that may take it, and the highest fence that is known to have been claimed from it before.
//
// What was found during another session is not believed: while this replica had none, others
// may have worked with another Consul, and higher fences. If that was left since, the record
// here looks as it did before, and only Postgres knows.
func (d *database) put(c *tasks.Claim, session string) (highest int64, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	c.Server, c.FencesFrom = d.record.Started, d.record.FencesFrom
	return d.highest, d.trusted && d.session == session
}

// serves reports whether the server that was started then is the database.
func (d *database) serves(started time.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.trusted && d.record.Started.Equal(started)
}

// is reports whether there is a server that is known to be the database.
func (d *database) is() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.trusted
}

// rising reports whether the fences of a claim are above those that were known before it.
// If not, somebody has set back the sequence: no fence is used before they rise again.
func (d *database) rising(claimed []*tasks.Task, before int64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, t := range claimed {
		if t.Fence <= before {
			d.back = true
			d.doubtLocked()
			return false
		}
		d.highest = max(d.highest, t.Fence)
	}
	return true
}

// doubt makes run look again before anything more is claimed.
func (d *database) doubt() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.doubtLocked()
}

func (d *database) doubtLocked() {
	d.trusted = false
	notify(d.doubts)
}

// run looks at the record until ctx ends, and beside it for a successor of the server.
func (d *database) run(ctx context.Context, locks lock.Locker) {
	var beside sync.WaitGroup
	defer beside.Wait()
	beside.Go(func() { d.followSuccessor(ctx) })
	for ctx.Err() == nil {
		changed := locks.Changed()
		if locks.Session() != "" { // or else nobody knows whether this Consul is the cluster's own
			d.look(ctx)
		}
		wait := lookAtRecord
		if !d.is() {
			wait = time.Second
		}
		select {
		case <-d.doubts:
		case <-changed:
		case <-time.After(jitter(wait)):
		case <-ctx.Done():
		}
	}
}

// followSuccessor looks for a new primary while the old one answers: nothing else shows
// it as long as all replicas are connected to the old one. A host that does not answer
// takes its time, so this is no part of a look.
func (d *database) followSuccessor(ctx context.Context) {
	for {
		select {
		case <-time.After(jitter(lookForSuccessor)):
		case <-ctx.Done():
			return
		}
		d.mu.Lock()
		trusted, server := d.trusted, d.record.Server
		d.mu.Unlock()
		if trusted && d.store.Follow(ctx, server) {
			d.doubt()
		}
	}
}

// look reads the record and, if the server on it is not the one that is known, asks
// which one answers.
func (d *database) look(ctx context.Context) {
	d.asking.Lock()
	defer d.asking.Unlock()
	d.lookLocked(ctx)
}

// lookPast is look, unless another goroutine has found a later version of the record
// meanwhile.
func (d *database) lookPast(ctx context.Context, version uint64) {
	d.asking.Lock()
	defer d.asking.Unlock()
	d.mu.Lock()
	passed := d.version != version
	d.mu.Unlock()
	if !passed {
		d.lookLocked(ctx)
	}
}

func (d *database) lookLocked(ctx context.Context) {
	session := d.locks.Session()
	r, version, err := readRecord(ctx, d.locks)
	if err != nil {
		d.log.Debug("database_record_unread", zap.Error(err))
		return // nothing can be locked either
	}
	d.mu.Lock()
	mine, back, highest := d.record, d.back, d.highest // of before the question: claims go on beside it
	d.mu.Unlock()
	if version != 0 && r.FencesTo < mine.FencesTo && r.FencesFrom == mine.FencesFrom && r.Same(mine.Server) { // an old record is back
		r.FencesTo = mine.FencesTo
		if version, err = writeRecord(ctx, d.locks, r, version); err != nil {
			d.log.Debug("database_record_unwritten", zap.Error(err))
			return
		}
	}
	d.mu.Lock()
	known := d.trusted && d.session == session && version != 0 && d.record.Same(r.Server) && d.record.FencesFrom == r.FencesFrom
	if known {
		d.record, d.version = r, version
	}
	d.trusted = known
	d.mu.Unlock()
	if known {
		return
	}
	now, version, err := settleDatabase(ctx, d.store, d.locks, r, version, d.replica, back, false, 0)
	other := (*errOtherDatabase)(nil)
	switch {
	case errors.As(err, &other):
		d.mu.Lock()
		d.why = other
		d.mu.Unlock()
		if other.event == "postgres_stale" {
			d.store.Refuse(r.Server) // the DSN may name another server
		}
		d.logRefusal(other.event, r, now)
		return
	case errors.Is(err, lock.ErrChanged):
		notify(d.doubts) // another replica was first
		return
	case err != nil:
		d.log.Debug("database_lookup_failed", zap.Error(err)) // claim_failed reports a Postgres that is unavailable
		return
	}
	d.mu.Lock()
	if now.FencesFrom == mine.FencesFrom && now.last < highest {
		d.back = true
		d.mu.Unlock()
		notify(d.doubts)
		return
	}
	d.highest, d.back = max(d.highest, now.last), false
	d.trusted, d.session, d.record, d.version, d.why, d.told = true, session, now, version, nil, ""
	d.mu.Unlock()
	d.store.Refuse(now.Server)
	d.found()
	switch at := zap.Stringer("server", server(now.Server)); {
	case now.FencesFrom == r.FencesFrom && now.Same(r.Server): // others have put it on record
		d.log.Info("postgres_server", at)
	case now.Same(r.Server) && r.Sequence != "" && r.Sequence != now.Sequence:
		d.log.Warn("postgres_reloaded", at, zap.Int64("fences_from", now.above()))
	case r.System == "" || now.Same(r.Server) && !back:
		d.log.Info("postgres_recorded", at, zap.Int64("fences_from", now.above()))
	case back:
		d.log.Error("fences_went_back", at, zap.Int64("fences_from", now.above()))
	case now.Timeline == r.Timeline && now.System == r.System:
		d.log.Info("postgres_restarted", at, zap.Stringer("on_record", server(r.Server)), zap.Int64("fences_from", now.above()))
	default:
		d.log.Warn("postgres_failed_over", at, zap.Stringer("on_record", server(r.Server)), zap.Int64("fences_from", now.above()))
	}
}

// logRefusal logs what keeps this replica from working, once until it changes.
func (d *database) logRefusal(event string, before, now databaseRecord) {
	d.mu.Lock()
	news := d.told != event
	d.told = event
	d.mu.Unlock()
	if !news {
		return
	}
	switch at := zap.Stringer("server", server(now.Server)); event {
	case "postgres_stale":
		d.log.Error("postgres_stale", at, zap.Stringer("on_record", server(before.Server)))
	case "postgres_is_another":
		d.log.Error("postgres_is_another", at, zap.Stringer("on_record", server(before.Server)))
	case "postgres_standby":
		d.log.Error("postgres_standby", at)
	}
}

// server is a server in a log line.
type server tasks.Server

func (s server) String() string {
	return fmt.Sprintf("%s, started %s, system %s", tasks.Server(s), s.Started.UTC().Format(time.RFC3339Nano), s.System)
}

// cover returns the version of the record under which a task may be locked, after it has
// raised FencesTo if the task's fence is above it.
func (d *database) cover(ctx context.Context, t *tasks.Task) (version uint64, err error) {
	for range 3 {
		d.mu.Lock()
		// A fence from before the record began anew may have been given out twice.
		ours := d.trusted && d.record.Started.Equal(t.Server) && t.Fence > d.record.above()
		covered, version := t.Fence <= d.record.FencesTo, d.version
		d.mu.Unlock()
		switch {
		case !ours:
			return 0, tasks.ErrOtherServer
		case covered:
			return version, nil
		}
		if err := d.raise(ctx, t.Fence); err != nil {
			return 0, err
		}
	}
	return 0, lock.ErrChanged
}

// raise raises FencesTo above a fence.
func (d *database) raise(ctx context.Context, fence int64) error {
	d.asking.Lock()
	d.mu.Lock()
	r, version := d.record, d.version
	d.mu.Unlock()
	if r.FencesTo >= fence { // somebody has done it
		d.asking.Unlock()
		return nil
	}
	r.FencesTo, r.By, r.At = fence+fenceBlock, d.replica, time.Now().UTC()
	now, err := writeRecord(ctx, d.locks, r, version)
	if err == nil {
		d.mu.Lock()
		d.record, d.version = r, now
		d.mu.Unlock()
	}
	d.asking.Unlock()
	if errors.Is(err, lock.ErrChanged) {
		d.lookPast(ctx, version)
		return nil
	}
	return err
}

// unchanged reports whether the record is the one that this replica knows, and its
// server is the one that was started then. A caller that acts on something that is missing
// there, such as a heartbeat, must call this after it has noticed.
func (d *database) unchanged(ctx context.Context, started time.Time) bool {
	_, version, err := d.locks.Database(ctx)
	if err != nil {
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if version != d.version {
		notify(d.doubts)
	}
	return d.trusted && version == d.version && d.record.Started.Equal(started)
}

// Database returns the Postgres server that is the cluster's database, as far as this
// replica knows, or why it works with none. It is for people.
func (w *Worker) Database() (tasks.Server, error) {
	d := w.database
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.trusted:
		return d.record.Server, nil
	case d.why != nil:
		return tasks.Server{}, d.why
	}
	return tasks.Server{}, errors.New("it is not yet known which server is the database")
}

// CheckDatabase returns why replicas would not work with the server that answers, nil if
// they would. It changes nothing.
func CheckDatabase(ctx context.Context, store DatabaseStore, locks DatabaseLocks) error {
	r, version, err := readRecord(ctx, locks)
	if err != nil || version == 0 {
		return err
	}
	server, err := store.Server(ctx)
	if err != nil {
		return err
	}
	if why := r.refuses(server.Server); why != nil {
		return why
	}
	return nil
}

// MaxFloor is the highest fence above which AdoptDatabase lets others begin. Beyond it there
// would be none left that JSON keeps.
const MaxFloor = lastClock

// AdoptDatabase puts the server that answers on record, whatever was there before, and
// returns it. Its fences are above all that its predecessor on record may have given out, and
// above the given one, for those that nothing remembers. A zero asks for nothing.
//
// If the database does not note what was put on record, the error says that replicas follow the
// record regardless. Another call, or a replica, makes up for it.
func AdoptDatabase(ctx context.Context, store DatabaseStore, locks DatabaseLocks, by string, above int64) (tasks.Server, error) {
	if above < 0 || above > MaxFloor {
		return tasks.Server{}, fmt.Errorf("fences cannot begin above %d: it must be from 0 to %d", above, int64(MaxFloor))
	}
	for range 5 {
		r, version, err := readRecord(ctx, locks)
		if err != nil {
			return tasks.Server{}, err
		}
		now, recorded, err := settleDatabase(ctx, store, locks, r, version, by, false, true, above)
		switch {
		case errors.Is(err, lock.ErrChanged):
			continue
		case err != nil && recorded != 0:
			return now.Server, fmt.Errorf("the record in Consul names %s already, and replicas follow it, but that server has not noted where its fences begin; it is safe to repeat this: %w", now.Server, err)
		}
		return now.Server, err
	}
	return tasks.Server{}, lock.ErrChanged
}

// settleDatabase puts the server that answers on record, where r is not of that server
// and it may take its place. It returns the record as it is then. If the server may not
// take its place it returns an errOtherDatabase, and the record that it would have; with
// force it always may. If the server is on record and has not noted it, it returns an error
// beside the version; with every other error the version is zero.
func settleDatabase(ctx context.Context, store DatabaseStore, locks DatabaseLocks, r databaseRecord, version uint64, by string, back, force bool, above int64) (databaseRecord, uint64, error) {
	server, err := store.Server(ctx)
	now := databaseRecord{Server: server.Server, Sequence: server.Sequence, By: by, At: time.Now().UTC()}
	if err != nil {
		return now, 0, err
	}
	if version != 0 && r.same(server) && r.FencesFrom >= server.FencesFrom && !back && above == 0 {
		r.last = r.FencesFrom + server.LastFence
		if r.Sequence != server.Sequence {
			r.Sequence = server.Sequence
			if version, err = writeRecord(ctx, locks, r, version); err != nil {
				return r, 0, err
			}
		}
		return r, version, store.Recorded(ctx, r.FencesFrom)
	}
	if why := r.refuses(server.Server); why != nil && (!why.adoptable || version != 0 && !force) {
		return now, 0, why
	}
	if version != 0 || server.FencesFrom >= 0 || server.Timeline > 1 || above > 0 { // else all fences that were ever used are the sequence's own
		// The clock, in microseconds, moves ahead quicker than fences are used. It is all there is
		// where Consul and Postgres were both restored from backups.
		clock := min(server.Now.UnixMicro(), lastClock)
		givenOut := max(r.FencesFrom, server.FencesFrom) + server.LastFence
		begin := max(r.FencesTo, givenOut+fenceBlock, clock, above) + rand.Int64N(fencesApart)
		if version != 0 && !r.same(server) { // it may have forgotten a record, so it begins above that one too
			begin += 2 * fencesApart
		}
		now.FencesFrom = begin - server.LastFence // the sequence goes on, and is not added a second time
	}
	now.last = now.FencesFrom + server.LastFence
	now.FencesAbove, now.FencesTo = now.last, now.last+fenceBlock
	if version, err = writeRecord(ctx, locks, now, version); err != nil {
		return now, 0, err
	}
	return now, version, store.Recorded(ctx, now.FencesFrom)
}

// refuses returns why a server may not take the place of the one on record; nil if it may.
func (r databaseRecord) refuses(server tasks.Server) *errOtherDatabase {
	switch {
	case server.Standby:
		return &errOtherDatabase{"postgres_standby", false, fmt.Sprintf("the server at %s is a standby; add target_session_attrs=read-write to postgres.dsn", server.Address)}
	case r.System == tasks.UnknownSystem || server.System == tasks.UnknownSystem:
		return nil // nobody can tell
	case r.System != server.System:
		return &errOtherDatabase{"postgres_is_another", true, fmt.Sprintf("the server at %s (system %s) is not a copy of the database on record, %s (system %s); is this the right postgres.dsn, and the right consul.prefix? If the database has moved there: onejob adopt-postgres", server.Address, server.System, r.Server, r.System)}
	case server.Timeline < r.Timeline:
		return &errOtherDatabase{"postgres_stale", true, fmt.Sprintf("the server at %s has timeline %d, and the database on record is %s: this is an old primary, or a backup from before a failover; name all servers in postgres.dsn, or, if the database was restored from that backup: onejob adopt-postgres", server.Address, server.Timeline, r.Server)}
	}
	return nil
}

func readRecord(ctx context.Context, locks DatabaseLocks) (r databaseRecord, version uint64, err error) {
	text, version, err := locks.Database(ctx)
	if err != nil || version == 0 {
		return r, 0, err
	}
	if err := json.Unmarshal(text, &r); err != nil {
		return databaseRecord{}, version, nil // somebody wrote to it; no server is the one on record
	}
	return r, version, nil
}

func writeRecord(ctx context.Context, locks DatabaseLocks, r databaseRecord, version uint64) (uint64, error) {
	text, err := json.Marshal(r)
	if err != nil {
		return 0, fmt.Errorf("write the record of the database: %w", err)
	}
	return locks.SetDatabase(ctx, text, version)
}
