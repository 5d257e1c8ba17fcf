package overlay

// A Mutant is a build in which one thing that protects is broken. A simulation that does not
// tell it from the real one is worth nothing.
type Mutant struct {
	Name    string
	What    string // is broken
	patches []patch
}

// Nothing is the real build.
var Nothing = Mutant{}

func one(name, what, file, old, new string) Mutant {
	return Mutant{name, what, []patch{{file, old, new}}}
}

// Mutants are the builds that the simulation must catch.
var Mutants = []Mutant{
	one("heartbeat-answer", "the lease counts from the answer to a heartbeat, not from before it was sent",
		"lock/consul/replica.go", "t.extend(hold.Check, timing, sent)", "t.extend(hold.Check, timing, max(sent, boottime.Now()))"),
	one("renewal-answer", "the lease counts from the answer to a renewal",
		"lock/consul/session.go", "s.extend(hold.TTL, timing, sent)", "s.extend(hold.TTL, timing, max(sent, boottime.Now()))"),
	one("creation-answer", "the lease counts from the answer to the creation of the session",
		"lock/consul/session.go", "s.Begin(hold.TTL, s.cfg.session(), sent)", "s.Begin(hold.TTL, s.cfg.session(), max(sent, boottime.Now()))"),
	one("revival", "a heartbeat that is acknowledged late revives a lease that has ended",
		"lock/internal/hold/session.go", "	if s.until() <= now {\n		return false\n	}\n", ""),
	one("no-margin", "a lease ends when the session does, not a margin earlier",
		"lock/lock.go", "return sent.Add(t.TTL - t.Margin)", "return sent.Add(t.TTL)"),
	one("half-margin", "a lease ends half a margin before the session",
		"lock/lock.go", "return sent.Add(t.TTL - t.Margin)", "return sent.Add(t.TTL - t.Margin/2)"),
	one("no-deadline", "a lease has no deadline of its own",
		"lock/internal/hold/session.go", "return min(s.deadlines[Check], s.deadlines[TTL], s.deadlines[Silence])", "return never"),
	one("no-check-deadline", "a lease does not end when heartbeats are not acknowledged",
		"lock/internal/hold/session.go", "return min(s.deadlines[Check], s.deadlines[TTL], s.deadlines[Silence])", "return min(s.deadlines[TTL], s.deadlines[Silence])"),
	one("no-session-deadline", "a lease does not end when renewals are not acknowledged",
		"lock/internal/hold/session.go", "return min(s.deadlines[Check], s.deadlines[TTL], s.deadlines[Silence])", "return min(s.deadlines[Check], s.deadlines[Silence])"),
	one("slow-end", "contexts end seconds after the deadline",
		"lock/consul/replica.go", "retry.Pause(ctx, min(left, t.slots.expire(), 500*time.Millisecond))", "_ = min(left, t.slots.expire()); retry.Pause(ctx, 3*time.Second)"),
	one("no-verify", "nobody looks whether held keys are still held",
		"lock/consul/verify.go", "func (k *locks) verify(ctx context.Context, in *leases) {\n", "func (k *locks) verify(ctx context.Context, in *leases) {\n	if ctx != nil {\n		return\n	}\n"),
	one("no-list", "a key may be taken twice within one session",
		"lock/consul/lease.go", "taken && !mutant.List", "taken && mutant.List"),
	one("held-is-mine", "a key that somebody holds is taken for one's own",
		"lock/consul/commit.go", "	case strings.Contains(what, \"lock is already held\"):\n		return fmt.Errorf(\"%s: %w\", ls.key, lock.ErrHeld)\n", "	case strings.Contains(what, \"lock is already held\"):\n		return nil\n"),
	one("holder-is-another", "a task's reused name that somebody holds is taken to be another task's",
		"lock/consul/names.go", "return string(holder) != key", "return true"),
	one("no-marker", "nobody looks whether tasks of a group are held under their own names",
		"lock/consul/commit.go", "if marked[g] || slices.Contains(b.marks, g) {", "if marked[g] || len(b.marks) >= 0 {"),
	one("divert-blind", "a task is locked under its own name, whatever has become of the reused one",
		"lock/consul/commit.go", "			b.add(i, check)\n", "			_ = check\n"),
	one("bare-delete", "a release deletes the key, no matter who holds it",
		"lock/consul/commit.go", `appendOp(b, api.KVDeleteCAS, ls.path, "", nil, ls.index)`, `appendOp(b, api.KVDelete, ls.path, "", nil, 0)`),
	one("no-release", "a release deletes nothing",
		"lock/consul/lease.go", "ls.in.release(ls)", "_ = 0"),
	one("no-leak-scan", "nobody looks for keys that a restored snapshot has brought back",
		"lock/consul/verify.go", "if pair.Session == in.id && leases[pair.Key] == nil {", "if pair.Session == in.id && leases[pair.Key] == nil && leases == nil {"),
	one("no-doubt", "a request that was given up on is forgotten, though it may be applied late",
		"lock/consul/lease.go", "return doubt != 0 && boottime.Now().Sub(doubt) < lateness", "return false"),
	one("no-jumps", "nobody notices that the machine was paused",
		"lock/internal/hold/session.go", "jump := c.jumps.Since()", "jump := min(c.jumps.Since(), 0)"),
	one("stale-heartbeat", "a heartbeat that was sent before a pause extends the lease after it",
		"lock/internal/hold/session.go", "stale := sent <= s.clock.jumped", "stale := false"),
	one("deaf", "an ended session is not noticed before a renewal",
		"lock/consul/session.go", `	entry, err := s.lookAt(ctx, s.heartbeats, s.id)
	if err == nil && entry == nil {
		s.lose(fmt.Errorf("%s %s was ended from outside", s.kind, s.id))
	}
	return entry != nil, err`, `	_, err := s.lookAt(ctx, s.heartbeats, s.id)
	return true, err`),

	// Of the worker, and what it rests on.
	one("begins-late", "a handler begins without a look at the deadline",
		"worker/attempt.go", "	if lease.Deadline().Passed() {\n		return tasks.Result{}, lock.ErrLost\n	}\n	if ctx.Err() != nil {\n		return tasks.Result{}, context.Cause(ctx)\n	}\n", ""),
	one("early-release", "the lock is released before the outcome is durable",
		"worker/attempt.go", "		ended = w.run(lease, t, trace)\n", "		_ = lease.Release(context.Background())\n		ended = w.run(lease, t, trace)\n"),
	one("deaf-to-the-lease", "a handler's context does not end with the lease",
		"worker/attempt.go", "context.WithCancelCause(lease.Context())", "context.WithCancelCause(context.WithoutCancel(lease.Context()))"),
	one("hasty-burial", "replicas are called dead after a quarter of the silence",
		"worker/members.go", "	for _, r := range w.members.silent(lock.Silence) {\n		switch {", "	for _, r := range w.members.silent(lock.Silence / 4) {\n		switch {").
		and("worker/members.go", "how, err := w.cfg.Locks.End(ctx, r.Session, lock.Silence)", "how, err := w.cfg.Locks.End(ctx, r.Session, lock.Silence/4)"),
	one("one-second-early", "replicas are called dead two seconds early",
		"worker/members.go", "	for _, r := range w.members.silent(lock.Silence) {\n		switch {", "	for _, r := range w.members.silent(lock.Silence - 2*time.Second) {\n		switch {").
		and("worker/members.go", "how, err := w.cfg.Locks.End(ctx, r.Session, lock.Silence)", "how, err := w.cfg.Locks.End(ctx, r.Session, lock.Silence-2*time.Second)"),
	one("one-silence", "silence on the list is death, whatever Consul has heard",
		"lock/consul/end.go", "if l.membership.quiet(session, index) < silence {", "if l.membership.quiet(session, index) < 0 {"),
	one("heard-at-the-answer", "the list's word counts from its answer",
		"worker/members.go", "w.cfg.Locks.Heard(session, sent)", "w.cfg.Locks.Heard(session, max(sent, boottime.Now()))"),
	one("no-silence-deadline", "a lease does not end when nobody hears of its replica",
		"lock/internal/hold/session.go", "return min(s.deadlines[Check], s.deadlines[TTL], s.deadlines[Silence])", "return min(s.deadlines[Check], s.deadlines[TTL])"),
	one("no-audit", "claims whose answers are lost are never given back",
		"worker/audit.go", "	if !w.replyLost.Load() {\n		return\n	}\n", "	if !w.replyLost.Load() || w.cfg.MaxCrashes > 0 {\n		return\n	}\n"),
	one("claims-are-dropped", "a claim is given up when the replica stops",
		"worker/claim.go", "whole := context.WithoutCancel(ctx)", "whole := ctx").
		and("worker/claim.go", "			w.audit(last)\n", "			_ = last\n"),
	one("audit-beside-claims", "the audit of claims runs beside those under a limit",
		"worker/claim.go", "	w.claiming.RLock()\n	defer w.claiming.RUnlock()\n	c.Session,", "	c.Session,"),
	one("fences-begin-anew", "another server's fences do not begin above those of its predecessor",
		"worker/database.go", "	if mutant.Fences {\n		now.FencesFrom = 0\n	}\n", "	_, now.FencesFrom = mutant.Fences, 0\n"),
	one("any-server", "a claim is taken by whatever server answers",
		"worker/database.go", "c.Server, c.FencesFrom = d.record.Started, d.record.FencesFrom", "c.FencesFrom = d.record.FencesFrom").
		and("worker/database.go", "ours := d.trusted && d.record.Started.Equal(t.Server) && t.Fence > d.record.FencesFrom", "ours := true").
		and("lock/consul/commit.go", "if version := list[0].database; version != 0 && !mutant.Record {", "if version := list[0].database; version != 0 && mutant.Record {"),
	one("stops-cost-attempts", "a stop uses up an attempt",
		"worker/attempt.go", "e.Outcome, e.Next, e.Requeue = tasks.Shutdown, tasks.StatusPending, true", "e.Outcome, e.Next, e.Requeue = tasks.Shutdown, tasks.StatusPending, false"),
	one("suspects-together", "several suspects begin at once, and each crash is charged to all",
		"worker/suspects.go", "	case s.left == 0, s.alone, prime && s.left < s.batch:\n		return false\n", "	case s.left < -1000:\n		return false\n").
		and("simulate/fakestore/database.go", "v.proven = suspects == 1 && mine", "v.proven = mine"),
	one("no-limits", "a slot is had though all are taken",
		"lock/consul/semaphore_view.go", "	case held+n <= v.limit && !v.lockMissing:\n		return nil\n", "	case held+n <= v.limit+1:\n		return nil\n"),

	// Defects that were, with both witnesses of a death where there was one.
	one("other-consul", "a Consul is believed whose cluster is another one",
		"lock/consul/cluster.go", "	case mutant.Identity:\n", "	case mutant.Identity || id != \"\":\n").
		and("lock/consul/cluster.go", "		if mutant.Identity && id != \"\" {\n			return id, nil\n		}\n", "		if id != \"\" {\n			return id, nil\n		}\n").
		and(oneSource...),
	one("filtered-is-ended", "an answer that leaves out what the token may not see is believed",
		"lock/consul/client.go", "	case entry == nil && meta.ResultsFilteredByACLs:\n		return nil, fmt.Errorf(\"look at session %s: %w\", session, errBlind)\n", "").
		and("lock/consul/client.go", "	entry, meta, err := client.Session()", "	entry, _, err := client.Session()").
		and("lock/consul/client.go", "var errBlind = ", "var _ = ").
		and(oneSource...),
	one("planted-key", "a key that no session holds shows that its replica lives",
		"lock/consul/membership.go", "session := strings.TrimPrefix(pair.Key, prefix); session == pair.Session {", "session := strings.TrimPrefix(pair.Key, prefix); session != \"\" {").
		and(oneSource...),
}

// oneSource makes Consul's word all that a takeover needs.
var oneSource = []string{
	"worker/takeover.go", "case !known || mutant.Witness:", "case !known || !mutant.Witness:",
	"simulate/fakestore/database.go", "|| listed && m.EndedAt.IsZero() {", "{",
}

// and adds patches.
func (m Mutant) and(patches ...string) Mutant {
	for ; len(patches) > 0; patches = patches[3:] {
		m.patches = append(m.patches, patch{patches[0], patches[1], patches[2]})
	}
	return m
}
