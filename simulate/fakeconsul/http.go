package fakeconsul

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A Request is one of the HTTP API.
type Request struct {
	Method string
	Path   string // decoded
	Query  url.Values
	Body   []byte
	Blind  bool // the token may see no session
}

// An Answer is what the HTTP API answers.
type Answer struct {
	Status   int
	Body     []byte
	Index    uint64 // X-Consul-Index; zero means none
	Filtered bool   // X-Consul-Results-Filtered-By-Acls
}

// Serve answers a request that came to the agent. It calls reply once, at once or later, and
// not in a goroutine of its own; reply must not call the server. A blocking query is answered
// even when nobody waits any more.
func (a *Agent) Serve(r Request, reply func(Answer)) {
	s := a.s
	s.mu.Lock()
	defer s.mu.Unlock()
	path, ok := strings.CutPrefix(r.Path, "/v1/")
	if !ok {
		reply(Answer{Status: http.StatusNotFound})
		return
	}
	c := call{a, s, r, reply}
	local := true
	switch {
	case path == "agent/service/register":
		c.registerService()
	case strings.HasPrefix(path, "agent/service/deregister/"):
		c.deregisterService(strings.TrimPrefix(path, "agent/service/deregister/"))
	case strings.HasPrefix(path, "agent/check/update/"):
		c.updateCheck(strings.TrimPrefix(path, "agent/check/update/"))
	case path == "agent/self":
		c.json(map[string]any{"Config": map[string]any{"NodeName": a.node, "Datacenter": "dc1", "Version": "1.22.5", "Server": true}, "Member": map[string]any{"Name": a.node}})
	case path == "status/leader":
		leader := ""
		if s.leader {
			leader = "127.0.0.1:8300"
		}
		c.json(leader)
	default:
		local = false
	}
	if local {
		return
	}
	s.led(func() { c.serve(path) }, func() { c.fail(http.StatusInternalServerError, "No cluster leader") })
}

// call is a request that is being answered. s.mu is held in all its methods.
type call struct {
	a     *Agent
	s     *Server
	r     Request
	reply func(Answer)
}

func (c call) fail(status int, format string, args ...any) {
	c.reply(Answer{Status: status, Body: fmt.Appendf(nil, format, args...)})
}

func (c call) json(v any) { c.answer(Answer{Status: http.StatusOK, Index: c.s.state.index}, v) }

func (c call) answer(answer Answer, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	answer.Body = body
	c.reply(answer)
}

// serve answers what servers answer. There is a leader.
func (c call) serve(path string) {
	head, rest, _ := strings.Cut(path, "/")
	switch verb, id, _ := strings.Cut(rest, "/"); {
	case head == "kv":
		c.kv(rest)
	case head == "txn" && c.r.Method == http.MethodPut:
		c.txn()
	case path == "session/create":
		c.createSession()
	case head == "session" && verb == "renew":
		c.renewSession(id)
	case head == "session" && verb == "destroy":
		c.s.commit(func() {
			c.s.end(id, Destroyed)
			c.json(true)
		})
	case head == "session" && verb == "info":
		c.sessions(func(ss *session) bool { return ss.ID == id })
	case head == "session" && verb == "node":
		c.sessions(func(ss *session) bool { return ss.Node == id })
	case path == "session/list":
		c.sessions(func(*session) bool { return true })
	case strings.HasPrefix(path, "health/node/"):
		c.json([]map[string]any{{"Node": c.a.node, "CheckID": "serfHealth", "Status": "passing"}})
	case path == "snapshot" && c.r.Method == http.MethodGet:
		id := c.s.config.NewID()
		c.s.saved[id] = c.s.state.clone()
		c.reply(Answer{Status: http.StatusOK, Index: c.s.state.index, Body: []byte(id)})
	case path == "snapshot" && c.r.Method == http.MethodPut:
		st, ok := c.s.saved[string(c.r.Body)]
		if !ok {
			c.fail(http.StatusInternalServerError, "failed to decode the snapshot")
			return
		}
		c.s.restore(st)
		c.reply(Answer{Status: http.StatusOK})
	default:
		c.fail(http.StatusNotFound, "")
	}
}

// Services and checks.

