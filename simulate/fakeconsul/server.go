// Package fakeconsul is a Consul server in memory: as much of one as lock/consul talks to.
//
// It answers the HTTP API for sessions, the key-value store, transactions, blocking queries
// and the TTL checks of agents, with Consul's own status codes and texts. What it promises is
// what lock/consul relies on. conformance_test.go compares it with a real server, but for the
// last two points: a snapshot would be restored for all tests, and one server has no other leader.
//
//   - a session with a TTL ends no sooner than the TTL after the last renewal, and no later
//     than twice that; the configuration chooses the moment;
//   - a session that ends takes its keys along, or releases them, and their names then have
//     a lock-delay, which is enforced before a write is put in the log and not when it is
//     applied, as in Consul: a lock may slip past it;
//   - a transaction is applied whole or not at all, and names all operations that failed;
//   - a snapshot that is restored forgets lock-delays, wakes blocking queries, and brings
//     back sessions and keys;
//   - a read that does not ask for consistency may be answered from the past.
//
// All of it uses package time alone, so it runs in a bubble of testing/synctest. It starts
// no goroutines. It is neither fast nor complete, and has nothing to do with real clusters.
package fakeconsul

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
)

// Config says how a server behaves where a real one has a choice. The zero value is a
// server that does everything at once and ends sessions after twice their TTL.
type Config struct {
	// Expiry returns how long after its last renewal a session ends, given its TTL. It is
	// between the TTL and twice as long; nil means twice.
	Expiry func(ttl time.Duration) time.Duration

	// Commit returns how long a write is in the log before it is applied; nil means not at
	// all. Writes are applied in the order in which they came.
	Commit func() time.Duration

	// Sync returns how long an agent takes to tell the servers of a change; nil means no time.
	Sync func() time.Duration

	// NewID returns the ID of a new session; nil means a random UUID.
	NewID func() string

	// Stale reports whether a read that does not ask for consistency is answered as a leader
	// does that is none any more: from what was there at another such read, up to 2.5 s ago. Nil
	// means never.
	Stale func() bool

	// MinTTL is the shortest TTL of a session; zero means 10 s, as in Consul.
	MinTTL time.Duration

	// Hold is for how long a request waits for a leader; zero means 7 s.
	Hold time.Duration

	// Ended, if not nil, is called when a session ends, and says why. It must not call
	// the server.
	Ended func(session string, why End)
}

// End is why a session ended.
type End string

// The ends of a session.
const (
	Expired   End = "its TTL passed"
	Critical  End = "its check failed"
	Gone      End = "its check was deregistered"
	Destroyed End = "it was destroyed"
	Forgotten End = "a snapshot without it was restored"
)

// Server is a cluster of servers that agree about everything.
type Server struct {
	config Config

	mu      sync.Mutex
	state   state
	agents  []*Agent
	leader  bool
	waiting []*held   // for a leader
	blocked []*query  // for a change
	changed []string  // keys, by the write that is being applied
	applied time.Time // when the last write in the log will have been
	delays  map[string]time.Time
	timers  map[string]*time.Timer // of the sessions' TTLs
	saved   map[string]state       // snapshots
	past    *past                  // as of a read that did not ask for consistency
}

// past is what was there at a moment.
type past struct {
	at    time.Time
	state state
}

// state is what a snapshot has in it.
type state struct {
	index    uint64
	keys     []string // of kv, sorted
	kv       map[string]*pair
	graves   map[string]uint64 // the index at which a key was deleted
	kvIndex  uint64            // of the last change of any key
	sessions map[string]*session
	checks   map[string]checkState // the catalog's
}

type pair struct {
	LockIndex   uint64
	Key         string
	Flags       uint64
	Value       []byte
	Session     string `json:",omitempty"`
	CreateIndex uint64
	ModifyIndex uint64
}

type session struct {
	ID            string
	Name          string
	Node          string
	LockDelay     time.Duration
	Behavior      string
	TTL           string
	NodeChecks    []string
	ServiceChecks []serviceCheck
	CreateIndex   uint64
	ModifyIndex   uint64
}

type serviceCheck struct {
	ID        string
	Namespace string `json:",omitempty"`
}

type checkState struct {
	node    string
	passing bool
}

