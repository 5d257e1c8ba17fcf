package mutants

import (
	"slices"
)

// All are the mutants, each name once.
var All = slices.Concat(inSimulation(), others)

// inSimulation are those that the simulation must catch.
func inSimulation() []Mutant {
	all := slices.Clone(simulated)
	for i := range all {
		all[i].Simulated = true
	}
	return all
}

// simulated are mutants of what the simulation runs.
var simulated = []Mutant{
	one("heartbeat-answer", "the lease counts from the answer to a heartbeat, not from before it was sent",
		"lock/consul/replica.go", "t.extend(hold.Check, timing, sent)", "t.extend(hold.Check, timing, max(sent, boottime.Now()))").
		failing("lock/consul.TestDeadlinesCountFromTheRequest"),
	one("renewal-answer", "the lease counts from the answer to a renewal",
		"lock/consul/session.go", "s.extend(hold.TTL, timing, sent)", "s.extend(hold.TTL, timing, max(sent, boottime.Now()))").
		failing("lock/consul.TestDeadlinesCountFromTheRequest"),
	one("no-margin", "a lease ends when the session does, not a margin earlier",
		"lock/lock.go", "return sent.Add(t.TTL - t.Margin)", "return sent.Add(t.TTL)").
		failing("lock.TestTimingDeadline"),
	one("half-margin", "a lease ends half a margin before the session",
		"lock/lock.go", "return sent.Add(t.TTL - t.Margin)", "return sent.Add(t.TTL - t.Margin/2)").
		failing("lock.TestTimingDeadline"),
	one("no-deadline", "a lease has no deadline of its own",
		"lock/internal/hold/session.go", "return min(s.deadlines[Check], s.deadlines[TTL], s.deadlines[Silence])", "return never").
		under("cut-both", "overlaps", "late_ends").
		failing("lock/internal/hold.TestDeadlines"),
	one("no-check-deadline", "a lease does not end when heartbeats are not acknowledged",
		"lock/internal/hold/session.go", "return min(s.deadlines[Check], s.deadlines[TTL], s.deadlines[Silence])", "return min(s.deadlines[TTL], s.deadlines[Silence])").
		failing("lock/internal/hold.TestDeadlines"),
	one("no-session-deadline", "a lease does not end when renewals are not acknowledged",
		"lock/internal/hold/session.go", "return min(s.deadlines[Check], s.deadlines[TTL], s.deadlines[Silence])", "return min(s.deadlines[Check], s.deadlines[Silence])").
		failing("lock/internal/hold.TestDeadlines"),
	one("slow-end", "contexts end seconds after the deadline",
		"lock/consul/replica.go", "retry.Pause(ctx, min(left, t.slots.expire(), 500*time.Millisecond))", "_ = min(left, t.slots.expire()); retry.Pause(ctx, 3*time.Second)"),
	one("no-verify", "nobody looks whether held keys are still held",
		"lock/consul/verify.go", "func (k *locks) verify(ctx context.Context, in *leases) {\n", "func (k *locks) verify(ctx context.Context, in *leases) {\n	if ctx != nil {\n		return\n	}\n").
		failing("lock/consul.TestKeyReleasedByOperator"),
	one("no-list", "a key may be taken twice within one session",
		"lock/consul/lease.go", "_, taken := in.own[ls.own]; taken {", "_, taken := in.own[ls.own]; taken && in == nil {").
		under("row-reset", "overlaps").
		failing("lock/consul.TestNoTaskIsHeldTwice"),
	one("held-is-mine", "a key that somebody holds is taken for one's own",
		"lock/consul/commit.go", "	case strings.Contains(what, \"lock is already held\"):\n		return fmt.Errorf(\"%s: %w\", ls.key, lock.ErrHeld)\n", "	case strings.Contains(what, \"lock is already held\"):\n		return nil\n").
		failing("lock/consul.TestReusedNames"),
	one("holder-is-another", "a task's reused name that somebody holds is taken to be another task's",
		"lock/consul/names.go", "return string(holder) != key", "return true").
		failing("lock/consul.TestNoTaskIsHeldTwice"),
	one("no-marker", "nobody looks whether tasks of a group are held under their own names",
		"lock/consul/commit.go", "if marked[g] || slices.Contains(b.marks, g) {", "if marked[g] || len(b.marks) >= 0 {").
		failing("lock/consul.TestOwnNameIsSeenByOthers"),
	one("divert-blind", "a task is locked under its own name, whatever has become of the reused one",
		"lock/consul/commit.go", "			b.add(i, check)\n", "			_ = check\n").
		failing("lock/consul.TestNoTaskIsHeldTwice"),
	one("bare-delete", "a release deletes the key, no matter who holds it",
		"lock/consul/commit.go", `appendOp(b, api.KVDeleteCAS, ls.path, "", nil, ls.index)`, `appendOp(b, api.KVDelete, ls.path, "", nil, 0)`).
		failing("lock/consul.TestReleaseBatch"),
	one("no-release", "a release deletes nothing",
		"lock/consul/lease.go", "ls.in.release(ls)\n	err := ls.err", "err := error(nil)").
		failing("lock/consul.TestOwnNameIsSeenByOthers"),
	one("no-leak-scan", "nobody looks for keys that a restored snapshot has brought back",
		"lock/consul/verify.go", "if pair.Session == in.id && leases[pair.Key] == nil {", "if pair.Session == in.id && leases[pair.Key] == nil && leases == nil {").
		failing("lock/consul.TestLeakedLocksOfARestoredSnapshotAreReleased"),

	one("default-reads", "reads are answered by a server that may be the leader no more",
		"lock/consul/client.go", "RequireConsistent: true", "RequireConsistent: false").
		failing("simulate/fakeconsul.TestAllReadsAreConsistent"),

	// Of the worker, and what it rests on.
	one("begins-late", "a handler begins without a look at the deadline",
		"worker/attempt.go", "	if lease.Deadline().Passed() {\n		return tasks.Result{}, tasks.ErrLeaseEnded\n	}\n	if ctx.Err() != nil {\n		return tasks.Result{}, context.Cause(ctx)\n	}\n", "").
		failing("worker.TestHandlerDoesNotBeginAfterTheDeadline"),
	one("early-release", "the lock is released before the outcome is durable",
		"worker/attempt.go", "	w.run(lease, t, trace, &ended)\n", "	_ = lease.Release(context.Background())\n	w.run(lease, t, trace, &ended)\n").
		failing("worker.TestOutcomeIsDurableBeforeTheLockIsReleased"),
	one("impatient-release", "the lock is released when the outcome has not been written for 5 s",
		"worker/attempt.go", "		*ended = w.returned(ctx, t, of, result, err, began, trace)\n",
		"		done := make(chan struct{})\n		go func() {\n			select {\n			case <-done:\n			case <-time.After(5 * time.Second):\n				_ = lease.Release(context.Background())\n			}\n		}()\n		*ended = w.returned(ctx, t, of, result, err, began, trace)\n		close(done)\n"),
	one("deaf-to-the-lease", "a handler's context does not end with the lease",
		"worker/attempt.go", "context.WithCancelCause(lease.Context())", "context.WithCancelCause(context.WithoutCancel(lease.Context()))").
		failing("worker.TestHandlersHearThatTheirLeaseHasEnded"),
	one("hasty-burial", "replicas are called dead after a quarter of the silence",
		"worker/members.go", "	for _, r := range w.members.silent(lock.Silence) {\n		if time.Since(looked)", "	for _, r := range w.members.silent(lock.Silence / 4) {\n		if time.Since(looked)").
		and("worker/members.go", "silent >= lock.Silence\n", "silent >= lock.Silence/4\n",
			"worker/members.go", "	how, err := w.cfg.Locks.End(ctx, r.Session, lock.Silence)\n	if err != nil {", "	how, err := w.cfg.Locks.End(ctx, r.Session, lock.Silence/4)\n	if err != nil {").
		failing("worker.TestSilenceThatNobodyLookedAt"),
	one("one-second-early", "replicas are called dead two seconds early",
		"worker/members.go", "	for _, r := range w.members.silent(lock.Silence) {\n		if time.Since(looked)", "	for _, r := range w.members.silent(lock.Silence - 2*time.Second) {\n		if time.Since(looked)").
		and("worker/members.go", "silent >= lock.Silence\n", "silent >= lock.Silence-2*time.Second\n",
			"worker/members.go", "	how, err := w.cfg.Locks.End(ctx, r.Session, lock.Silence)\n	if err != nil {", "	how, err := w.cfg.Locks.End(ctx, r.Session, lock.Silence-2*time.Second)\n	if err != nil {").
		failing("worker.TestSilenceThatNobodyLookedAt"),
	one("one-silence", "silence on the list is death, whatever Consul has heard",
		"lock/consul/end.go", "if l.membership.quiet(session, index, asked) < silence {", "if l.membership.quiet(session, index, asked) < 0 {").
		failing("worker.TestTwoWitnesses"),
	one("no-silence-deadline", "a lease does not end when nobody hears of its replica",
		"lock/internal/hold/session.go", "return min(s.deadlines[Check], s.deadlines[TTL], s.deadlines[Silence])", "return min(s.deadlines[Check], s.deadlines[TTL])").
		failing("lock/internal/hold.TestDeadlines"),
	one("no-audit", "claims whose answers are lost are never given back",
		"worker/audit.go", "	if !w.replyLost.Load() {\n		return\n	}\n", "	if !w.replyLost.Load() || w.cfg.MaxCrashes > 0 {\n		return\n	}\n").
		failing("worker.TestClaimsWithoutReplyAreRequeued"),
	one("claims-are-dropped", "a claim is given up when the replica stops",
		"worker/claim.go", "whole := context.WithoutCancel(ctx)", "whole := ctx").
		and("worker/claim.go", "			w.audit(last)\n", "			_ = last\n").
		failing("worker.TestStopsLoseNoClaim"),
	one("audit-beside-claims", "the audit of claims runs beside those under a limit",
		"worker/claim.go", "	w.claiming.RLock()\n	defer w.claiming.RUnlock()\n	c.Session,", "	c.Session,").
		failing("worker.TestAuditBesideLimitedClaims"),
	one("fences-begin-anew", "another server's fences do not begin above those of its predecessor",
		"worker/database.go", "	now.last = now.FencesFrom + server.LastFence\n", "	now.FencesFrom = 0\n	now.last = server.LastFence\n").
		failing("worker.TestFencesRiseThroughARestore"),
	one("stops-cost-attempts", "a stop uses up an attempt",
		"worker/attempt.go", "e.Outcome, e.Next, e.Requeue = tasks.Shutdown, tasks.StatusPending, true", "e.Outcome, e.Next, e.Requeue = tasks.Shutdown, tasks.StatusPending, false").
		failing("worker.TestShutdownGivesWorkBack"),
	one("keeps-locks", "a task that has failed for good keeps a lock that no other task waits for",
		"worker/attempt.go", "		held := lease.Context().Err() == nil\n", "		held := lease.Context().Err() == nil\n		if ended.Next == tasks.StatusFailed && !t.LockShared && slot == nil {\n			return\n		}\n"),
	one("keeps-slots", "a replica does not release each slot that it has had",
		"worker/slots.go", "func (l *limits) release(name string, slot lock.Lease) {\n", "func (l *limits) release(name string, slot lock.Lease) {\n	if time.Now().UnixMicro()%100 == 0 {\n		return\n	}\n"),
	one("a-loss-is-a-stall", "each lease that is lost counts as one that the task has cost",
		"worker/attempt.go", "if e.Stalled = w.stalls.lately(); e.Stalled", "if e.Stalled = true; e.Stalled"),
	one("no-limits", "a slot is had though all are taken",
		"lock/consul/semaphore_view.go", "	case held+n <= v.limit && !v.shut:\n		return nil\n", "	case held+n <= v.limit+1:\n		return nil\n").
		failing("lock/consul.TestSemaphores"),

	// Defects that were, with both witnesses of a death where there was one.
	one("other-consul", "a Consul is believed whose cluster is another one",
		anyConsul[0], anyConsul[1], anyConsul[2]).and(anyConsul[3:]...).and(oneSource...).
		failing("worker.TestWrongConsul"),
	one("filtered-is-ended", "an answer that leaves out what the token may not see is believed",
		"lock/consul/client.go", "case entry == nil && meta.ResultsFilteredByACLs:", "case entry == nil && meta.ResultsFilteredByACLs && client == nil:").
		and(oneSource...).
		failing("lock/consul.TestFilteredIsNotEnded"),
	one("planted-key", "a key that no session holds shows that its replica lives",
		"lock/consul/membership.go", "session := strings.TrimPrefix(pair.Key, prefix); session == pair.Session {", "session := strings.TrimPrefix(pair.Key, prefix); session != \"\" {").
		and(oneSource...).
		failing("lock/consul.TestKeyOfNoSession"),
}