func (c call) registerService() {
	var body struct {
		ID, Name string
		Check    *struct{ CheckID, TTL, Status, DeregisterCriticalServiceAfter string }
	}
	if err := json.Unmarshal(c.r.Body, &body); err != nil {
		c.fail(http.StatusBadRequest, "Request decode failed: %v", err)
		return
	}
	if body.ID == "" {
		body.ID = body.Name
	}
	var k *check
	checkID := "service:" + body.ID
	if body.Check != nil {
		ttl, err := time.ParseDuration(body.Check.TTL)
		if err != nil || ttl <= 0 {
			c.fail(http.StatusBadRequest, "Invalid check: TTL must be > 0 for TTL checks")
			return
		}
		bury, _ := time.ParseDuration(body.Check.DeregisterCriticalServiceAfter)
		if body.Check.CheckID != "" {
			checkID = body.Check.CheckID
		}
		k = &check{service: body.ID, ttl: ttl, bury: bury, passing: body.Check.Status == "passing"}
	}
	c.a.register(body.ID, service{body.Name}, checkID, k)
	c.reply(Answer{Status: http.StatusOK})
}

func (c call) deregisterService(id string) {
	if _, ok := c.a.services[id]; !ok {
		c.fail(http.StatusNotFound, "Unknown service ID %q. Ensure that the service ID is passed, not the service name.", id)
		return
	}
	c.a.deregister(id)
	c.reply(Answer{Status: http.StatusOK})
}

func (c call) updateCheck(id string) {
	k := c.a.checks[id]
	if k == nil {
		c.fail(http.StatusNotFound, "Unknown check ID %q. Ensure that the check ID is passed, not the check name.", id)
		return
	}
	var body struct{ Status string }
	if err := json.Unmarshal(c.r.Body, &body); err != nil {
		c.fail(http.StatusBadRequest, "Request decode failed: %v", err)
		return
	}
	c.a.feed(id, k, body.Status == "passing")
	c.reply(Answer{Status: http.StatusOK})
}

// Sessions.

func (c call) createSession() {
	body := struct {
		Name          string
		Node          string
		Behavior      string
		TTL           string
		LockDelay     json.RawMessage
		Checks        []string
		NodeChecks    []string
		ServiceChecks []serviceCheck
	}{}
	if len(c.r.Body) > 0 {
		if err := json.Unmarshal(c.r.Body, &body); err != nil {
			c.fail(http.StatusBadRequest, "Request decode failed: %v", err)
			return
		}
	}
	ss := &session{Name: body.Name, Node: c.a.node, Behavior: body.Behavior, TTL: body.TTL, LockDelay: 15 * time.Second,
		NodeChecks: body.NodeChecks, ServiceChecks: body.ServiceChecks}
	if ss.Behavior == "" {
		ss.Behavior = "release"
	}
	if len(body.LockDelay) > 0 {
		delay, err := lockDelay(body.LockDelay)
		if err != nil {
			c.fail(http.StatusBadRequest, "Request decode failed: %v", err)
			return
		}
		ss.LockDelay = delay
	}
	switch {
	case body.NodeChecks == nil && body.Checks == nil:
		ss.NodeChecks = []string{"serfHealth"}
	case body.NodeChecks == nil:
		ss.NodeChecks = body.Checks
	}
	if ss.TTL != "" {
		ttl, err := time.ParseDuration(ss.TTL)
		if err != nil || ttl != 0 && (ttl < c.s.config.MinTTL || ttl > 24*time.Hour) {
			c.fail(http.StatusInternalServerError, "Invalid Session TTL '%s', must be between [%v=24h0m0s]", ss.TTL, c.s.config.MinTTL)
			return
		}
	}
	c.s.commit(func() {
		for _, k := range ss.ServiceChecks {
			st, known := c.s.state.checks[k.ID]
			if !known {
				c.fail(http.StatusInternalServerError, "Missing check '%s' registration", k.ID)
				return
			}
			if !st.passing {
				c.fail(http.StatusInternalServerError, "Check '%s' is in critical state", k.ID)
				return
			}
		}
		ss.ID = c.s.config.NewID()
		ss.CreateIndex, ss.ModifyIndex = c.s.state.index, c.s.state.index
		c.s.state.sessions[ss.ID] = ss
		c.s.renew(ss)
		c.json(map[string]string{"ID": ss.ID})
	})
}

// lockDelay reads a duration as the HTTP API takes it: a text, or a number, of seconds if it
// is small and of nanoseconds if it is not.
func lockDelay(raw json.RawMessage) (time.Duration, error) {
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return time.ParseDuration(text)
	}
	var n float64
	if err := json.Unmarshal(raw, &n); err != nil {
		return 0, err
	}
	d := time.Duration(n)
	if d < 1000 {
		d *= time.Second
	}
	return d, nil
}

