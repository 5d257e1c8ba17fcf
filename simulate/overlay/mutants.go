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
		"lock/consul/term.go", "t.extend(&t.trust.check, timing, sent)", "t.extend(&t.trust.check, timing, boottime.Now())"),
	one("renewal-answer", "the lease counts from the answer to a renewal",
		"lock/consul/term.go", "t.extend(&t.trust.session, timing, sent)", "t.extend(&t.trust.session, timing, boottime.Now())"),
	one("creation-answer", "the lease counts from the answer to the creation of the session",
		"lock/consul/term.go", "t.trust.session = l.cfg.session().Deadline(sent)", "_ = sent; t.trust.session = l.cfg.session().Deadline(boottime.Now())"),
	one("revival", "a heartbeat that is acknowledged late revives a lease that has ended",
		"lock/consul/trust.go", "	if t.until() <= now {\n		return false\n	}\n", ""),
	one("no-margin", "a lease ends when the session does, not a margin earlier",
		"lock/lock.go", "return sent.Add(t.TTL - t.Margin)", "return sent.Add(t.TTL)"),
	one("half-margin", "a lease ends half a margin before the session",
		"lock/lock.go", "return sent.Add(t.TTL - t.Margin)", "return sent.Add(t.TTL - t.Margin/2)"),
	one("no-deadline", "a lease has no deadline of its own",
		"lock/consul/trust.go", "return min(t.check, t.session, t.silence)", "return never"),
	one("no-check-deadline", "a lease does not end when heartbeats are not acknowledged",
		"lock/consul/trust.go", "return min(t.check, t.session, t.silence)", "return min(t.session, t.silence)"),
	one("no-session-deadline", "a lease does not end when renewals are not acknowledged",
		"lock/consul/trust.go", "return min(t.check, t.session, t.silence)", "return min(t.check, t.silence)"),
	one("slow-end", "contexts end seconds after the deadline",
		"lock/consul/term.go", "pause(ctx, min(left, t.expirePool(), 500*time.Millisecond))", "_ = min(left, t.expirePool()); pause(ctx, 3*time.Second)"),
	one("no-verify", "nobody looks whether held keys are still held",
		"lock/consul/term.go", "func (t *term) verify(ctx context.Context) {\n", "func (t *term) verify(ctx context.Context) {\n	if ctx != nil {\n		return\n	}\n"),
	one("no-list", "a key may be taken twice within one session",
		"lock/consul/term.go", "taken && !mutant.List", "taken && mutant.List"),
	one("held-is-mine", "a key that somebody holds is taken for one's own",
		"lock/consul/commit.go", `				return fmt.Errorf("%s: %w", ls.key, lock.ErrHeld)`, `				return nil`),
	one("bare-delete", "a release deletes the key, whoever holds it",
		"lock/consul/commit.go", `appendOp(b, api.KVDeleteCAS, ls.path, "", nil, ls.index)`, `appendOp(b, api.KVDelete, ls.path, "", nil, 0)`),
	one("no-release", "a release deletes nothing",
		"lock/consul/lease.go", "ls.t.l.releases.Do(ls)", "_ = 0"),
	one("no-strays", "nobody looks for keys that a restored snapshot has brought back",
		"lock/consul/strays.go", "if pair.Session == t.id && leases[pair.Key] == nil {", "if pair.Session == t.id && leases[pair.Key] == nil && leases == nil {"),
	one("no-doubt", "a request that was given up on is forgotten, though it may be applied late",
		"lock/consul/lease.go", "return ls.doubt != 0 && boottime.Now().Sub(ls.doubt) < lateness", "return false"),
	one("no-jumps", "nobody notices that the machine was paused",
		"lock/consul/term.go", "jump := t.clocks.Since()", "jump := min(t.clocks.Since(), 0)"),
	one("stale-heartbeat", "a heartbeat that was sent before a pause extends the lease after it",
		"lock/consul/term.go", "stale := sent <= t.trust.jumped", "stale := false"),
	one("deaf", "an ended session is not noticed, neither when the replica's key vanishes nor at a renewal",
		"lock/consul/term.go", `	if err == nil && entry == nil {
		t.lose(fmt.Errorf("%w: session %s was ended from outside", lock.ErrLost, t.id))
	}
	return entry != nil, err`, `	return true, err`),
}