// New returns a server that has a leader and nothing else.
func New(config Config) *Server {
	config.MinTTL = cmp.Or(config.MinTTL, 10*time.Second)
	config.Hold = cmp.Or(config.Hold, 7*time.Second)
	if config.NewID == nil {
		config.NewID = uuid.NewString
	}
	if config.Expiry == nil {
		config.Expiry = func(ttl time.Duration) time.Duration { return 2 * ttl }
	}
	return &Server{
		config: config,
		state: state{
			index: 10, kvIndex: 1, kv: map[string]*pair{}, graves: map[string]uint64{},
			sessions: map[string]*session{}, checks: map[string]checkState{},
		},
		leader: true,
		delays: map[string]time.Time{},
		timers: map[string]*time.Timer{},
		saved:  map[string]state{},
	}
}

// clone copies a state. What it points to does not change, but is replaced.
func (st state) clone() state {
	st.keys = slices.Clone(st.keys)
	st.kv = maps.Clone(st.kv)
	st.graves = maps.Clone(st.graves)
	st.sessions = maps.Clone(st.sessions)
	st.checks = maps.Clone(st.checks)
	return st
}

// A Snapshot is what Restore brings back.
type Snapshot struct{ state state }

// Snapshot returns what is there now.
func (s *Server) Snapshot() Snapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	return Snapshot{s.state.clone()}
}

// Restore replaces everything by a snapshot. The next write has an index above all before; those
// of keys go back. Blocking queries are answered with what they last saw, and one that asks again with
// that index waits until a write has a higher one. Lock-delays are forgotten, the time of every session
// counts anew, and agents tell the servers again what they know.
func (s *Server) Restore(old Snapshot) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.restore(old.state)
}

func (s *Server) restore(old state) {
	waiting := s.blocked
	s.blocked = nil
	for _, q := range waiting {
		q.timer.Stop()
		q.answer(true)
	}
	for _, id := range slices.Sorted(maps.Keys(s.state.sessions)) {
		if old.sessions[id] == nil {
			s.ended(id, Forgotten)
		}
	}
	index := max(s.state.index, old.index) + 1
	s.state = old.clone()
	s.state.index = index
	s.delays = map[string]time.Time{}
	s.resetTimers()
	for _, a := range s.agents {
		a.sync()
	}
}

// SetLeader says whether there is a leader. Without one nothing is written, and no consistent
// read is answered; agents go on by themselves. A new leader counts the time of every session
// anew.
func (s *Server) SetLeader(leader bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.leader == leader {
		return
	}
	s.leader = leader
	if !leader {
		for id, timer := range s.timers {
			timer.Stop()
			delete(s.timers, id)
		}
		return
	}
	s.resetTimers()
	list := s.waiting
	s.waiting = nil
	for _, h := range list {
		if h.timer.Stop() {
			h.run()
		}
	}
	for _, a := range s.agents {
		a.sync()
	}
}

// held is a request that waits for a leader.
type held struct {
	run   func()
	timer *time.Timer
}

// led calls run when there is a leader, at once if there is one, and none if there is none
// for long.
func (s *Server) led(run func(), none func()) {
	if s.leader {
		run()
		return
	}
	h := &held{run: run}
	h.timer = time.AfterFunc(s.config.Hold, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if i := slices.Index(s.waiting, h); i >= 0 {
			s.waiting = slices.Delete(s.waiting, i, i+1)
			none()
		}
	})
	s.waiting = append(s.waiting, h)
}

// look calls read with what a read sees: what is there, unless it does not ask for consistency
// and is answered by who is no leader any more.
func (s *Server) look(consistent bool, read func()) {
	if consistent || s.config.Stale == nil {
		read()
		return
	}
	old := s.past
	if old == nil || time.Since(old.at) > 500*time.Millisecond {
		s.past = &past{time.Now(), s.state.clone()}
	}
	if old == nil || time.Since(old.at) > 2500*time.Millisecond || !s.config.Stale() {
		read()
		return
	}
	present := s.state
	s.state = old.state
	read()
	s.state = present
}

// commit applies a write when it is its turn.
func (s *Server) commit(apply func()) {
	var took time.Duration
	if s.config.Commit != nil {
		took = s.config.Commit()
	}
	now := time.Now()
	at := now.Add(took)
	if !at.After(s.applied) && s.applied.After(now) {
		at = s.applied.Add(1)
	}
	if !at.After(now) {
		s.apply(apply)
		return
	}
	s.applied = at
	time.AfterFunc(at.Sub(now), func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.apply(apply)
	})
}