func (c call) renewSession(id string) {
	ss := c.s.state.sessions[id]
	if ss == nil {
		c.fail(http.StatusNotFound, "Session id '%s' not found", id)
		return
	}
	c.s.renew(ss)
	c.json([]*session{ss})
}

func (c call) sessions(which func(*session) bool) {
	c.s.look(c.r.Query.Has("consistent"), func() { c.listSessions(which) })
}

func (c call) listSessions(which func(*session) bool) {
	list := []*session{}
	filtered := false
	for _, id := range slices.Sorted(maps.Keys(c.s.state.sessions)) {
		switch ss := c.s.state.sessions[id]; {
		case !which(ss):
		case c.r.Blind:
			filtered = true
		default:
			list = append(list, ss)
		}
	}
	c.answer(Answer{Status: http.StatusOK, Index: c.s.state.index, Filtered: filtered}, list)
}

// Keys.

func (c call) kv(key string) {
	q := c.r.Query
	switch c.r.Method {
	case http.MethodGet:
		c.get(key)
	case http.MethodPut:
		if q.Has("acquire") && c.s.delayed(key) {
			c.json(false)
			return
		}
		flags, _ := strconv.ParseUint(q.Get("flags"), 10, 64)
		p := &pair{Key: key, Flags: flags, Value: c.r.Body}
		c.s.commit(func() {
			ok, err := true, error(nil)
			switch {
			case q.Has("acquire"):
				p.Session = q.Get("acquire")
				ok, err = c.s.lock(p)
			case q.Has("release"):
				p.Session = q.Get("release")
				ok, err = c.s.unlock(p)
			case q.Has("cas"):
				var index uint64
				index, err = strconv.ParseUint(q.Get("cas"), 10, 64)
				if err == nil {
					ok = c.s.setCAS(p, index)
				}
			default:
				c.s.set(p, false)
			}
			if err != nil {
				c.fail(http.StatusInternalServerError, "%v", err)
				return
			}
			c.json(ok)
		})
	case http.MethodDelete:
		c.s.commit(func() {
			switch {
			case q.Has("recurse"):
				for _, k := range slices.Clone(c.s.below(key)) {
					c.s.remove(k)
				}
			case q.Has("cas"):
				index, err := strconv.ParseUint(q.Get("cas"), 10, 64)
				if err != nil {
					c.fail(http.StatusBadRequest, "Invalid CAS index: %v", err)
					return
				}
				c.json(c.s.deleteCAS(key, index))
				return
			default:
				c.s.remove(key)
			}
			c.json(true)
		})
	default:
		c.fail(http.StatusMethodNotAllowed, "method %s not allowed", c.r.Method)
	}
}

// get answers a read of a key or a folder, which may be a blocking query.
func (c call) get(key string) {
	recurse, names := c.r.Query.Has("recurse"), c.r.Query.Has("keys")
	about := func(k string) bool { return k == key }
	if recurse || names {
		about = func(k string) bool { return strings.HasPrefix(k, key) }
	}
	after, _ := strconv.ParseUint(c.r.Query.Get("index"), 10, 64)
	q := &query{about: about, answer: func(now bool) bool {
		var index uint64
		found := true
		var list []*pair
		var body []byte
		switch {
		case names:
			list := slices.Clone(c.s.below(key))
			found = len(list) > 0
			if separator := c.r.Query.Get("separator"); separator != "" {
				for i, k := range list {
					if end := strings.Index(k[len(key):], separator); end >= 0 {
						list[i] = k[:len(key)+end+len(separator)]
					}
				}
				list = slices.Compact(list)
			}
			index = c.s.belowIndex(key)
			b, err := json.Marshal(list)
			if err != nil {
				panic(err)
			}
			body = b
		case recurse:
			for _, k := range c.s.below(key) {
				list = append(list, c.s.state.kv[k])
			}
			index, found = c.s.belowIndex(key), len(list) > 0
		default:
			p := c.s.state.kv[key]
			index, found = c.s.state.kvIndex, p != nil
			if found {
				index, list = p.ModifyIndex, []*pair{p}
			}
		}
		if after > 0 && index <= after && !now {
			return false
		}
		if !found {
			c.reply(Answer{Status: http.StatusNotFound, Index: index})
			return true
		}
		if body == nil {
			body = appendPairs(make([]byte, 0, sizeOf(list)), list)
		}
		c.reply(Answer{Status: http.StatusOK, Index: index, Body: body})
		return true
	}}
	wait := 5 * time.Minute
	if text := c.r.Query.Get("wait"); text != "" {
		if d, err := time.ParseDuration(text); err == nil && d > 0 {
			wait = min(d, 10*time.Minute)
		}
	}
	answered := false
	if !c.r.Query.Has("consistent") {
		c.s.look(false, func() { answered = q.answer(false) })
	}
	if !answered {
		c.s.block(q, wait+wait/32)
	}
}