// anyConsul makes replicas work with any Consul.
var anyConsul = []string{
	"lock/consul/cluster.go", "	case pair == nil:\n		return fmt.Errorf(\"%w: the key %s is gone\"", "	case id != \"\":\n		return nil\n	case pair == nil:\n		return fmt.Errorf(\"%w: the key %s is gone\"",
	"lock/consul/cluster.go", "		if err := cluster.Adopt(ctx, id, known", "		if id != \"\" {\n			return id, nil\n		}\n		if err := cluster.Adopt(ctx, id, known",
}

// oneSource makes Consul's word all that a takeover needs.
var oneSource = []string{
	"worker/takeover.go", "case !known:", "case !known, s != \"\":",
	"simulate/fakestore/database.go", "|| listed && m.EndedAt.IsZero() {", "{",
}

// simulatedToo says that the simulation must catch one of the others.
func (m Mutant) simulatedToo() Mutant {
	m.Simulated = true
	return m
}

// others are mutants of what the simulation does not run, or does not break, but for those that
// say so.
var others = []Mutant{
	one("a-stop-is-a-crash", "a replica that stops while a handler ignores its context does not say that it stops",
		"lock/consul/replica.go", "	case held:\n		t.saySo(ctx)\n", "	case held:\n").
		failing("worker.TestHandlerThatNeverReturns"),

	// Fences and sessions in statements.
	one("fence", "the status is written under any fence",
		"store/complete.go", "THEN fence = ANY (@fences) AND session = ANY (@sessions) END", "THEN true END").
		and("store/complete.go", "JOIN before b ON b.id = g.id AND b.fence = g.fence AND b.session = g.by\n", "JOIN before b ON b.id = g.id\n",
			"store/complete.go", " RETURNING t.fence\n), history AS (", " RETURNING g.fence\n), history AS (").
		under("freeze", "stale_accepted").
		failing("store.TestCompleteRefused"),
	one("requeue-fence", "a task is requeued under any fence",
		"store/complete.go", "THEN fence = ANY ($2) AND session = ANY ($4) END\n       FOR NO KEY UPDATE SKIP LOCKED", "THEN true END\n       FOR NO KEY UPDATE SKIP LOCKED").
		and("store/complete.go", "       AND t.fence = g.fence\n       AND t.session = g.by\n", "").
		failing("store.TestRequeue"),
	one("fence-in-the-join", "of two completions of a task in one batch the stale one may be written",
		"store/complete.go", "AND b.fence = g.fence AND b.session = g.by\n     WHERE t.id = g.id\n", "AND b.session = g.by\n     WHERE t.id = g.id\n").
		failing("store.TestTwoFencesOfATaskInOneBatch"),
	one("history-before", "the history has attempts whose completions were not accepted",
		"store/complete.go", "      FROM accepted a\n      JOIN before b ON b.fence = a.fence\n", "      FROM before b\n").
		failing("store.TestHistoryBesideEdits"),
	one("asked-once", "a statement's completion is refused if an edit of the row was committed while it waited",
		"store/complete.go", "if err == nil && len(rest) > 0 { // what it waited for", "if err == nil && len(rest) > 999 { // what it waited for").
		failing("store.TestCompleteWithBesideAnEdit"),
	one("any-crash-is-mine", "who was called dead takes back a crash that another replica was charged",
		"store/complete.go", "       AND w.charged IS NOT FALSE\n", "").
		and("store/complete.go", "WHERE outcome = 'crashed' AND charged IS NOT FALSE))", "WHERE outcome = 'crashed'))").
		failing("store.TestWhoIsRefusedHasLived"),
	one("not-durable", "outcomes are written as the role's synchronous_commit says",
		"store/pool.go", "THEN pg_catalog.set_config('synchronous_commit', 'on', true) END", "THEN 'off' END").
		failing("store.TestWhatIsCommittedIsDurable"),
	one("few-lanes", "claims remember what they have passed of 64 lanes alone",
		"store/choose.go", "	maxMarks    = 1024\n", "	maxMarks    = 64\n").
		failing("store.TestManyBusyLanesHideNothing"),
	one("restless-claims", "claims that pass more busy lanes than are remembered go on without a pause",
		"store/choose.go", "		return c.picked > 0\n", "		return true\n").
		failing("store.TestMoreBusyLanesThanAreRemembered"),
	one("avoided-first", "a row that Postgres refuses stays the first of its lock key",
		"store/choose.go", "NOT known AND id <> ALL (@avoid)\n", "NOT known\n").
		and("store/choose.go", "              AND id <> ALL (@avoid)  -- marks\n", "").
		failing("store.TestARefusedRowKeepsNoneOfItsLockKey"),
	one("paused-first", "a row of a paused queue stays the first of its lock key",
		"store/choose.go", "       AND t.queue <> ALL ((SELECT queues FROM paused)::text[])  -- marks\n", "").
		failing("store.TestARowOfAPausedQueueKeepsNoneOfItsLockKey"),
	one("result-blamed", "a success that a trigger refuses becomes a failure of its result",
		"store/complete.go", "e.Result != nil && s.refusesResult(ctx, e):", "e.Result != nil:").
		failing("store.TestAResultThatIsNotToBlame"),
	one("result-blamed-late", "a result is blamed for what refused it a moment ago, and accepts it now",
		"store/complete.go", "errors.Is(try(bare), rolledBack) && unfit(try(with))", "errors.Is(try(bare), rolledBack) && with.Result != nil").
		failing("store.TestAResultThatWasRefusedForAMoment"),
	one("outcome-dropped", "an outcome that Postgres refuses is given up after some seconds",
		"worker/attempt.go", "		case last:\n", "		case last, refused == unwritableTries:\n").
		failing("worker.TestATaskWhoseOutcomeIsRefusedRunsOnce"),
	one("lost-lock-stays", "the lock of an attempt that has ended, and whose outcome Postgres refuses, stays when its session is lost",
		"worker/attempt.go", "lease != nil && tries == unwritableTries", "lease != nil && tries < 0").
		failing("worker.TestConsulIsWipedBesideAnOutcomeThatIsRefused"),
	one("end-forgotten", "how a session has ended is forgotten while a row still runs under it",
		"store/replicas.go", "                               AND (SELECT true FROM onejob.tasks t WHERE t.status = 'running' AND t.session = replicas.session LIMIT 1) IS NULL\n", "").
		failing("store.TestAnEndThatIsStillNeeded"),
	one("old-zone-rules", "a due time that new rules of a zone make earlier comes when it was to come before",
		"worker/schedules.go", "			s.followZones(ctx, &zones)\n", "			_ = zones\n").
		failing("worker.TestADueTimeThatHasBecomeEarlier"),
	one("one-mark", "the command of a daemon that is a command itself has no mark of the outer guard",
		"internal/guard/process.go", "	if outer == \"\" {", "	if outer != \"\" || outer == \"\" {").
		failing("internal/guard.TestGuardOfADaemon"),
	one("fence-twice", "a claim that is put back because fences have gone back takes the place of the attempt with its fence",
		"worker/claim.go", "		key = -key\n", "		key += 0\n").
		failing("worker.TestAFenceThatIsGivenOutTwice"),
	one("busy-keys-anew", "a lane with more busy lock keys than are remembered is looked at from its first row again",
		"store/choose.go", "			m.busy = map[string]bool{}\n		}\n		l.marks[lane] = m\n	}\n	switch", "			delete(l.marks, lane)\n			continue\n		}\n		l.marks[lane] = m\n	}\n	switch").
		failing("store.TestMoreBusyKeysThanAreRemembered"),
	one("late-grace", "the grace of a stop begins at the end of the claim that was under way",
		"worker/worker.go", "		grace = max(0, grace-time.Since(at))\n", "		_ = at\n").
		failing("worker.TestGraceBesideASlowClaim"),
	one("slot-before-room", "a stop waits for a backend that does not answer who gives a slot back",
		"worker/slots.go", "		case ctx.Err() != nil: // a stop", "		case false: // a stop").
		failing("worker.TestStopWhileASlotCannotBeGivenBack"),
	one("any-duplicate", "a prepared statement of the user's that is there already means a pooler",
		"store/pool.go", "strings.Contains(pg.Message, statementPrefix) && p.hidden", "p.hidden").
		failing("store.TestStatementsLeaveNothingBehind"),
	one("bounded-migrations", "a migration may not take longer than other statements",
		"store/migrate.go", "IN ('lock_timeout', 'statement_timeout', 'transaction_timeout', 'client_min_messages')", "IN ('lock_timeout')").
		failing("store.TestMigrateTakesAsLongAsItTakes"),
	one("dead-connection", "a connection that has died without a word stays in use",
		"tasks/kinds/http/http.go", "	protocols.SetHTTP1(true)\n", "	protocols.SetHTTP1(true)\n	protocols.SetHTTP2(true)\n").
		failing("tasks/kinds/http.TestDeadConnectionIsLeft"),
	one("all-of-the-past", "every due time that has passed is recorded, however many there are",
		"tasks/schedule/plan.go", "case d.Part.Planned+len(dues) >= maxPlanned:", "case false:").
		failing("tasks/schedule.TestPlansOfALongTime"),
	one("unread-pages", "pages that nobody reads have as much memory as they like",
		"internal/web/web.go", "p.unsent.Add(size) > maxUnsent", "p.unsent.Add(size) < 0").
		failing("internal/web.TestViewersWhoDoNotRead"),
	one("slow-rows", "a bulk action fails where its tasks take too long together",
		"store/bulk.go", "case slow && most > 1:", "case slow && most < 0:").
		failing("store.TestBulkGoesOnBehindSlowRows"),
	one("unquoted-names", "a suggested command has the name of a limit as it is",
		"internal/plaintext/plaintext.go", "	return Quoted(s)\n", "	return s\n").
		failing("internal/plaintext.TestWords"),
	one("short-lock-delay", "a lock without a task has no longer lock-delay than its lease",
		"internal/cli/lock.go", "max(lockConfig.LockDelay, lasts)", "lasts").
		failing("cmd/onejob.TestScripts/lock"),
	one("requeue-fence-in-the-join", "of two requeues of a task in one batch the stale one may be written",
		"store/complete.go", "       AND t.fence = g.fence\n       AND t.session = g.by\n       AND t.id", "       AND t.session = g.by\n       AND t.id").
		failing("store.TestTwoFencesOfATaskInOneBatch"),
	one("statement-fence", "a statement begins under any fence, and those of who died go on",
		"store/statement.go", "case !ours:", "case !ours && ctx == nil:").
		and("store/backends.go", "	for wait := 2 * time.Millisecond; ; wait *= 2 {\n		left, err := query(", "	if s != nil {\n		return nil, nil\n	}\n	for wait := 2 * time.Millisecond; ; wait *= 2 {\n		left, err := query(").
		under("worker-kill", "double_statements").
		failing("store.TestDeathEndsStatements"),
	one("record", "locks are had whatever the record of the database says",
		"lock/consul/commit.go", "if version := list[0].database; version != 0 {", "if version := list[0].database; version < 0 {").
		failing("lock/consul.TestLocksNeedTheRecord"),
	one("any-server", "a claim is taken by whatever server answers",
		"worker/database.go", "c.Server, c.FencesFrom = d.record.Started, d.record.FencesFrom", "c.FencesFrom = d.record.FencesFrom").
		and("worker/database.go", "ours := d.trusted && d.record.Started.Equal(t.Server) && t.Fence > d.record.above()", "ours := true").
		and("lock/consul/commit.go", "if version := list[0].database; version != 0 {", "if version := list[0].database; version < 0 {").
		failing("worker.TestSplitBrain"),
	one("successor", "replicas stay with an old primary that lives on",
		"store/successor.go", "if server.System == tasks.UnknownSystem {", "if server.System != \"\" {").
		failing("worker.TestSplitBrain"),
	one("record-of-another-session", "what was found of the database during another session is believed",
		"worker/database.go", "return d.highest, d.trusted && d.session == session", "return d.highest, d.trusted").
		failing("worker.TestRecordIsLookedAtForEachSession"),
	one("set-back", "what was written ahead of Postgres' clock stays so",
		"worker/clock.go", "if repair {", "if repair = false; repair {").
		failing("worker.TestPostgresClockIsSet"),

	// Indexes.
	one("index", "two rows of one lock key may be running",
		"migrations/042_bytes.sql", "CREATE UNIQUE INDEX one_running_task_per_lock_key", "CREATE INDEX one_running_task_per_lock_key").
		under("none", "double_running").
		failing("store.TestPostgresRefusesASecondRunningRow"),

	// How a death is found.
	one("ended-is-dead", "an ended session is all it takes to take tasks over",
		"lock/consul/membership.go", "if ended && boottime.Now().Sub(e.at) >= c.wait(e) {", "if ended && c.wait(e) >= 0 {").
		and("worker/takeover.go", "case !known:", "case !known, s != \"\":",
			"store/takeover.go", "AND r.ended_at IS NULL LIMIT 1) IS NULL", "AND false) IS NULL").
		under("session-unheard", "overlaps", "limit_excesses").
		failing("store.TestTakeOverNeedsTheList"),
	one("any-consul", "a replica works with any Consul", anyConsul[0], anyConsul[1], anyConsul[2]).and(anyConsul[3:]...).
		under("wrong-consul", "limit_excesses", "overlaps").
		failing("worker.TestWrongConsul"),
	one("silence", "silence on one server is death, whatever another one hears",
		"worker/members.go", "case r.Here:", "case r.Here, !r.Here:").
		failing("worker.TestSilenceBesideASplitBrainIsNoDeath"),
	one("wrong-verdict", "a session that was found dead stays so, whatever it does",
		"lock/consul/membership.go", "		delete(c.ended, s) // it is held", "		if c.ended[s].buried {\n			continue\n		}\n		delete(c.ended, s) // it is held").
		failing("lock/consul.TestWrongDeathIsTakenBack"),
	one("stopped", "a replica that stops tells nobody but Postgres",
		"lock/consul/replica.go", "if t.leave(ctx, lost) != nil {", "if t.leave(ctx, lost); false {").
		failing("worker.TestStopWithoutPostgres"),
	one("late", "takeovers begin 20 s late",
		"worker/takeover.go", "	abandoned, refused, err := w.cfg.Store.TakeOver(", "	select {\n	case <-ctx.Done():\n	case <-time.After(20 * time.Second):\n	}\n	abandoned, refused, err := w.cfg.Store.TakeOver(").
		under("kill", "late_takeovers").
		simulatedToo(),

	one("deaf", "nobody sees that a session has ended when its key goes",
		"lock/consul/session.go", `	entry, err := s.lookAt(ctx, s.heartbeats, s.id)
	if err == nil && entry == nil {
		s.lose(fmt.Errorf("%s %s was ended from outside", s.kind, s.id))
	}
	return entry != nil, err`, `	_, err := s.lookAt(ctx, s.heartbeats, s.id)
	return true, err`).
		failing("lock/consul.TestNarrowedTokenLosesNoSession"),

	// Blame for a death.
	one("begun", "tasks are charged with the deaths of replicas where they had not begun",
		"store/takeover.go", "coalesce(begun_at >= started_at, false) AS begun", "true AS begun").
		failing("store.TestOnlyTheLikelyCauseIsQuarantined"),
	one("charged-together", "a task is charged with the deaths of several replicas at once",
		"store/takeover.go", "AND begun AND NOT others_died", "AND begun").
		failing("store.TestWhoIsToBlame"),
	one("alone-by-statement", "a suspect that an earlier statement left behind was alone",
		"store/takeover.go", "(SELECT coalesce((SELECT r.suspects FROM onejob.replicas r WHERE r.session = t.session LIMIT 1), count(*)) = 1", "(SELECT count(*) = 1").
		failing("store.TestSuspectsThatAreTakenOneByOne"),
	one("hasty-quarantine", "nobody waits to hear who else died before a task is quarantined",
		"store/takeover.go", "AND NOT others_died AND others_unheard)", "AND NOT others_died AND others_unheard AND false)").
		failing("store.TestQuarantineWaitsForOtherDeaths"),
	one("stalls-pass", "replicas that freeze over a task, and come back, do not quarantine it",
		"store/takeover.go", "crashes + stalls + 1 >= $2 AS last,\n           $2 = 1 OR crashes + stalls + 1 >= $2 AND", "crashes + 1 >= $2 AS last,\n           $2 = 1 OR crashes + 1 >= $2 AND").
		failing("worker.TestReplicasFreezeOverATask"),
	one("stalls", "tasks that stall replicas are not charged",
		"worker/attempt.go", "if e.Stalled = w.stalls.lately(); e.Stalled", "if e.Stalled = false; e.Stalled").
		failing("worker.TestStallsAreHeldAgainstTheTask"),

	one("suspects-together", "several suspects begin at once",
		"worker/suspects.go", "	case s.left == 0, s.alone, prime && s.left < s.batch:\n		return false\n", "	case s.left < -1000:\n		return false\n").
		failing("worker.TestSuspects"),

	// Claims.
	one("patient", "statements that write rows wait for triggers for as long as those like",
		"store/patience.go", "min(lockPatience, timeout/4)>>vain, timeout/rowStatementPart", "time.Hour>>vain, time.Hour").
		failing("store.TestATriggerStopsNoOthers"),
	one("kept-waiting-in-rooms", "outcomes and requeues take room for as long as their rows keep them waiting",
		"worker/running.go", "|| r.parked == maxParked {", "|| r.parked == 0 {").
		failing("worker.TestRoomIsGivenBackOnce"),
	one("one-key-stops-all", "a lock key that Consul refuses closes the gate for all tasks",
		"worker/attempt.go", "if w.othersHadLocks() {", "if false {").
		failing("worker.TestLockKeysThatConsulRefusesStopNoOthers"),
	one("waits-to-put-back", "claims wait until their tasks are requeued, as long as Postgres is unavailable",
		"worker/claim.go", "	w.running.start(key, len(t.Payload), func() bool { w.requeue(t, why); return true }, w.left)\n}", "	w.running.begin(t.Fence, len(t.Payload))\n	w.requeue(t, why)\n	w.running.end(t.Fence)\n	w.running.leave(1)\n	w.left(true)\n}").
		failing("worker.TestStopWithClaimedTasksAndNoPostgres"),
	one("heartbeats-wait", "heartbeats wait until Consul has said what it knows of others",
		"worker/members.go", "	notify(w.listed)\n", "	w.lookForDeaths(ctx)\n").
		failing("worker.TestHeartbeatsDoNotWaitForConsul"),
	one("never-blind", "silence counts while Consul did not answer the observer",
		"lock/consul/membership.go", "			c.blind()\n", "").
		failing("lock/consul.TestSilenceThatCouldNotBeHeard"),
	one("forgotten-slots", "slots of a limit that a restored snapshot forgot are free at once",
		"lock/consul/semaphore_view.go", "	case v.lock.ModifyIndex < before:", "	case v.lock.ModifyIndex < 0:").
		failing("lock/consul.TestSlotThatARestoredSnapshotForgets"),
	one("limit-anew", "a limit that a restored snapshot does not know is made anew and entered",
		"lock/consul/semaphore_view.go", "if before != 0 && s.recorded && s.holders > 0 && v.setting == nil {", "if before == 1 {").
		failing("lock/consul.TestLimitThatARestoredSnapshotForgets"),
	one("hidden-restore", "who gives back a slot of a restored snapshot hides the restore from others",
		"lock/consul/semaphore_change.go", "if p.add(st) && holds && !p.v.shut {", "if p.add(st) && holds {").
		failing("lock/consul.TestSlotThatIsGivenBackAfterARestore"),
	one("two-moments", "silence on the list and in Consul count though they are of two moments",
		"lock/consul/end.go", "!silent || err != nil {", "!silent && err != nil {").
		failing("lock/consul.TestSilenceIsWatched"),
	one("unwatched", "a replica is silent in Consul though nobody has looked at its key meanwhile",
		"lock/consul/end.go", "if index != 0 && l.membership.watched(session) < silence-lock.Unwatched {", "if index != 0 && l.membership.watched(session) < 0 {").
		failing("lock/consul.TestSilenceIsWatched"),
	one("looks-in-vain", "looks at the keys of doubted replicas see no signs of life",
		"lock/consul/membership.go", "		if known, ok := c.signs[s]; !ok || known.index != pair.ModifyIndex {\n			c.signs[s] = sign{pair.ModifyIndex, now}", "		if known, ok := c.signs[s]; !ok && known.index != pair.ModifyIndex {\n			c.signs[s] = sign{pair.ModifyIndex, now}").
		failing("lock/consul.TestLooksSeeSigns"),
	one("unheard-silence", "silence counts up to now, not up to the last answer",
		"worker/members.go", "	return s.Replica, m.heard.Sub(s.since), known\n", "	return s.Replica, boottime.Now().Sub(s.since), known\n").
		and("worker/members.go", "if !r.State.Final() && m.heard.Sub(r.since) >= long {", "if !r.State.Final() && boottime.Now().Sub(r.since) >= long {").
		failing("worker.TestSilenceThatNobodyLookedAt"),
	one("data-alone", "only data errors count as those of one row",
		"store/store.go", "	return pg.Code != duplicateStatement\n", "	return unfit(err)\n").
		failing("store.TestATriggerStopsNoOthers"),
	one("claims-are-given-up", "a claim is given up when the replica begins to stop",
		"worker/claim.go", "whole := context.WithoutCancel(ctx)", "whole := ctx").
		failing("worker.TestStopsLoseNoClaim"),
	one("lock-gate", "claims go on while locks cannot be had",
		"worker/claim.go", "if pass := w.lockGate.pass(room); pass < room {", "if pass := w.lockGate.pass(room); pass < 0 {").
		failing("worker.TestFencesAreNotUsedUpWhileLocksFail"),
	one("run-at", "tasks are claimed before they are due",
		"store/choose.go", `strings.ReplaceAll(choose, "{limit}", "limit_name IS NULL")`, "mutantRunAt.Replace(strings.ReplaceAll(choose, `{limit}`, `limit_name IS NULL`))").
		and("store/choose.go", `strings.ReplaceAll(choose, "{limit}", "limit_name = @limit")`, "mutantRunAt.Replace(strings.ReplaceAll(choose, `{limit}`, `limit_name = @limit`))",
			"store/choose.go", "// withoutMarks finds", `var mutantRunAt = strings.NewReplacer(
	"next.run_at <= statement_timestamp()", "next.run_at < 'infinity'",
	"AND run_at <= statement_timestamp()\n", "AND run_at < 'infinity'\n",
	"t.run_at <= statement_timestamp()", "t.run_at < 'infinity'",
	"OR run_at > statement_timestamp() OR", "OR run_at = 'infinity' OR")

// withoutMarks finds`).
		under("none", "illegal_steps").
		failing("store.TestDueByPostgresClock"),

	// Leases.
	one("creation-answer", "the lease counts from the answer to the creation of the session",
		"lock/consul/session.go", "s.Begin(hold.TTL, s.cfg.session(), sent)", "s.Begin(hold.TTL, s.cfg.session(), max(sent, boottime.Now()))").
		failing("lock/consul.TestDeadlinesCountFromTheRequest"),
	one("revival", "a heartbeat that is acknowledged late revives a lease that has ended",
		"lock/internal/hold/session.go", "	if s.until() <= now {\n		return false\n	}\n", "").
		failing("lock/internal/hold.TestDeadlines"),
	one("heard-at-the-answer", "the list's word counts from its answer",
		"worker/members.go", "w.cfg.Locks.Heard(session, sent)", "w.cfg.Locks.Heard(session, max(sent, boottime.Now()))").
		failing("worker.TestSilenceCountsFromTheHeartbeat"),
	one("no-doubt", "a request that was given up on is forgotten, though it may be applied late",
		"lock/consul/lease.go", "return doubt != 0 && boottime.Now().Sub(doubt) < lateness", "return false").
		failing("lock/consul.TestDoubt"),
	one("no-jumps", "nobody notices that the machine was paused",
		"lock/internal/hold/session.go", "jump := c.jumps.Since()", "jump := min(c.jumps.Since(), 0)").
		failing("lock/internal/hold.TestJump"),
	one("stale-heartbeat", "a heartbeat that was sent before a pause extends the lease after it",
		"lock/internal/hold/session.go", "stale := sent <= s.clock.jumped", "stale := false").
		failing("lock/internal/hold.TestJump"),
	one("pause", "nobody notices that the machine was paused",
		"boottime/jumps.go", "if first || jump <= Noise {", "if first || jump <= Noise || jump > 0 {").
		failing("lock/consul.TestPause"),
	one("suspended", "time for which the machine was suspended does not count",
		"boottime/clock_linux.go", "const clock = unix.CLOCK_BOOTTIME", "const clock = unix.CLOCK_MONOTONIC").
		failing("boottime.TestNowCountsSuspendedTime"),
	one("lock-key", "onejob lock has keys of its own",
		"internal/cli/lock.go", "return wholeLock{locks, key}, nil", `return wholeLock{locks, key + " of nobody"}, nil`).
		under("outsider-cut", "overlaps"),
	one("delay", "slots in RabbitMQ are free as soon as their holder has died",
		"lock/rabbitmq/look.go", "	if len(without) == 0 {\n		return nil, nil\n	}\n	found, err", "	if len(without) >= 0 {\n		return nil, nil\n	}\n	found, err").
		and("lock/rabbitmq/look.go", "delayed := slices.Contains(found[:len(mine)], true)", "delayed := slices.Contains(found[:0], true)").
		failing("lock/rabbitmq.TestNeverBesideADyingCommand"),

	one("early-slot", "a slot is free 50 ms after its work began",
		"worker/attempt.go", "		lease = newUnderSlot(lease, slot)\n", "		lease = newUnderSlot(lease, slot)\n		time.AfterFunc(50*time.Millisecond, func() { _ = slot.Release(context.Background()) })\n").
		under("none", "limit_excesses").
		failing("worker.TestLimitHolds"),

	// Processes.
	one("exits", "a replica ends by itself in one of 150 attempts",
		"worker/attempt.go", "	result, err = handler(ctx, a)\n", "	if a.Fence%150 == 0 {\n		go panic(\"it ends by itself\")\n	}\n	result, err = handler(ctx, a)\n").
		under("none", "worker_crashes").
		failing("worker.TestManyTasksInOneProcess"),
	one("guard", "nobody stops commands",
		"internal/guard/reaper.go", "if k.phase != running || k.gone {\n		return\n	}\n	k.phase, k.reason", "if k.phase != running || k.gone || k != nil {\n		return\n	}\n	k.phase, k.reason").
		and("internal/guard/process.go", "	late := 0\n	for {\n", "	late := 0\n	for p == nil {\n").
		under("kill,freeze", "overlaps", "late_ends").
		failing("internal/guard.TestStopLeavesTheGraceToTheWholeGroup"),
	one("lapse", "a command is killed 3 s after its lease, not 0.5 s",
		"internal/guard/reaper.go", "k.deadline.Add(min(k.grace, lapse))", "k.deadline.Add(min(k.grace, 3*time.Second))").
		under("freeze,cut-consul", "late_ends").
		failing("internal/guard.TestNoGraceOutlivesTheLease"),
	one("cgroup", "what is in a command's cgroup is not killed",
		"internal/guard/cgroup.go", "	if g == nil {\n		return\n	}\n	if err := write(filepath.Join(g.dir, \"cgroup.kill\")", "	if g != nil {\n		return\n	}\n	if err := write(filepath.Join(g.dir, \"cgroup.kill\")").
		and("internal/guard/cgroup.go", "for pause := time.Millisecond; g.populated(); pause = min(2*pause, 50*time.Millisecond) {", "for pause := time.Millisecond; g.populated() && g == nil; pause = min(2*pause, 50*time.Millisecond) {").
		failing("internal/guard.TestSwarmIsDeadBeforeWaitReturns"),
	one("burial", "a death is made known before all that the process left is dead",
		"internal/supervisor/supervisor.go", "	for end := time.Now().Add(shutdownTimeout); time.Now().Before(end) && !s.alone(); {", "	if s.worker != nil || s.worker == nil {\n		return 0, nil, true\n	}\n	for end := time.Now().Add(shutdownTimeout); time.Now().Before(end) && !s.alone(); {").
		under("worker-kill", "overlaps").
		failing("internal/supervisor.TestNothingIsLeftBehind"),
	one("left-at-a-stop", "what handlers have started lives on when the replica stops in order",
		"internal/supervisor/supervisor.go", "				if s.everReady { //", "				if false { //").
		failing("internal/supervisor.TestStopsLeaveNothingBehind"),
	one("early-signal", "a working process that has just begun gets signals at once",
		"internal/supervisor/supervisor.go", "		if w.here {\n			w.pass(sig)", "		if w.here || !w.gone {\n			w.pass(sig)").
		failing("internal/supervisor.TestSignalAtTheStart"),

	// They do less than they should, or other things, and never two things at once.
	one("schedules", "due times make no tasks",
		"tasks/schedule/plan.go", "		p.Occurrences[i] = o\n", "		o.Skipped = SkippedMissed\n		p.Occurrences[i] = o\n").
		under("none", "occurrences_missing").
		failing("tasks/schedule.TestPlan"),
	one("edits", "what was due before an edit of a schedule is dropped",
		"tasks/schedule/plan.go", "		if err == nil {\n			var next time.Time\n			if f.Next", "		if err == nil && f.ID < 0 {\n			var next time.Time\n			if f.Next").
		under("schedule-edit", "occurrences_missing").
		failing("tasks/schedule.TestPlan"),
	one("overlap-skip", "a due time makes a task though the one before it runs",
		"tasks/schedule/plan.go", "			busy = true\n", "			busy = false\n").
		and("tasks/schedule/plan.go", "			if busy {\n", "			if busy && waiting < 0 {\n").
		under("none", "occurrences_wrong").
		failing("tasks/schedule.TestPlan"),
	one("overlap-queue", "due times make more tasks that wait than queue_cap says",
		"tasks/schedule/plan.go", "if waiting >= d.QueueCap {", "if waiting > d.QueueCap {").
		failing("tasks/schedule.TestPlan"),
	one("missed-one", "of missed due times the last one is not made up for",
		"tasks/schedule/plan.go", "d.OnMissed == MissedOne && i == len(dues)-1", "d.OnMissed == MissedOne && i == len(dues)").
		failing("tasks/schedule.TestPlan"),
	one("missed-cap", "more missed due times are made up for than missed_cap says",
		"tasks/schedule/plan.go", "missed > d.MissedCap", "missed > d.MissedCap+1").
		failing("tasks/schedule.TestPlan"),
	one("retries", "the first failure is the last",
		"worker/attempt.go", "if t.Attempt < t.MaxAttempts && !tasks.IsPermanent(err) {", "if t.Attempt < 0 && !tasks.IsPermanent(err) {").
		under("none", "illegal_steps").
		simulatedToo().failing("worker.TestOutcomes"),
	one("doubling", "the delay of retries stays the same",
		"worker/attempt.go", "if shift := attempt - 1; shift < 40", "if shift := min(attempt-1, 0); shift < 40").
		simulatedToo().failing("worker.TestRetryDelayDoubles").under("none", "illegal_steps"),
	one("lost-fails", "a task fails when its lease is lost",
		"worker/attempt.go", "e.Outcome, e.Next, e.Requeue, e.Delay = tasks.LeaseLost, tasks.StatusPending, true, w.cfg.LockDelay", "e.Outcome, e.Next, e.Requeue, e.Delay = tasks.LeaseLost, tasks.StatusFailed, false, w.cfg.LockDelay").
		under("session-destroy", "illegal_steps").
		simulatedToo().failing("worker.TestOneKeyDeletedByAnOperator"),
	one("cancels", "nobody hears that a running task is to be cancelled",
		"worker/cancel.go", "if session == \"\" || w.running.count() == 0 {", "if session == \"\" || w.running.count() >= 0 {").
		under("none", "overstays").
		failing("worker.TestOutcomes"),
	one("statements-in-the-pool", "statements of tasks take the connections of claims and completions",
		"store/complete.go", "pgx.BeginFunc(ctx, s.works, ", "pgx.BeginFunc(ctx, s.pool, ").
		failing("store.TestStatementsThatWaitStopNoOthers"),
	one("backlog-first", "rows with a limit are looked for, and find memory for payloads, when no others are due",
		"worker/claim.go", "if time.Since(served) >= serveEvery {", "if time.Since(served) < 0 {").
		and("worker/claim.go", "		most -= most / 4 ", "		most -= most / 4 * 0 ").
		failing("worker.TestLimitsBesideABacklog"),
	one("limits-first", "tasks with a limit are first each time, whatever their limit took last time",
		"worker/claim.go", "		first := limited && turn ", "		first := limited ").
		failing("worker.TestManySlotsBesideOthers"),
	one("room-for-the-silent", "room is kept for as long as a slot is asked for",
		"worker/slots.go", "time.AfterFunc(slotPatience, func", "time.AfterFunc(time.Hour, func").
		failing("worker.TestLimitsThatDoNotAnswer"),
	one("two-backends", "replicas that keep limits in different places take slots at the same time",
		"worker/members.go", "r.LimitsBackend != \"\" && r.LimitsBackend != m.me.LimitsBackend", "r.LimitsBackend != \"\" && m.me.LimitsBackend == \"\"").
		failing("worker.TestSameBackend"),
	one("stopped-guard", "a guard that somebody has stopped is left alone while the lease lasts",
		"internal/guard/process.go", " || stopped(p.guard.Pid)", " || p.guard.Pid == 0 && stopped(0)").
		failing("internal/guard.TestGuardFrozen"),
	one("zombies-live", "a process that nobody has waited for counts as alive",
		"internal/procfs/procfs.go", "(now.Dead || now.Start != start)", "now.Start != start").
		failing("internal/procfs.TestGone"),
	one("passed-over", "retention passes over a row that it cannot delete, and over all that have its time",
		"store/schedules.go", "e.until, e.skipAt, e.skip = until-1, until, append(e.skip, id)", "e.until, e.skipAt, e.skip = until, until, append(e.skip, id)").
		failing("store.TestOneReferencedRowStopsNoRetention"),
	one("halving", "retention begins with a thousand rows again behind each that it cannot delete",
		"store/schedules.go", "		s.kept.shrink(status, max(most/2, 1))\n		if most == 1 {", "		s.kept.shrink(status, max(most/2, 1))\n		if most == 1 {\n			s.kept.shrink(status, 0)").
		failing("store.TestManyReferencedRowsCostLittle"),
	one("hang-up", "a program goes on whose worker has died of a signal that was passed on to it",
		"internal/supervisor/supervisor.go", "slices.Contains(w.passed, w.status.Signal())", "len(w.passed) > 99").
		failing("internal/supervisor.TestSignalWithoutAHandler"),
	one("pause-begin", "an interval is counted from the beginning of a pause that is shorter",
		"tasks/schedule/cron.go", "every && pauseEnd != nil && begin.Before(*pauseEnd)", "every && pauseEnd != nil && c.Next(begin).Before(*pauseEnd)").
		failing("tasks/schedule.TestPlan"),
	one("forgotten", "after a failover fences begin as if the database had forgotten nothing",
		"worker/database.go", "begin += 2 * fencesApart", "begin += 0").
		failing("worker.TestFencesAfterForgottenConsul"),
	one("same-start", "two records that are chosen from the same knowledge begin with the same fences",
		"worker/database.go", " + rand.Int64N(fencesApart)", " + 0*rand.Int64N(fencesApart)").
		failing("worker.TestFencesOfManyConsuls"),
	one("not-alone", "a statement begins beside another one of its lock key, whose row a person has changed",
		"store/statement.go", "	case !alone && !strangers:\n", "	case false:\n").
		failing("store.TestOneStatementOfALockKey"),
	one("deaf-to-loss", "who locks a key waits for Consul's answer when the session is lost",
		"lock/consul/commit.go", "context.AfterFunc(list[0].in.Context(), cancel)", "context.AfterFunc(context.Background(), cancel)").
		failing("lock/consul.TestNoAnswerUnderALostSession"),
	one("left-behind", "the statement of a row that a person has changed goes on after the death of its replica",
		"store/backends.go", "   AND ended_at IS NOT NULL`, arg)", "   AND ended_at IS NOT NULL AND false`, arg)").
		failing("store.TestDeathEndsStatements"),
	one("old-room", "an attempt that was taken over ends the statement of its successor",
		"store/backends.go", "CASE WHEN fence = $3 THEN status = 'running' END)`, t.ID", "CASE WHEN fence <> $3 THEN true ELSE status = 'running' END)`, t.ID").
		failing("store.TestNoRoomForAnOldAttempt"),
	one("no-clock", "where neither Consul nor Postgres remembers the last fences, nothing does",
		"worker/database.go", "givenOut+fenceBlock, clock, above)", "givenOut+fenceBlock, 0*clock, above)").
		failing("worker.TestFencesAfterBothAreRestored"),
	one("no-mark", "a fence is used that the record does not cover",
		"worker/database.go", "covered, version := t.Fence <= d.record.FencesTo, d.version", "covered, version := true, d.version").
		failing("worker.TestFencesToIsRaised"),
	one("any-sequence", "a sequence of fences that was made anew passes for the one on record",
		"worker/database.go", `return r.Same(server.Server) && (r.Sequence == "" || r.Sequence == server.Sequence)`, `return r.Same(server.Server)`).
		failing("worker.TestFencesRiseThroughADump"),
	one("mark-stays", "the end of the fences on record is not raised",
		"worker/database.go", "r.FencesTo, r.By, r.At = fence+fenceBlock,", "r.FencesTo, r.By, r.At = r.FencesTo,").
		failing("worker.TestFencesToIsRaised"),
	one("slot-end", "a command under a limit is not told when its slot ends",
		"worker/slots.go", "return min(u.Lease.Deadline(), u.slot.Deadline())", "return u.Lease.Deadline()").
		failing("worker.TestDeadlineUnderASlot"),
	one("stop-delay", "a task that has not begun when its replica stops waits for 20 s",
		"worker/attempt.go", `delay, cause = 0, "shutdown"`, `delay, cause = 20*time.Second, "shutdown"`).
		failing("worker.TestStopsLoseNoClaim"),
	one("stop-waits", "a task that was cancelled by a stop waits for the lock-delay",
		"worker/attempt.go", "e.Outcome, e.Next, e.Requeue = tasks.Shutdown, tasks.StatusPending, true", "e.Outcome, e.Next, e.Requeue, e.Delay = tasks.Shutdown, tasks.StatusPending, true, w.cfg.LockDelay").
		failing("cmd/onejob.TestScripts/stubborn"),
	one("stubborn", "a stop does not wait for the end of a command with a long grace",
		"worker/shutdown.go", "commandsEnd = 8 * time.Second", "commandsEnd = 80 * time.Second").
		failing("cmd/onejob.TestScripts/stubborn"),
	one("no-rest", "a limit whose backend fails is asked for again at once",
		"worker/slots.go", "retry.Pause(ctx, max(jitter(d), leastPause))", "retry.Pause(ctx, max(0*jitter(d), leastPause))").
		failing("worker.TestFailingLimitRests"),
	one("limit-twice", "a limit that several kinds have is served twice at once, and what fails is tried again at once",
		"worker/limits.go", "due = slices.Compact(due)", "_ = slices.Compact(slices.Clone(due))").
		and("worker/slots.go", "retry.Pause(ctx, max(jitter(d), leastPause))", "retry.Pause(ctx, jitter(d))").
		failing("worker.TestALimitOfSeveralKindsRests"),
	one("unseen-death", "a command that asks once for a slot does not wait for one whose holder has died",
		"internal/cli/lock.go", "errors.Is(err, lock.ErrDelayed) && p.delays() > 0", "errors.Is(err, lock.ErrDelayed) && p.delays() > time.Hour").
		failing("internal/cli.TestObtainWaitsForTheDead"),
	one("all-wait", "each full limit has a query that waits",
		"lock/consul/client.go", "			retry.Pause(ctx, crowdedWait+rand.N(crowdedWait/4))\n			index = 0\n", "").
		failing("lock/consul.TestManyFullLimits"),
	one("forgets-finds", "a claim that ends forgets what the look behind has found meanwhile",
		"store/choose.go", "m.before(old) || old.found > k.finds", "m.before(old)").
		failing("store.TestAClaimOnItsWayForgetsNoFind"),
	one("relayed", "a trigger that has an error of another server stops all that is written with its row",
		"store/store.go", "		return relayed(err)\n", "		return false\n").
		failing("store.TestATriggerStopsNoOthers"),
	one("breaks-for-ever", "a statement under which the connection always breaks is repeated for ever",
		"tasks/kinds/sql/sql.go", "if n < maxBroken {", "if n < 1<<maxBroken {").
		failing("worker.TestConnectionsThatAlwaysBreakUseUpAttempts"),
	one("read-is-durable", "an outcome counts as written as soon as it can be read",
		"store/complete.go", " WHERE verdict <> 'accepted'\n    OR pg_catalog.pg_logical_emit_message(true, 'onejob', '') IS NOT NULL`", "`").
		failing("store.TestNoOutcomeIsAcceptedBeforeTheStandbyHasIt"),
	one("avoided-by-takeovers", "rows that claims avoid are not taken over either",
		"store/takeover.go", "except := s.stuck.list()", "except := append(s.stuck.list(), s.avoid.list()...)").
		failing("store.TestTakeoversDoNotAvoidWhatClaimsAvoid"),
	one("turn-by-lock-timeout", "a claim whose wait for its turn another timeout ends does not go on without it",
		"store/claim.go", "case waitedInVain(err) && !r.writing && turn.wait > 0:", "case pg.Code == lockTimeout && !r.writing && turn.wait > 0:").
		failing("store.TestATurnThatNeverComes"),
	one("long-numbers", "a result is as long as it is sent, not as it is read",
		"store/complete.go", `pgjson.TooLong(e.Result, maxResult); why != ""`, `pgjson.TooLong(e.Result, maxResult); why != "" && len(e.Result) > maxResult`).
		failing("store.TestAResultThatIsLongAsText"),
	one("handler-says-refused", "who says that its fence was superseded is believed",
		"worker/attempt.go", "if result.Committed {\n		w.logOutcome", "if result.Committed || errors.Is(err, tasks.ErrRefused) {\n		w.logOutcome").
		failing("worker.TestHandlersThatEndInOddWays"),
	one("timeouts", "a task's timeout ends nothing",
		"worker/attempt.go", "	if timeout > 0 {\n		var stop", "	if timeout < 0 {\n		var stop").
		under("none", "unexpected_ends", "overstays").
		failing("worker.TestOutcomes"),
	one("leader-for-ever", "a leader that does not reach the database goes on leading",
		"worker/leader.go", "case now.Sub(last) >= unreached:", "case now.Sub(last) >= 1000*unreached:").
		failing("worker.TestLeaderWithoutPostgresResigns"),
	one("stuck-for-ever", "a session that cannot give back its keys lives on",
		"lock/consul/verify.go", "	in.giveUp(giveUpAfter * k.cfg.Verify)\n", "").
		failing("lock/consul.TestRights"),
	one("restless-limits", "a look for due limits that took long is followed by the next one",
		"worker/limits.go", "took > slowLook {", "took > 1000*time.Hour {").
		failing("worker.TestSlowLooksForLimitsRest"),
	one("deaths-wait", "the death of a replica waits for a transaction that has locked its row",
		"store/replicas.go", "FOR NO KEY UPDATE SKIP LOCKED)\n RETURNING state", "FOR NO KEY UPDATE)\n RETURNING state").
		failing("store.TestLockedReplicasKeepNobodyWaiting"),
	one("key-of-a-task", "a lock_key that is another task's id is claimed beside that task",
		"migrations/041_keys_that_are_ids.sql", "OR NOT onejob.reserve_task(key) THEN", "THEN").
		failing("store.TestALockKeyThatIsAnID"),
	one("key-of-a-later-task", "a lock_key is claimed under a lower fence than a task that was enqueued meanwhile and has its id",
		"store/claim.go", "THEN onejob.reserve_task(lock_key, fence) END", "THEN true END").
		failing("store.TestALockKeyThatIsAnID"),

	// Numbers of a run of chaos that no mutant above asks for: each is above zero in some run.
	one("any-queue", "claims take tasks of all queues",
		"store/choose.go", "cardinality(@queues::text[]) = 0 OR", "cardinality(@queues::text[]) >= 0 OR").
		and("store/choose.go", "cardinality(@queues) > 0 AND queue", "cardinality(@queues) < 0 AND queue").
		under("none", "misrouted").
		failing("store.TestClaimServesItsQueues"),
	one("unique", "two waiting tasks may have one unique_key",
		"migrations/042_bytes.sql", "CREATE UNIQUE INDEX unique_key_is_taken", "CREATE INDEX unique_key_is_taken").
		under("none", "unique_broken").
		failing("store.TestUniqueKey"),
	one("no-tail", "the end of a long output is lost",
		"tasks/output.go", "Text(string(o.head)), left, Text(string(tail)))", "Text(string(o.head)), left, \"\")").
		under("none", "outputs_wrong").
		failing("tasks.TestOutputKeepsHeadAndTail"),
	one("keep-nothing", "retention deletes a task with a keep_for as soon as it has ended",
		"store/schedules.go", "least(keep_for, interval '1000 years')", "least(keep_for, interval '0')").
		and("migrations/009_deleting.sql", "least(keep_for, interval '1000 years')) * 1000000)::bigint))", "least(keep_for, interval '0')) * 1000000)::bigint))").
		under("outsider-cut", "lost"), // retention runs once a minute
	one("made-twice", "a due time makes two tasks",
		"store/schedules.go", "    SELECT o.task_id, s.kind, s.payload,", "    SELECT CASE g WHEN 0 THEN o.task_id ELSE nextval(pg_get_serial_sequence('onejob.tasks', 'id')) END, s.kind, s.payload,").
		and("store/schedules.go", "      JOIN schedule s ON s.id = o.schedule_id\n     WHERE o.task_id IS NOT NULL`", "      JOIN schedule s ON s.id = o.schedule_id CROSS JOIN generate_series(0, 1) g\n     WHERE o.task_id IS NOT NULL`").
		under("none", "occurrences_doubled"),
	one("passed-for-20s", "one row of fifty is claimed 20 s after it came due",
		"store/choose.go", "CASE WHEN status <> 'pending' OR run_at > statement_timestamp() OR id = ANY (@avoid)", "CASE WHEN status <> 'pending' OR run_at > statement_timestamp() - interval '20 s' * (id % 50 = 0)::int OR id = ANY (@avoid)").
		under("none", "starved"),
	one("fails-by-itself", "one attempt of a hundred fails for good",
		"worker/attempt.go", "	result, err = handler(ctx, a)\n", "	result, err = handler(ctx, a)\n	if a.Fence%100 == 0 && err == nil {\n		err = tasks.Permanent(errReplyLost)\n	}\n").
		under("none", "spoiled"),
	one("not-begun-is-charged", "a task that has not begun when its replica stops has one attempt less",
		"store/complete.go", "           attempt     = greatest(t.attempt - 1, 0),\n           session     = NULL,", "           session     = NULL,").
		under("term,rolling", "illegal_steps").
		failing("store.TestRequeue"),
	one("a-stop-fails", "an attempt that a stop ends has failed",
		"worker/attempt.go", "e.Outcome, e.Next, e.Requeue = tasks.Shutdown, tasks.StatusPending, true", "again(tasks.Shutdown)").
		under("graceful-restart", "spent").
		failing("worker.TestShutdownGivesWorkBack"),
	one("no-lock", "a task begins though Consul does not answer",
		"worker/attempt.go", "	if err != nil {\n		w.requeue(t, err)\n		return false\n	}\n	w.running.under(", "	if err != nil && !errors.Is(err, lock.ErrHeld) {\n		lease, err = nobodys{}, nil\n	}\n	if err != nil {\n		w.requeue(t, err)\n		return false\n	}\n	w.running.under(").
		and("worker/attempt.go", "// errReplyLost requeues", "type nobodys struct{}\n\nfunc (nobodys) Context() context.Context      { return context.Background() }\nfunc (nobodys) Deadline() boottime.Instant    { return boottime.Now().Add(time.Minute) }\nfunc (nobodys) Release(context.Context) error { return nil }\n\n// errReplyLost requeues").
		under("consul-away", "unlocked"),
	one("statement-twice", "the statement of a task is executed twice",
		"tasks/kinds/sql/sql.go", "	rows, err := tx.Query(ctx, sql, append", "	if rows, err := tx.Query(ctx, sql, append([]any{pgx.QueryExecModeExec}, args...)...); err == nil {\n		rows.Close()\n	}\n	rows, err := tx.Query(ctx, sql, append").
		under("none", "double_effect"),
	one("fences-in-pairs", "a command has the fence of the attempt before or after",
		"tasks/kinds/exec/exec.go", "strconv.FormatInt(a.Fence, 10)", "strconv.FormatInt(a.Fence/2*2, 10)").
		under("none", "fences_repeated"),
	one("stop-hangs", "a replica that has been told to stop does not end",
		"worker/worker.go", "	stopWork()\n	stopIntake(nil)\n", "	<-context.Background().Done()\n	stopWork()\n	stopIntake(nil)\n").
		under("term", "stops_killed").
		simulatedToo(),
	one("leaves-processes", "one attempt of a hundred leaves a process behind",
		"worker/attempt.go", "	result, err = handler(ctx, a)\n", "	if a.Fence%100 == 0 {\n		_ = exec.Command(\"sleep\", \"600\").Start()\n	}\n	result, err = handler(ctx, a)\n").
		and("worker/attempt.go", "	\"runtime/debug\"\n", "	\"os/exec\"\n	\"runtime/debug\"\n").
		under("none", "leaks"),
}