func (s *Server) apply(f func()) {
	s.state.index++
	f()
	s.wake()
}

// wake answers the blocking queries about what has changed.
func (s *Server) wake() {
	changed := s.changed
	s.changed = nil
	if len(changed) == 0 {
		return
	}
	list := s.blocked
	s.blocked = nil
	for _, q := range list {
		if slices.ContainsFunc(changed, q.about) && q.answer(false) {
			q.timer.Stop()
			continue
		}
		s.blocked = append(s.blocked, q)
	}
}

// query is a blocking query that waits.
type query struct {
	about  func(key string) bool
	answer func(now bool) bool // whether it was answered; it is if now is true
	timer  *time.Timer
}

// block waits with an answer until there is news, or for so long.
func (s *Server) block(q *query, wait time.Duration) {
	if q.answer(false) {
		return
	}
	q.timer = time.AfterFunc(wait, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if i := slices.Index(s.blocked, q); i >= 0 {
			s.blocked = slices.Delete(s.blocked, i, i+1)
			q.answer(true)
		}
	})
	s.blocked = append(s.blocked, q)
}

// The keys.

func (s *Server) put(p *pair) {
	if i, found := slices.BinarySearch(s.state.keys, p.Key); !found {
		s.state.keys = slices.Insert(s.state.keys, i, p.Key)
	}
	s.state.kv[p.Key] = p
	s.touched(p.Key)
}

func (s *Server) remove(key string) {
	if s.state.kv[key] == nil {
		return
	}
	i, _ := slices.BinarySearch(s.state.keys, key)
	s.state.keys = slices.Delete(s.state.keys, i, i+1)
	delete(s.state.kv, key)
	s.state.graves[key] = s.state.index
	s.touched(key)
}

func (s *Server) touched(key string) {
	s.state.kvIndex = s.state.index
	s.changed = append(s.changed, key)
}

// below returns the keys with a prefix, sorted.
func (s *Server) below(prefix string) []string {
	from, _ := slices.BinarySearch(s.state.keys, prefix)
	to := from
	for to < len(s.state.keys) && strings.HasPrefix(s.state.keys[to], prefix) {
		to++
	}
	return s.state.keys[from:to]
}

// belowIndex returns the index of the last change below a prefix; if nothing was ever there,
// of any change.
func (s *Server) belowIndex(prefix string) (index uint64) {
	for _, key := range s.below(prefix) {
		index = max(index, s.state.kv[key].ModifyIndex)
	}
	for key, at := range s.state.graves {
		if strings.HasPrefix(key, prefix) {
			index = max(index, at)
		}
	}
	return cmp.Or(index, s.state.kvIndex)
}

// set writes a key as kvsSetTxn does.
func (s *Server) set(p *pair, session bool) {
	if old := s.state.kv[p.Key]; old != nil {
		p.CreateIndex = old.CreateIndex
		if !session {
			p.Session = old.Session
		}
		if old.LockIndex == p.LockIndex && old.Flags == p.Flags && old.Session == p.Session && string(old.Value) == string(p.Value) {
			p.ModifyIndex = old.ModifyIndex // nothing has changed
			return
		}
	} else {
		p.CreateIndex = s.state.index
		if !session {
			p.Session = ""
		}
	}
	p.ModifyIndex = s.state.index
	s.put(p)
}

func (s *Server) setCAS(p *pair, index uint64) bool {
	old := s.state.kv[p.Key]
	if index == 0 && old != nil || index != 0 && (old == nil || old.ModifyIndex != index) {
		return false
	}
	s.set(p, false)
	return true
}

func (s *Server) lock(p *pair) (bool, error) {
	if p.Session == "" {
		return false, fmt.Errorf("missing session")
	}
	if s.state.sessions[p.Session] == nil {
		return false, fmt.Errorf("invalid session %#v", p.Session)
	}
	p.LockIndex = 1
	if old := s.state.kv[p.Key]; old != nil {
		p.LockIndex = old.LockIndex + 1
		if old.Session != "" {
			if old.Session != p.Session {
				return false, nil
			}
			p.LockIndex = old.LockIndex
		}
	}
	s.set(p, true)
	return true, nil
}