// Transactions.

type txnOp struct{ KV *txnKV }

type txnKV struct {
	Verb    string
	Key     string
	Value   []byte
	Flags   uint64
	Index   uint64
	Session string
}

type txnError struct {
	OpIndex int
	What    string
}

type txnResult struct {
	KV   *pair
	bare bool // without the value
}

func (c call) txn() {
	ops, err := readOps(c.r.Body)
	if err != nil {
		c.fail(http.StatusBadRequest, "Failed to parse body: %v", err)
		return
	}
	if len(ops) > 128 {
		c.fail(http.StatusRequestEntityTooLarge, "Transaction contains too many operations (%d > 128)", len(ops))
		return
	}
	writes := false
	var refused []txnError
	for i, op := range ops {
		if op.KV == nil {
			c.fail(http.StatusBadRequest, "the fake Consul has only operations on keys")
			return
		}
		switch op.KV.Verb {
		case "get", "get-or-empty", "get-tree", "check-index", "check-session", "check-not-exists":
		default:
			writes = true
		}
		if op.KV.Verb == "lock" && c.s.delayed(op.KV.Key) {
			refused = append(refused, txnError{i, fmt.Sprintf("failed to lock key %q due to lock delay", op.KV.Key)})
		}
	}
	if len(refused) > 0 {
		c.txnAnswer(nil, refused)
		return
	}
	if !writes {
		c.s.look(c.r.Query.Has("consistent"), func() { c.txnAnswer(c.s.operate(ops)) })
		return
	}
	c.s.commit(func() { c.txnAnswer(c.s.operate(ops)) })
}

func (c call) txnAnswer(results []txnResult, errors []txnError) {
	status := http.StatusOK
	if len(errors) > 0 {
		status, results = http.StatusConflict, nil
	}
	size := 200 * len(errors)
	for _, r := range results {
		size += 170 + len(r.KV.Key) + len(r.KV.Session)
		if !r.bare {
			size += len(r.KV.Value) * 4 / 3
		}
	}
	c.reply(Answer{Status: status, Body: appendTxn(make([]byte, 0, size), results, errors)})
}

// operate applies operations, all or none.
func (s *Server) operate(ops []txnOp) (results []txnResult, errors []txnError) {
	results = make([]txnResult, 0, len(ops))
	var undo []func()
	changed, kvIndex := len(s.changed), s.state.kvIndex
	for i, op := range ops {
		if len(ops) > 1 { // one alone that fails has changed nothing
			if f := s.undo(op); f != nil {
				undo = append(undo, f)
			}
		}
		var err error
		if results, err = s.operation(op, results); err != nil {
			errors = append(errors, txnError{i, err.Error()})
		}
	}
	if len(errors) > 0 {
		for _, f := range slices.Backward(undo) {
			f()
		}
		s.changed, s.state.kvIndex = s.changed[:changed], kvIndex
		return nil, errors
	}
	return results, nil
}

// undo returns how to undo an operation; nil if it changes nothing.
func (s *Server) undo(op txnOp) func() {
	var keys []string
	switch op.KV.Verb {
	case "get", "get-or-empty", "get-tree", "check-index", "check-session", "check-not-exists":
		return nil
	case "delete-tree":
		keys = slices.Clone(s.below(op.KV.Key))
	default:
		keys = []string{op.KV.Key}
	}
	before := make([]*pair, len(keys))
	graves := make([]uint64, len(keys))
	for i, key := range keys {
		before[i], graves[i] = s.state.kv[key], s.state.graves[key]
	}
	return func() {
		for i, key := range keys {
			if before[i] != nil {
				s.put(before[i])
			} else {
				s.remove(key)
			}
			if graves[i] == 0 {
				delete(s.state.graves, key)
			} else {
				s.state.graves[key] = graves[i]
			}
		}
	}
}

// operation applies an operation, and appends what it leaves there.
func (s *Server) operation(op txnOp, results []txnResult) ([]txnResult, error) {
	o := op.KV
	p := &pair{Key: o.Key, Value: o.Value, Flags: o.Flags, Session: o.Session}
	old := s.state.kv[o.Key]
	var ok bool
	var err error
	switch o.Verb {
	case "set":
		s.set(p, false)
	case "cas":
		if !s.setCAS(p, o.Index) {
			return results, fmt.Errorf("failed to set key %q, index is stale", o.Key)
		}
	case "lock":
		if ok, err = s.lock(p); err == nil && !ok {
			err = fmt.Errorf("failed to lock key %q, lock is already held", o.Key)
		}
	case "unlock":
		if ok, err = s.unlock(p); err == nil && !ok {
			err = fmt.Errorf("failed to unlock key %q, lock isn't held, or is held by another session", o.Key)
		}
	case "delete":
		s.remove(o.Key)
		return results, nil
	case "delete-tree":
		for _, k := range slices.Clone(s.below(o.Key)) {
			s.remove(k)
		}
		return results, nil
	case "delete-cas":
		if !s.deleteCAS(o.Key, o.Index) {
			return results, fmt.Errorf("failed to delete key %q, index is stale", o.Key)
		}
		return results, nil
	case "get":
		if old == nil {
			return results, fmt.Errorf("key %q doesn't exist", o.Key)
		}
		return append(results, txnResult{old, false}), nil
	case "get-or-empty":
		if old == nil {
			return append(results, txnResult{&pair{Key: o.Key}, false}), nil
		}
		return append(results, txnResult{old, false}), nil
	case "get-tree":
		for _, k := range s.below(o.Key) {
			results = append(results, txnResult{s.state.kv[k], false})
		}
		return results, nil
	case "check-session":
		if old == nil {
			return results, fmt.Errorf("failed to check session, key %q doesn't exist", o.Key)
		}
		if old.Session != o.Session {
			return results, fmt.Errorf("failed session check for key %q, current session %q != %q", o.Key, old.Session, o.Session)
		}
		p = old
	case "check-index":
		if old == nil {
			return results, fmt.Errorf("failed to check index, key %q doesn't exist", o.Key)
		}
		if old.ModifyIndex != o.Index {
			return results, fmt.Errorf("failed index check for key %q, current modify index %d != %d", o.Key, old.ModifyIndex, o.Index)
		}
		p = old
	case "check-not-exists":
		if old != nil {
			return results, fmt.Errorf("key %q exists", o.Key)
		}
		return results, nil
	default:
		return results, fmt.Errorf("unknown KV operation %q", o.Verb)
	}
	if err != nil {
		return results, err
	}
	return append(results, txnResult{p, true}), nil
}

// HTTP, for programs.

var contentType, lastContact, knownLeader = []string{"application/json"}, []string{"0"}, []string{"true"}

// Response makes a response of an answer.
func (a Answer) Response(r *http.Request) *http.Response {
	h := http.Header{"Content-Type": contentType, "X-Consul-Lastcontact": lastContact, "X-Consul-Knownleader": knownLeader}
	if a.Index > 0 {
		h["X-Consul-Index"] = []string{strconv.FormatUint(a.Index, 10)}
	}
	if a.Filtered {
		h["X-Consul-Results-Filtered-By-Acls"] = []string{"true"}
	}
	return &http.Response{
		Status: http.StatusText(a.Status), StatusCode: a.Status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: h, Body: io.NopCloser(bytes.NewReader(a.Body)), ContentLength: int64(len(a.Body)), Request: r,
	}
}

// Read reads a request to its end.
func Read(r *http.Request) (Request, error) {
	request := Request{Method: r.Method, Path: r.URL.Path}
	if r.URL.RawQuery != "" {
		request.Query = r.URL.Query()
	}
	if r.Body != nil {
		defer r.Body.Close()
		var body []byte
		var err error
		if n := r.ContentLength; n > 0 && n < 1<<20 {
			body = make([]byte, n)
			_, err = io.ReadFull(r.Body, body)
		} else {
			body, err = io.ReadAll(r.Body)
		}
		if err != nil {
			return Request{}, err
		}
		request.Body = body
	}
	return request, nil
}

// RoundTrip implements http.RoundTripper: a network without faults.
func (a *Agent) RoundTrip(r *http.Request) (*http.Response, error) {
	request, err := Read(r)
	if err != nil {
		return nil, err
	}
	done := make(chan Answer, 1)
	a.Serve(request, func(answer Answer) { done <- answer })
	select {
	case answer := <-done:
		return answer.Response(r), nil
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
}

// ServeHTTP implements http.Handler.
func (a *Agent) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	response, err := a.RoundTrip(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	maps.Copy(w.Header(), response.Header)
	w.WriteHeader(response.StatusCode)
	_, _ = io.Copy(w, response.Body)
}