func (s *Server) unlock(p *pair) (bool, error) {
	if p.Session == "" {
		return false, fmt.Errorf("missing session")
	}
	old := s.state.kv[p.Key]
	if old == nil || old.Session != p.Session {
		return false, nil
	}
	p.Session, p.LockIndex = "", old.LockIndex
	s.set(p, true)
	return true, nil
}

func (s *Server) deleteCAS(key string, index uint64) bool {
	old := s.state.kv[key]
	if old == nil {
		return true
	}
	if old.ModifyIndex != index {
		return false
	}
	s.remove(key)
	return true
}

// delayed reports whether a key is in its lock-delay, as a leader does before it puts a
// write in the log.
func (s *Server) delayed(key string) bool {
	return time.Now().Before(s.delays[key])
}

// The sessions.

// end ends a session in a write that is being applied.
func (s *Server) end(id string, why End) {
	ss := s.state.sessions[id]
	if ss == nil {
		return
	}
	delete(s.state.sessions, id)
	if t := s.timers[id]; t != nil {
		t.Stop()
		delete(s.timers, id)
	}
	for _, key := range slices.Clone(s.state.keys) {
		p := s.state.kv[key]
		if p.Session != id {
			continue
		}
		if ss.LockDelay > 0 {
			s.delays[key] = time.Now().Add(min(ss.LockDelay, time.Minute))
		}
		if ss.Behavior == "delete" {
			s.remove(key)
			continue
		}
		released := *p
		released.Session, released.ModifyIndex = "", s.state.index
		s.put(&released)
	}
	s.ended(id, why)
}

func (s *Server) ended(id string, why End) {
	if s.config.Ended != nil {
		s.config.Ended(id, why)
	}
}

// renew counts the time of a session anew.
func (s *Server) renew(ss *session) {
	ttl, _ := time.ParseDuration(ss.TTL)
	if ttl == 0 || !s.leader {
		return
	}
	if t := s.timers[ss.ID]; t != nil {
		t.Stop()
	}
	id := ss.ID
	var timer *time.Timer
	timer = time.AfterFunc(s.config.Expiry(ttl), func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.timers[id] == timer && s.leader {
			s.commit(func() { s.end(id, Expired) })
		}
	})
	s.timers[id] = timer
}

func (s *Server) resetTimers() {
	for id, timer := range s.timers {
		timer.Stop()
		delete(s.timers, id)
	}
	for _, id := range slices.Sorted(maps.Keys(s.state.sessions)) {
		s.renew(s.state.sessions[id])
	}
}

// critical ends the sessions that hang on a check, which failed or is gone.
func (s *Server) critical(check string, why End) {
	for _, id := range slices.Sorted(maps.Keys(s.state.sessions)) {
		ss := s.state.sessions[id]
		if slices.ContainsFunc(ss.ServiceChecks, func(c serviceCheck) bool { return c.ID == check }) || slices.Contains(ss.NodeChecks, check) {
			s.end(id, why)
		}
	}
}

// What those look at who know everything.

// Held returns who holds a key, and its value; empty if it is not there.
func (s *Server) Held(key string) (session string, value []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.state.kv[key]; p != nil {
		return p.Session, p.Value
	}
	return "", nil
}

// Below returns the keys with a prefix, sorted.
func (s *Server) Below(prefix string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.below(prefix))
}

// Lives reports whether a session has not ended.
func (s *Server) Lives(session string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state.sessions[session] != nil
}

// Destroy ends a session, as an operator does.
func (s *Server) Destroy(session string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.apply(func() { s.end(session, Destroyed) })
}

// Delete deletes a key, as an operator does.
func (s *Server) Delete(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.apply(func() { s.remove(key) })
}

// Node returns the name of the node on which a session was made; empty if it has ended.
func (s *Server) Node(session string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ss := s.state.sessions[session]; ss != nil {
		return ss.Node
	}
	return ""
}

// Checked returns the sessions of a node that end with a service's check.
func (s *Server) Checked(node string) (ids []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, ss := range s.state.sessions {
		if ss.Node == node && len(ss.ServiceChecks) > 0 {
			ids = append(ids, id)
		}
	}
	return ids
}

// Put writes a key without a session, as an operator does.
func (s *Server) Put(key string, value []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.apply(func() { s.set(&pair{Key: key, Value: value}, false) })
}
