/*
 * The protocol of onejob as a model that spin checks exhaustively: two replicas, one task
 * (which is one lock key), Consul, a Postgres primary with a standby that may lag behind,
 * supervisors, guards, an operator, and faults. docs/decisions/model.md says what is left
 * out, and how to run it and read a trace.
 *
 * How to read this, without knowing Promela:
 *
 *   d_step { guard; a; b }      one step: possible while the guard is true, done at once
 *   do :: x :: y od             for ever, any of x and y that is possible
 *   active proctype p() {...}   a process; spin tries every order of all steps of all
 *   assert(x)                   spin looks for a way to make x false, and prints it
 *
 * A step may be taken late or never, so a replica may be arbitrarily slow in everything
 * but in what has a deadline. Time passes in ticks, all clocks at the same speed. Deadlines
 * count down: a counter of 0 says that the deadline has passed.
 *
 * What is switched on, with -D:
 *
 *   FAULTS=mask     faults that may happen, once each, at any moment (see F_...)
 *   CHECK_...       which promise is checked
 *   NO_..., ...     one protection is switched off (docs/decisions/model.md lists them)
 *   OUTSIDER        the second holder of the key is `onejob lock KEY`, which has no row
 *   GO_HANDLER      the task is a Go handler: nobody kills it while its replica is frozen
 *   SYNC            replication is synchronous: the standby never lags behind, and an old primary takes no writes
 *   NARROW          a smaller search: faults hit A alone, B follows a new primary at once, each has one session
 *   ONLY_OUTCOMES   with CHECK_FENCES: the order of fences is not checked
 *   LIVE            the faults stop, and the task must end within LIMIT
 *   CLAIMS=n        how often the task is claimed at most, before the faults stop
 */

/* ---- The product's times. model_test.go compares them with the code. ---- */

#ifndef TICK
#define TICK 500 /* milliseconds: every time below is a multiple of it */
#endif

#define CHECK_TTL     (10000/TICK) /* consul.check_ttl: Consul ends the session then */
#define HEARTBEAT      (1000/TICK) /* consul.heartbeat; in the model every tick, see the docs */
#define RENEW          (3000/TICK) /* consul.renew: a connected replica hears of its session's end */
#define VERIFY         (3000/TICK) /* consul.verify: held keys are looked at */
#define SILENCE        (7000/TICK) /* lock.Silence: others call a replica dead */
#define BEAT_TIMEOUT   (2000/TICK) /* of a heartbeat to the list */
#define CHECK_TIMEOUT  (4000/TICK) /* of a heartbeat to the agent: half of the slack */

#ifdef NO_MARGIN
#define MARGIN 0
#else
#define MARGIN         (1000/TICK) /* consul.margin */
#endif

#ifdef NO_LOCK_DELAY
#define LOCK_DELAY 0
#else
#define LOCK_DELAY     (3000/TICK) /* consul.lock_delay */
#endif

#ifdef LATE_KILL
#define LAPSE          (3500/TICK)
#else
#define LAPSE           (500/TICK) /* guard: SIGKILL so long after the lease's end */
#endif

#ifdef EARLY_TAKEOVER
#define SILENCE_WAIT   (5000/TICK)
#else
#define SILENCE_WAIT SILENCE
#endif

#ifdef NO_WAIT
#define TAKEOVER_WAIT 0
#else
#define TAKEOVER_WAIT CHECK_TTL    /* max(lock_delay, check_ttl): see membership.wait */
#endif

/*
 * A connected replica hears of the end of its session by its watch. That is at once in the
 * product, if nothing holds up the answer; the model allows a second. HEARD_BY_RENEWAL
 * does without the watch.
 */
#ifdef HEARD_BY_RENEWAL
#define HEAR RENEW
#else
#define HEAR (1000/TICK)
#endif

/* ---- Faults. Each happens at most once, to either replica, and may end at any time. ---- */

#ifndef FAULTS
#define FAULTS 0
#endif
/* With FAULTS_OF_ENVIRONMENT one program, compiled once, takes them from the variable FAULTS. */
#ifdef FAULTS_OF_ENVIRONMENT
c_decl { \#include <stdlib.h> }
#endif

#define F_FREEZE       1 /* SIGSTOP of the working process; guard and command go on */
#define F_SUSPEND      2 /* the whole machine of a replica stops and goes on; its clock has gone on */
#define F_WORKER_KILL  4 /* the working process dies, its supervisor lives */
#define F_KILL         8 /* supervisor and working process die together */
#define F_GUARD_KILL  16 /* the guard dies; something that the command started lives on */
#define F_DESTROY     32 /* an operator destroys a replica's session */
#define F_UNHEARD     64 /* the same, of a replica that is cut off from Consul at that moment */
#define F_KEY_DELETE 128 /* an operator deletes the key of the lock */
#define F_ROW_RESET  256 /* an operator sets the running row to pending */
#define F_SEQ_BACK   512 /* an operator sets the sequence of fences back */
#define F_RESTORE   1024 /* Consul is restored from a snapshot of any earlier moment */
#define F_WIPE      2048 /* Consul loses everything */
#define F_FAILOVER  4096 /* the primary dies; the standby, as of any earlier moment, is promoted */
#define F_SPLIT     8192 /* the standby is promoted while the primary lives on */
#define F_CUT_CONSUL 16384 /* a replica cannot reach Consul */
#define F_CUT_PG     32768 /* a replica cannot reach Postgres; one abandoned statement comes late */
#define F_SLOW       65536 /* heartbeats arrive at once, and their answers late */

#define PG_GOES_BACK (faults & (F_FAILOVER | F_SPLIT))

/* ---- Sizes ---- */

#ifndef CLAIMS
#define CLAIMS 2
#endif
#ifndef GENERATIONS
#define GENERATIONS 2          /* sessions of each replica */
#endif
#define NX (2*GENERATIONS + 2) /* sessions are 1..2*GENERATIONS; 0 is none */
#if GENERATIONS == 2
#define ANY(P, r) (P(r, 1) || P(r, 2) || P(r, 3) || P(r, 4))
#define ALL(P, r) (P(r, 1) && P(r, 2) && P(r, 3) && P(r, 4))
#else
#define ANY(P, r) (P(r, 1) || P(r, 2) || P(r, 3) || P(r, 4) || P(r, 5) || P(r, 6))
#define ALL(P, r) (P(r, 1) && P(r, 2) && P(r, 3) && P(r, 4) && P(r, 5) && P(r, 6))
#endif
#define OUTSIDERS (NX - 1)     /* the session of `onejob lock` */
#define BLOCK 100              /* by how much the fences of another server begin higher */
#define FURTHER (10*BLOCK)     /* by how much more, because of the clock and a random number */
#define LIMIT (60000/TICK)

#define SESSION(r, g)  (1 + (r) + 2*(g))
#define L(s, x)        ((s)*NX + (x)) /* index: server s, session x */

/* ---- Postgres: server 0 is the first primary, 1 its standby ---- */

#define PENDING 0
#define RUNNING 1
#define DONE    2

#define ABSENT  0 /* the session is not on the list of replicas */
#define WORKING 1
#define ENDED   2 /* dead, lost or stopped: final */

bit   pg_up[2];         /* it serves as a primary */
byte  row[2];           /* the task's status */
byte  row_sid[2];       /* its session */
short row_f[2];         /* its fence */
byte  row_no[2];        /* ghost: which claim it was; unlike a fence it never repeats */
byte  seq[2];           /* onejob.fences */
short p_from[2];        /* onejob.cluster.fences_from */
byte  l_cid[2];         /* onejob.cluster.id */
byte  l_st[2*NX];       /* onejob.replicas.state */
bit   l_here[2*NX];     /* the last heartbeat was taken by this server */
byte  quiet[2*NX];      /* since the last sign of life: a heartbeat to this server, or a sign in Consul */

/* ---- Consul ---- */

#define NO_RECORD 2

bit   c_alive[NX];      /* the session exists */
byte  c_left[NX];       /* until its health check turns critical */
byte  c_ended[NX];      /* since it has ended */
byte  key;              /* the session that holds <prefix>/tasks/<lock key> */
byte  delay;            /* rest of the key's lock-delay */
byte  cid;              /* <prefix>/cluster; 0 if it is not there */
byte  rec_srv;          /* <prefix>/database: the server on record */
byte  rec_ver;          /* its ModifyIndex */
short rec_from, rec_to; /* fences_from, fences_to */

/* the snapshot that will be restored */
bit   s_alive[NX]; byte s_key, s_cid, s_srv, s_ver; short s_from, s_to; bit s_made;

/* ---- A replica ---- */

#define UP     0
#define FROZEN 1
#define DOWN   2

byte  st[2];            /* the working process */
bit   sup[2];           /* its supervisor lives */
bit   swept[2];         /* after a crash: the supervisor has killed what was left */
bit   guard[2];         /* the guard of the present command lives */
bit   susp[2];          /* the whole machine stands still */
bit   cutC[2], cutP[2]; /* cut off from Consul, from Postgres */
bit   slow[2];
byte  flight[2];        /* how old the heartbeat is that is on its way; 0 if none is */
bit   inC[2], inP[2];   /* whether it has reached the agent, and the list */
byte  at[2];            /* the Postgres server that it is connected to */

byte  sid[2];           /* the session that it believes in; 0 if none */
byte  gen[2];           /* how many sessions it has had */
byte  old[2];           /* a lost session whose end it has not made known yet */
bit   told[2];          /* ... in Consul; what is missing is the list */
byte  t_cid[2];         /* the cluster's id when the session began */
byte  d_check[2];       /* until the lease ends, by the health check */
byte  d_list[2];        /* until the lease ends, by signs of life */
byte  hear[2];          /* for how long it could have heard that its session has ended */

bit   trusted[2];       /* it knows the record, and its server is the one on it */
byte  k_srv[2], k_ver[2]; short k_from[2]; short highest[2]; bit back[2];

/* Its attempt at the task; it has one slot. */
#define IDLE    0
#define CLAIMED 1 /* the row is ours */
#define LOCKED  2 /* so is the key */
#define WORK    3 /* the handler was started */
#define SUCCESS 4 /* it ended well; to be written */
#define RETRY   5 /* it failed; to be written */
#define REQUEUE 6 /* it lost its lease or did not begin; to be written */
#define RELEASE 7 /* the key is to be released */

byte  pc[2];
byte  a_sid[2]; short a_f[2]; byte a_no[2];
bit   unsettled[2];     /* ghost: the outcome of its last attempt was neither written nor refused */
bit   inside[2];            /* the handler, or something that its command started, is there */
#define NEVER 255
byte  kill_in[2];       /* until SIGKILL, once the lease has ended */
byte  robbed[2];        /* for how long it could have seen that its key was taken away */
byte  rest[2];          /* until it claims again */

byte  late_no[2], late_sid[2]; short late_f[2]; bit late_ok[2]; /* an abandoned statement that is still on its way */

bit   o_in;             /* `onejob lock` runs its command */

/* ---- The rest ---- */

int   faults, budget;   /* of this run; those that may still happen */
bit   over;             /* LIVE: the faults have stopped */
byte  calm;             /* LIVE: for how long */
byte  claims, records;
short top;              /* ghost: the highest fence under which a handler began */
byte  bad;              /* ghost: which promise was broken; everything stops */
bit   synced;           /* the standby has copied the primary since the start */

#define OVERLAP   1
#define FENCE     2
#define STALE     4
#define EARLY     8
#define UNNOTICED 16
#define STUCK     32
#define ALIVE     64

byte hi, hj, hx;        /* of loops; 0 outside */

/* ---- Shorthand ---- */

#define NO_ANSWER(r) flight[r] = 0; inC[r] = 0; inP[r] = 0 /* is on its way */
#define LEASE(r)   (sid[r] != 0 && d_check[r] > 0 && d_list[r] > 0)
#define CONSUL(r)  (st[r] == UP && !cutC[r])
#ifdef SYNC
#define COMMITS(s) (pg_up[s] && !((s) == 0 && pg_up[1])) /* an old primary has no standby any more that would confirm */
#else
#define COMMITS(s) pg_up[s]
#endif
#define PG(r)      (st[r] == UP && !cutP[r] && COMMITS(at[r]))
#define OURS(r)    (cid == t_cid[r])
#ifdef GO_HANDLER
#define STOPPED(r) (susp[r] || st[r] == FROZEN)
#else
#define STOPPED(r) (susp[r])
#endif
#define WORKS(r)   (inside[r] && !STOPPED(r))
#define BOTH_WORK  ((WORKS(0) && WORKS(1)) || (o_in && (WORKS(0) || WORKS(1))))
#define NAME(r)    ('A' + (r))
#define SAY(r, what)  printf("%c  ", NAME(r)); printf(what); printf("\n")
#define SAYX(what)    printf("-  "); printf(what); printf("\n")

#define STEP(r) st[r] == UP
#define OVER(r) (a_sid[r] != old[r]) /* the attempt under its lost session */
/* How long ago sessions ended matters only where the list can forget them. */
#define ENDED_NOW (PG_GOES_BACK -> 0 : TAKEOVER_WAIT)

#define PRIMARY (pg_up[1])      /* the number of the newest server */

/*
 * Where spin need not look further: a promise is broken, or nothing can break one any more.
 * For an overlap it takes two attempts that work, or may come to work.
 */
#define PG_IS_DONE (!PG_GOES_BACK || (pg_up[1] && !pg_up[0]))
#define MAY_WORK(r) ((pc[r] >= CLAIMED && pc[r] <= WORK) || inside[r])
#ifdef LIVE
#define RUNS (bad == 0 && !(over && row[PRIMARY] == DONE))
#else
#ifdef CHECK_FENCES
#define BUSY(r) (pc[r] != IDLE || inside[r])
#define NONE_STARTS(r) (pc[r] != CLAIMED && pc[r] != LOCKED)
#define RUNS (bad == 0 && !((row[PRIMARY] == DONE && PG_IS_DONE || claims == CLAIMS) && NONE_STARTS(0) && NONE_STARTS(1) && !(BUSY(0) && BUSY(1)) && !late_no[0] && !late_no[1]))
#else
#ifdef OUTSIDER
#define RUNS (bad == 0 && (claims < CLAIMS || MAY_WORK(0)))
#else
#define RUNS (bad == 0 && !(row[PRIMARY] == DONE && PG_IS_DONE && !(MAY_WORK(0) && MAY_WORK(1))) && CLAIMS - claims + MAY_WORK(0) + MAY_WORK(1) >= 2)
#endif
#endif
#endif
/* Who can kill a command: its guard, or its replica. */
#ifdef GO_HANDLER
#define KILLER(r) (st[r] == UP)
#else
#ifdef NO_GUARD
#define KILLER(r) (st[r] == UP)
#else
#define KILLER(r) (guard[r] || st[r] == UP)
#endif
#endif

#ifdef LIVE
#define MAY_CLAIM(r) ((claims < CLAIMS || over) && (claims > 0 || r == 0))
#else
#define MAY_CLAIM(r) (claims < CLAIMS && (claims > 0 || r == 0)) /* A is the first, without loss of generality */
#endif
#ifdef NO_INDEX
#define CLAIMABLE(s) (row[s] != DONE) /* another row of the lock key may be running */
#else
#define CLAIMABLE(s) (row[s] == PENDING)
#endif
#ifdef NO_RECORD_CHECK
#define SAME_RECORD(r) true
#else
#define SAME_RECORD(r) (rec_ver == k_ver[r])
#endif
#define MAX(a, b) ((a) > (b) -> (a) : (b))
#ifdef NO_MARK
#define FENCES_FROM(r) 0
#else
/* What Consul and this server know. The product adds its clock and a random number: see FURTHER. */
#define FENCES_FROM(r) MAX((rec_srv == NO_RECORD -> 0 : rec_to), p_from[at[r]] + BLOCK)
#endif
#define MAY_SETTLE(r) (STEP(r) && LEASE(r) && CONSUL(r) && OURS(r) && PG(r) && (!trusted[r] || rec_ver != k_ver[r]) && (rec_srv == NO_RECORD || rec_srv <= at[r]))
#define ON_RECORD(r) (rec_srv == at[r] && rec_from >= p_from[at[r]] && !back[r])
#define OTHERS_ROW(r) (row[at[r]] == RUNNING && row_sid[at[r]] != sid[r])
#define LEASE_UNDER(r, y) (sid[r] == (y) && LEASE(r))
#define HOLDER_HAS_LEASE(r) (LEASE_UNDER(0, row_sid[at[r]]) || LEASE_UNDER(1, row_sid[at[r]]))
#ifdef ONE_WITNESS
#define ON_LIST_DEAD(s, y) true
#else
#define ON_LIST_DEAD(s, y) (l_st[L(s, y)] == ENDED || (l_st[L(s, y)] == ABSENT && c_ended[y] >= TAKEOVER_WAIT))
#endif
/* a session whose last sign of life is too old, as replica r sees it */
#ifdef SILENCE_ANYWHERE
#define HERE(r, y) true
#else
#define HERE(r, y) l_here[L(at[r], y)]
#endif
#define SILENT(r, y)   (y != sid[r] && l_st[L(at[r], y)] == WORKING && HERE(r, y) && quiet[L(at[r], y)] >= SILENCE_WAIT)
#define LIVING(r, y)   (SILENT(r, y) && c_alive[y])
#define GIVEN_UP(r, y) ((SILENT(r, y) && !c_alive[y]) || (y != sid[r] && l_st[L(at[r], y)] == WORKING && !l_here[L(at[r], y)] && !c_alive[y] && c_ended[y] >= TAKEOVER_WAIT))
#define SILENT_SESSION(r) ANY(LIVING, r)
#define DEAD_SESSION(r)   ANY(GIVEN_UP, r)
/* a Consul that lost the cluster's id is adopted if every replica that may be alive has a session there */
#define KNOWN(s, y) (l_st[L(s, y)] != WORKING || c_alive[y])
#define OWN(s, y)   (l_st[L(s, y)] == WORKING || !c_alive[y])
#define MAY_ADOPT(s) (ALL(KNOWN, s) && \
  (row[s] != RUNNING || l_st[L(s, row_sid[s])] != ABSENT || c_alive[row_sid[s]]) && \
  (cid == 0 || ALL(OWN, s)))

#define REACHES_C(r) (!cutC[r])
#define REACHES_P(r) (!cutP[r] && pg_up[at[r]])

#define OF(r, y) (((y) - 1) % 2 == (r))
#define LISTED(r, y)   (OF(r, y) && l_st[L(at[r], y)] == WORKING)
#define LIVES(r, y)    (OF(r, y) && c_alive[y])
#define QUIET(r, y)    (LISTED(r, y) && quiet[L(at[r], y)] >= SILENCE)
#define PROCESS_LISTED(r)    ANY(LISTED, r)
#define PROCESS_IN_CONSUL(r) ANY(LIVES, r)
#define PREDECESSOR(r)       ANY(QUIET, r)
#define EXPIRED(r, y) (c_alive[y] && c_left[y] == 0)
#define MAY(f) ((budget & (f)) && !over)
#define USE(f) budget = budget & ~(f)
#define COPY \
  row[1] = row[0]; row_sid[1] = row_sid[0]; row_f[1] = row_f[0]; row_no[1] = row_no[0]; seq[1] = seq[0]; p_from[1] = p_from[0]; l_cid[1] = l_cid[0]; \
  for (hx : 1 .. NX-2) { l_st[L(1, hx)] = l_st[L(0, hx)]; }; hx = 0
#define GONE \
  pg_up[0] = 0; row[0] = 0; row_sid[0] = 0; row_f[0] = 0; row_no[0] = 0; seq[0] = 0; p_from[0] = 0; l_cid[0] = 0; \
  for (hx : 1 .. NX-2) { l_st[L(0, hx)] = 0; quiet[L(0, hx)] = 0; l_here[L(0, hx)] = 0; }; hx = 0
#ifdef SYNC
#define LAGS false
#define CATCH_UP COPY
#else
#define LAGS true
#define CATCH_UP skip
#endif
#ifdef NARROW
#define FOLLOW at[1] = 1; doubt(1)
#else
#define FOLLOW skip
#endif
#define PROMOTE CATCH_UP; FOLLOW; pg_up[1] = 1; for (hx : 1 .. NX-2) { quiet[L(1, hx)] = 0; l_here[L(1, hx)] = 0; }; hx = 0

/* Which promise is broken now? */
inline judge() {
  if
#ifdef CHECK_EXCLUSION
  :: BOTH_WORK -> bad = OVERLAP; SAYX("=== two handlers of one key work at the same time")
#endif
  :: else
  fi
}

/* ---- Pieces that several processes use ---- */

/* A session ends in Consul; its key stays locked for the lock-delay unless it is given back. */
inline end_session(y, d) {
  if
  :: c_alive[y] ->
     c_alive[y] = 0; c_left[y] = 0; c_ended[y] = ENDED_NOW;
     if :: key == y -> key = 0; delay = d :: else fi
  :: else
  fi
}

/* A replica does not know which server is the database. */
inline doubt(r) {
  trusted[r] = 0; k_srv[r] = 0; k_ver[r] = 0; k_from[r] = 0
}

/* It puts the server that it is connected to on record. rec_from is where its fences begin. */
inline record(r) {
  rec_to = rec_from + BLOCK; rec_srv = at[r];
  records++; rec_ver = records; SAY(r, "puts its Postgres server on record"); printf("      fences from %d\n", rec_from)
}

/* It works with the server on record, after the server has noted where its fences begin. */
inline trust(r) {
  if :: p_from[at[r]] < rec_from -> p_from[at[r]] = rec_from :: else fi;
  k_srv[r] = at[r]; k_ver[r] = rec_ver; k_from[r] = rec_from; trusted[r] = 1;
  highest[r] = ((faults & F_SEQ_BACK) -> rec_from + seq[at[r]] : 0); back[r] = 0
}

/* A replica believes in its session no more: all leases end now. */
inline lose(r) {
  if :: sid[r] != 0 -> old[r] = sid[r]; told[r] = 0 :: else fi;
  sid[r] = 0; d_check[r] = 0; d_list[r] = 0; hear[r] = 0; NO_ANSWER(r); robbed[r] = 0;
  if :: inside[r] && kill_in[r] == NEVER && !susp[r] -> kill_in[r] = LAPSE :: else fi
}

/* The handler and all that it started are gone. */
inline gone(r) {
  inside[r] = 0; kill_in[r] = NEVER; robbed[r] = 0
}

/* The attempt is over. */
inline idle(r) {
  pc[r] = IDLE; a_sid[r] = 0; a_f[r] = 0; a_no[r] = 0
}

/* A replica clears a key of its own, after it has done with the attempt. */
inline clears(r) {
#ifdef CHECK_FENCES
  if :: unsettled[r] -> bad = EARLY; SAYX("=== a key is released before the outcome is durable") :: else fi;
#endif
  skip
}

/* The process is dead: it knows nothing any more. */
inline dies(r) {
  st[r] = DOWN; swept[r] = 0; idle(r); unsettled[r] = 0; /* the next process knows nothing of the attempt */
  sid[r] = 0; old[r] = 0; told[r] = 0; hear[r] = 0; NO_ANSWER(r); back[r] = 0; doubt(r);
#ifdef GO_HANDLER
  gone(r);
#endif
  if :: !inside[r] -> d_check[r] = 0; d_list[r] = 0 :: else fi
}

/* The row, as completion and requeue compare it. */
#ifdef NO_FENCE_COMPARE
#define SAME_FENCE(s, f) true
#else
#define SAME_FENCE(s, f) (row_f[s] == (f))
#endif
#ifdef NO_SESSION_COMPARE
#define SAME_SESSION(s, y) true
#else
#define SAME_SESSION(s, y) (row_sid[s] == (y))
#endif

inline write_row(s, f, y, no, next, ok) {
  ok = 0;
  if
  :: row[s] == RUNNING && SAME_FENCE(s, f) && SAME_SESSION(s, y) ->
     ok = 1;
#ifdef CHECK_FENCES
     if :: row_no[s] != (no) -> bad = STALE; SAYX("=== an outcome is accepted that is not the holder's") :: else fi;
#endif
     row[s] = next; row_sid[s] = 0; row_f[s] = 0; row_no[s] = 0
  :: else
  fi
}

/* ---- Time ---- */

/* A connection breaks, and the next one is to the new primary. */
inline move(r) {
  at[r] = 1; doubt(r); late_no[r] = 0; late_sid[r] = 0; late_f[r] = 0; late_ok[r] = 0; SAY(r, "goes over to the new primary");
  if :: at[0] == 1 && at[1] == 1 -> GONE :: else fi /* nobody is left who could see the old one */
}

/* One tick of the lease's clocks, and the signs of life that replica r gives. */
inline pass(r) {
  if :: at[r] == 0 && !pg_up[0] && pg_up[1] && !cutP[r] && st[r] == UP -> move(r) :: else fi;
  /* a supervisor is never slow: it kills what its worker left within a tick (the product: 300 ms, and SIGKILL) */
  if :: st[r] == DOWN && sup[r] && !swept[r] -> gone(r); swept[r] = 1; SAY(r, "the supervisor has killed what was left") :: else fi;
  /* the guard, or the replica itself, kills what is too late */
  if
  :: inside[r] && !susp[r] ->
     if
     :: !guard[r] && st[r] == UP -> gone(r) /* its guard died: the replica kills what is left */
     :: else ->
        if
        :: kill_in[r] != NEVER && KILLER(r) ->
           kill_in[r]--;
           if :: kill_in[r] == 0 -> gone(r); SAY(r, "the command is killed: its lease is over") :: else fi
        :: else
        fi
     fi
  :: else
  fi;
  if :: rest[r] > 0 -> rest[r]-- :: else fi;
  if :: st[r] == DOWN && !inside[r] -> d_check[r] = 0; d_list[r] = 0 :: else fi;
#ifndef NO_DEADLINE
  if :: d_check[r] > 0 -> d_check[r]-- :: else fi;
  if :: d_list[r] > 0 -> d_list[r]-- :: else fi;
  if
  :: st[r] == UP && sid[r] != 0 && !LEASE(r) -> SAY(r, "its lease has ended: no sign of life was acknowledged in time"); lose(r)
  :: else
  fi;
#endif
  if
  :: st[r] == UP && sid[r] != 0 ->
     /* to Consul: the agent's check, which knows nothing of the session */
     if
     :: !cutC[r] && !slow[r] ->
        d_check[r] = CHECK_TTL - MARGIN;
        if :: c_alive[sid[r]] -> c_left[sid[r]] = CHECK_TTL :: else fi
     :: slow[r] ->
        if
        :: flight[r] == 0 || flight[r] > CHECK_TIMEOUT -> /* sent now, and received now */
           flight[r] = 1; inC[r] = !cutC[r]; inP[r] = PG(r) && l_st[L(at[r], sid[r])] == WORKING;
           if :: inC[r] && c_alive[sid[r]] -> c_left[sid[r]] = CHECK_TTL :: else fi;
           if :: inP[r] -> quiet[L(at[r], sid[r])] = 0; l_here[L(at[r], sid[r])] = 1 :: else fi
        :: else -> flight[r]++
        fi
     :: else
     fi;
     /* to the list in Postgres; it extends the lease only on the server on record */
     if
     :: PG(r) && l_st[L(at[r], sid[r])] != WORKING -> SAY(r, "finds itself declared dead"); lose(r)
     :: PG(r) && l_st[L(at[r], sid[r])] == WORKING && !slow[r] ->
        quiet[L(at[r], sid[r])] = 0; l_here[L(at[r], sid[r])] = 1;
        if :: trusted[r] && k_srv[r] == at[r] -> d_list[r] = SILENCE - MARGIN :: else -> doubt(r) fi
     :: else
     fi;
     /* to Consul, while the list does not answer; the product waits for 2.5 s first, see the docs */
     if
     :: sid[r] != 0 && d_list[r] < SILENCE - MARGIN && !cutC[r] && !slow[r] && c_alive[sid[r]] ->
        quiet[L(0, sid[r])] = 0; quiet[L(1, sid[r])] = 0; d_list[r] = SILENCE - MARGIN
     :: else
     fi;
     /* has its session ended, or is this another Consul? */
     if
     :: sid[r] != 0 && !cutC[r] && (!c_alive[sid[r]] || !OURS(r)) ->
        hear[r]++;
        if :: hear[r] >= HEAR -> SAY(r, "hears that its session has ended"); lose(r) :: else fi
     :: else
     fi
  :: else
  fi;
  /* the lease of what works has ended: SIGTERM now, SIGKILL after the lapse */
  if
  :: inside[r] && !susp[r] && kill_in[r] == NEVER && (d_check[r] == 0 || d_list[r] == 0) && KILLER(r) -> kill_in[r] = LAPSE
  :: else
  fi;
  /* held keys are looked at */
  if
  :: inside[r] && CONSUL(r) && sid[r] == a_sid[r] && sid[r] != 0 && c_alive[sid[r]] && key != sid[r] ->
     robbed[r]++;
#ifdef NO_VERIFY
     if :: robbed[r] > VERIFY + LAPSE + 1 -> robbed[r] = VERIFY + LAPSE + 1 :: else fi;
#else
     if :: robbed[r] == VERIFY && kill_in[r] == NEVER -> kill_in[r] = LAPSE; SAY(r, "sees that its key was taken away") :: else fi;
#endif
#ifdef CHECK_FENCES
     if :: robbed[r] > VERIFY + LAPSE -> bad = UNNOTICED; SAYX("=== a command works on without its key, and nobody notices") :: else fi;
#endif
  :: else -> robbed[r] = 0
  fi
}

inline tick() {
  printf("tick\n");
  if :: delay > 0 -> delay-- :: else fi;
  for (hi : 1 .. NX-2) {
    if
    :: c_alive[hi] ->
       if :: c_left[hi] > 0 -> c_left[hi]-- :: else fi
    :: else ->
       if
       :: l_st[L(0, hi)] != WORKING && l_st[L(1, hi)] != WORKING && row_sid[0] != hi && row_sid[1] != hi -> c_ended[hi] = TAKEOVER_WAIT /* it matters no more */
       :: else -> if :: c_ended[hi] < TAKEOVER_WAIT -> c_ended[hi]++ :: else fi
       fi
    fi;
    for (hj : 0 .. 1) {
      if
      :: l_st[L(hj, hi)] == WORKING && pg_up[hj] -> if :: quiet[L(hj, hi)] < SILENCE -> quiet[L(hj, hi)]++ :: else fi
      :: else -> quiet[L(hj, hi)] = 0
      fi
    };
    hj = 0
  };
  hi = 0;
  pass(0);
  pass(1);
#ifdef LIVE
  if
  :: over -> calm++; if :: calm > LIMIT -> bad = STUCK; SAYX("=== the task has not ended") :: else fi
  :: else
  fi;
#endif
  judge()
}

active proctype Clock() provided (RUNS) {
  do
#ifdef LIVE
  :: d_step { !over -> tick() }
  :: d_step { timeout -> tick() } /* once the faults are over nobody dawdles */
#else
  :: d_step { true -> tick() }
#endif
  od
}

active proctype Judge() {
  end: do
  :: bad != 0 -> assert(bad == 0)
  od
}

/* ---- A replica's working process ---- */

proctype Replica(byte r) provided (RUNS) {
  bit ok;
  do
  /* -- a task's life: claim, lock, run, write, release -- */
  :: d_step { STEP(r) && pc[r] == IDLE && !inside[r] && rest[r] == 0 && LEASE(r) && PG(r) && trusted[r] && k_srv[r] == at[r] && MAY_CLAIM(r) && CLAIMABLE(at[r]) ->
       claims++;
       seq[at[r]]++;
       a_f[r] = k_from[r] + seq[at[r]]; a_sid[r] = sid[r]; a_no[r] = claims; unsettled[r] = 1;
       row[at[r]] = RUNNING; row_f[at[r]] = a_f[r]; row_sid[at[r]] = a_sid[r]; row_no[at[r]] = a_no[r];
       if
       :: a_f[r] > highest[r] -> highest[r] = ((faults & F_SEQ_BACK) -> a_f[r] : 0); pc[r] = CLAIMED; SAY(r, "claims the task"); printf("      fence %d\n", a_f[r])
       :: else -> back[r] = 1; doubt(r); pc[r] = REQUEUE; SAY(r, "notices that fences have gone back")
       fi }
  :: d_step { STEP(r) && pc[r] == CLAIMED && (!LEASE(r) || sid[r] != a_sid[r] || !trusted[r] || a_f[r] <= k_from[r]) -> pc[r] = REQUEUE; SAY(r, "has no lease any more to lock it under") }
  :: d_step { STEP(r) && pc[r] == CLAIMED && LEASE(r) && sid[r] == a_sid[r] && CONSUL(r) && trusted[r] && a_f[r] > k_from[r] ->
       if
       :: !c_alive[sid[r]] -> lose(r); pc[r] = REQUEUE; SAY(r, "may not lock it: its session has ended")
       :: c_alive[sid[r]] && !SAME_RECORD(r) -> doubt(r); pc[r] = REQUEUE; SAY(r, "may not lock it: the record of the database has changed")
       :: c_alive[sid[r]] && SAME_RECORD(r) && (key == sid[r] || (key == 0 && delay == 0)) -> key = sid[r]; pc[r] = LOCKED; SAY(r, "locks the key")
       :: else -> pc[r] = REQUEUE; SAY(r, "may not lock it: the key is held, or in its lock-delay")
       fi }
  :: d_step { STEP(r) && pc[r] == LOCKED ->
       if
       :: LEASE(r) && sid[r] == a_sid[r] ->
          pc[r] = WORK; inside[r] = 1; guard[r] = 1; kill_in[r] = NEVER; robbed[r] = 0; SAY(r, "starts the handler");
#ifdef CHECK_FENCES
#ifndef ONLY_OUTCOMES
          if :: a_f[r] <= top -> bad = FENCE; SAYX("=== a handler begins under a fence that is not above all before it") :: else fi;
          top = a_f[r];
#endif
#endif
          judge()
       :: else -> pc[r] = REQUEUE
       fi }
  :: d_step { STEP(r) && pc[r] == WORK && inside[r] && !susp[r] && kill_in[r] == NEVER && guard[r] -> gone(r); pc[r] = SUCCESS; SAY(r, "the handler ends well") }
  :: d_step { STEP(r) && pc[r] == WORK && inside[r] && !susp[r] && kill_in[r] == NEVER && guard[r] && !over -> gone(r); pc[r] = RETRY; SAY(r, "the handler fails") }
  :: d_step { STEP(r) && pc[r] == WORK && !inside[r] -> pc[r] = REQUEUE }
#ifdef RELEASE_FIRST
  :: d_step { STEP(r) && pc[r] == SUCCESS -> pc[r] = RELEASE; SAY(r, "does not write the outcome first") }
#endif
  :: d_step { STEP(r) && pc[r] >= SUCCESS && pc[r] <= REQUEUE && PG(r) ->
       if
       :: pc[r] == SUCCESS -> write_row(at[r], a_f[r], a_sid[r], a_no[r], DONE, ok)
       :: else -> write_row(at[r], a_f[r], a_sid[r], a_no[r], PENDING, ok)
       fi;
       if :: ok -> SAY(r, "writes the outcome") :: else -> SAY(r, "is refused: the row is not its own any more") fi;
#ifdef LIVE
       rest[r] = 1000/TICK; /* it waits a second before it claims again */
#endif
       unsettled[r] = 0; pc[r] = RELEASE; ok = 0 }
  :: d_step { STEP(r) && pc[r] == RELEASE ->
       if
       :: CONSUL(r) && key == a_sid[r] && sid[r] == a_sid[r] -> key = 0; SAY(r, "releases the key"); clears(r)
       :: else /* taken away, or of a lost session, or not reachable: what is left is looked for later */
       fi;
       idle(r) }
  /* the key of an attempt that is over is deleted (strays) */
  :: d_step { STEP(r) && pc[r] == IDLE && LEASE(r) && CONSUL(r) && key == sid[r] -> key = 0; SAY(r, "deletes a key that nobody works under"); clears(r) }
  /* a row that is ours and that we know nothing of is given back (audit) */
  :: d_step { STEP(r) && pc[r] == IDLE && LEASE(r) && PG(r) && row[at[r]] == RUNNING && row_sid[at[r]] == sid[r] ->
       row[at[r]] = PENDING; row_sid[at[r]] = 0; row_f[at[r]] = 0; row_no[at[r]] = 0; SAY(r, "gives back a claim that it knows nothing of") }

  /* -- its session -- */
  :: d_step { STEP(r) && sid[r] != 0 && CONSUL(r) && (!c_alive[sid[r]] || !OURS(r)) -> SAY(r, "hears that its session has ended"); lose(r) }
  /* the end of a lost session is made known when the attempt under it is over; the next session does not wait for that */
  :: d_step { STEP(r) && old[r] != 0 && OVER(r) && CONSUL(r) && !told[r] -> end_session(old[r], LOCK_DELAY); told[r] = 1; SAY(r, "ends its lost session in Consul") }
  :: d_step { STEP(r) && old[r] != 0 && OVER(r) && PG(r) ->
       if :: l_st[L(at[r], old[r])] == WORKING -> l_st[L(at[r], old[r])] = ENDED :: else fi;
       old[r] = 0; told[r] = 0; SAY(r, "says on the list that it has lost its session") }
  :: d_step { STEP(r) && sid[r] == 0 && CONSUL(r) && PG(r) && gen[r] < GENERATIONS && (cid != 0 && cid == l_cid[at[r]] || MAY_ADOPT(at[r])) ->
       if :: cid == 0 || cid != l_cid[at[r]] -> cid = (cid > l_cid[at[r]] -> cid + 1 : l_cid[at[r]] + 1); l_cid[at[r]] = cid; SAY(r, "adopts this Consul") :: else fi;
       sid[r] = SESSION(r, gen[r]); gen[r]++; t_cid[r] = cid;
       c_alive[sid[r]] = 1; c_left[sid[r]] = CHECK_TTL;
       l_st[L(at[r], sid[r])] = WORKING; quiet[L(at[r], sid[r])] = 0; l_here[L(at[r], sid[r])] = 1;
       d_check[r] = CHECK_TTL - MARGIN; d_list[r] = SILENCE - MARGIN; SAY(r, "begins a session") }
  :: d_step { STEP(r) && slow[r] && flight[r] != 0 && LEASE(r) -> /* the answer to a heartbeat */
#ifdef FROM_ANSWER
       if :: inC[r] -> d_check[r] = CHECK_TTL - MARGIN :: else fi;
       if :: inP[r] && flight[r] <= BEAT_TIMEOUT + 1 && trusted[r] && k_srv[r] == at[r] -> d_list[r] = SILENCE - MARGIN :: else fi;
#else
       if :: inC[r] && d_check[r] < CHECK_TTL - MARGIN - flight[r] + 1 -> d_check[r] = CHECK_TTL - MARGIN - flight[r] + 1 :: else fi;
       if :: inP[r] && flight[r] <= BEAT_TIMEOUT + 1 && trusted[r] && k_srv[r] == at[r] && d_list[r] < SILENCE - MARGIN - flight[r] + 1 -> d_list[r] = SILENCE - MARGIN - flight[r] + 1 :: else fi;
#endif
       NO_ANSWER(r) }

  /* -- which server is the database -- */
  :: d_step { STEP(r) && at[r] == 0 && pg_up[1] && !cutP[r] -> move(r) }
  :: d_step { MAY_SETTLE(r) && ON_RECORD(r) -> trust(r) }
  /* put this server on record: its fences begin above all that it knows of, */
  :: d_step { MAY_SETTLE(r) && !ON_RECORD(r) -> rec_from = FENCES_FROM(r); record(r); trust(r) }
#ifdef CHECK_FENCES
  /* or further above, by the clock and the random number */
  :: d_step { MAY_SETTLE(r) && !ON_RECORD(r) -> rec_from = FENCES_FROM(r) + FURTHER; record(r); trust(r) }
#endif
  :: d_step { STEP(r) && CONSUL(r) && trusted[r] && rec_srv != NO_RECORD && rec_srv > at[r] -> doubt(r); SAY(r, "sees that its Postgres server is an old primary") }

  /* -- the deaths of others -- */
  /* silence on the list and in Consul: end the session, give its lock back, then put it on the list */
  :: d_step { STEP(r) && LEASE(r) && CONSUL(r) && OURS(r) && PG(r) && trusted[r] && rec_ver == k_ver[r] && k_srv[r] == at[r] && SILENT_SESSION(r) ->
       for (hx : 1 .. NX-2) { if :: SILENT(r, hx) && c_alive[hx] -> end_session(hx, 0) :: else fi }; hx = 0;
       SAY(r, "has heard nothing for too long: ends the session of the other and gives its lock back") }
  :: d_step { STEP(r) && LEASE(r) && PG(r) && trusted[r] && k_srv[r] == at[r] && DEAD_SESSION(r) ->
       for (hx : 1 .. NX-2) { if :: GIVEN_UP(r, hx) -> l_st[L(at[r], hx)] = ENDED; l_here[L(at[r], hx)] = 0 :: else fi }; hx = 0;
       SAY(r, "declares the other dead on the list") }
#ifndef NO_TAKEOVER
  /* takeover: both witnesses say that the row's session has ended */
  :: d_step { STEP(r) && LEASE(r) && CONSUL(r) && OURS(r) && PG(r) && trusted[r] && OTHERS_ROW(r) && l_st[L(at[r], row_sid[at[r]])] == ENDED && c_alive[row_sid[at[r]]] ->
       end_session(row_sid[at[r]], 0); SAY(r, "ends the session of the dead one and gives its lock back") }
  :: d_step { STEP(r) && LEASE(r) && CONSUL(r) && OURS(r) && PG(r) && trusted[r] && OTHERS_ROW(r) && !c_alive[row_sid[at[r]]] && ON_LIST_DEAD(at[r], row_sid[at[r]]) ->
       SAY(r, "takes the task over");
#ifdef CHECK_FENCES
       if :: HOLDER_HAS_LEASE(r) -> bad = ALIVE; SAYX("=== a task is taken over while the lease of its holder lasts") :: else fi;
#endif
       row[at[r]] = PENDING; row_sid[at[r]] = 0; row_f[at[r]] = 0; row_no[at[r]] = 0 }
#endif
  od
}

/* ---- What is beside the working process: supervisor, guard, service manager ---- */

proctype Host(byte r) provided (RUNS) {
  do
  /* a command whose replica died may end before its lease does: its guard sees the socket close */
  :: d_step { st[r] == DOWN && inside[r] && guard[r] && !susp[r] -> gone(r); SAY(r, "the guard ends the command") }
  /* the supervisor: kill what is left, make the death known, start the next one */
  :: d_step { st[r] == DOWN && sup[r] && !swept[r] -> gone(r); swept[r] = 1; SAY(r, "the supervisor has killed what was left") }
#ifdef DECLARE_EARLY
  :: d_step { st[r] == DOWN && sup[r] && REACHES_P(r) && PROCESS_LISTED(r) ->
#else
  :: d_step { st[r] == DOWN && sup[r] && swept[r] && REACHES_P(r) && PROCESS_LISTED(r) ->
#endif
       for (hx : 1 .. NX-2) { if :: OF(r, hx) && l_st[L(at[r], hx)] == WORKING -> l_st[L(at[r], hx)] = ENDED; l_here[L(at[r], hx)] = 0 :: else fi }; hx = 0;
       SAY(r, "the supervisor declares it dead on the list") }
#ifdef DECLARE_EARLY
  :: d_step { st[r] == DOWN && sup[r] && REACHES_C(r) && PROCESS_IN_CONSUL(r) ->
#else
  :: d_step { st[r] == DOWN && sup[r] && swept[r] && REACHES_C(r) && PROCESS_IN_CONSUL(r) ->
#endif
       for (hx : 1 .. NX-2) { if :: OF(r, hx) -> end_session(hx, 0) :: else fi }; hx = 0;
       SAY(r, "the supervisor ends its session and gives its lock back") }
  :: d_step { st[r] == DOWN && sup[r] && swept[r] && !(REACHES_P(r) && PROCESS_LISTED(r)) && !(REACHES_C(r) && PROCESS_IN_CONSUL(r)) -> swept[r] = 0; st[r] = UP; SAY(r, "is started again") }
  /* the service manager starts a new one; that kills what it finds of the old one */
  :: d_step { st[r] == DOWN && !sup[r] -> gone(r); sup[r] = 1; swept[r] = 0; st[r] = UP; SAY(r, "is started again by the service manager") }
  /* the new one calls its predecessors dead whose process is gone from this machine, after the silence (mourn) */
  :: d_step { st[r] == UP && sid[r] == 0 && old[r] == 0 && pc[r] == IDLE && !inside[r] && PG(r) && PREDECESSOR(r) ->
       for (hx : 1 .. NX-2) { if :: OF(r, hx) && l_st[L(at[r], hx)] == WORKING && quiet[L(at[r], hx)] >= SILENCE -> l_st[L(at[r], hx)] = ENDED; l_here[L(at[r], hx)] = 0 :: else fi }; hx = 0;
       SAY(r, "calls its predecessor dead") }
  od
}

/* ---- Consul ends sessions whose check was not fed, at once or some time later ---- */

active proctype Consul() provided (RUNS) {
  do
  :: d_step { ANY(EXPIRED, 0) ->
       for (hx : 1 .. NX-2) { if :: EXPIRED(0, hx) -> end_session(hx, LOCK_DELAY); SAY((hx-1)%2, "Consul ends its session: the check was not fed") :: else fi }; hx = 0 }
  od
}

#ifdef OUTSIDER
/* `onejob lock KEY -- COMMAND`, which no fault hits: it knows only the key. */
active proctype Outsider() provided (RUNS) {
  do
  :: d_step { !o_in && key == 0 && delay == 0 -> key = OUTSIDERS; o_in = 1; SAYX("onejob lock takes the key and starts its command"); judge() }
  :: d_step { o_in -> o_in = 0; if :: key == OUTSIDERS -> key = 0 :: else fi; SAYX("onejob lock ends and releases the key") }
  od
}
#endif

/* ---- Faults ---- */

proctype Faults(byte r) provided (RUNS) {
  bit ok;
  do
  :: d_step { MAY(F_FREEZE) && st[r] == UP -> USE(F_FREEZE); st[r] = FROZEN; SAY(r, "*** is frozen") }
  :: d_step { MAY(F_SUSPEND) && !susp[r] && st[r] == UP -> USE(F_SUSPEND); susp[r] = 1; st[r] = FROZEN; SAY(r, "*** its machine is suspended") }
  :: d_step { susp[r] -> susp[r] = 0; st[r] = UP; SAY(r, "*** its machine goes on"); if :: inside[r] && !LEASE(r) -> kill_in[r] = 1 :: else fi; judge() }
  :: d_step { st[r] == FROZEN && !susp[r] -> st[r] = UP; SAY(r, "*** goes on"); judge() }
  :: d_step { MAY(F_WORKER_KILL) && st[r] != DOWN && !susp[r] -> USE(F_WORKER_KILL); dies(r); SAY(r, "*** its working process is killed") }
  :: d_step { MAY(F_KILL) && !susp[r] && sup[r] -> USE(F_KILL); dies(r); sup[r] = 0; SAY(r, "*** its supervisor and its working process are killed") }
  :: d_step { MAY(F_GUARD_KILL) && inside[r] && guard[r] && !susp[r] -> USE(F_GUARD_KILL); guard[r] = 0; SAY(r, "*** the guard is killed; something that the command started lives on") }
  :: d_step { MAY(F_DESTROY) && sid[r] != 0 && c_alive[sid[r]] -> USE(F_DESTROY); end_session(sid[r], LOCK_DELAY); SAY(r, "*** an operator destroys its session") }
  :: d_step { MAY(F_UNHEARD) && sid[r] != 0 && c_alive[sid[r]] -> USE(F_UNHEARD); end_session(sid[r], LOCK_DELAY); cutC[r] = 1; SAY(r, "*** is cut off from Consul, and an operator destroys its session") }
  :: d_step { MAY(F_CUT_CONSUL) && !cutC[r] -> USE(F_CUT_CONSUL); cutC[r] = 1; SAY(r, "*** is cut off from Consul") }
  :: d_step { cutC[r] -> cutC[r] = 0; SAY(r, "*** reaches Consul again") }
  :: d_step { MAY(F_CUT_PG) && !cutP[r] -> USE(F_CUT_PG); cutP[r] = 1; SAY(r, "*** is cut off from Postgres");
       if
       :: pc[r] == SUCCESS || pc[r] == RETRY -> late_no[r] = a_no[r]; late_sid[r] = a_sid[r]; late_f[r] = a_f[r]; late_ok[r] = (pc[r] == SUCCESS)
       :: else
       fi }
  :: d_step { cutP[r] -> cutP[r] = 0; SAY(r, "*** reaches Postgres again") }
  :: d_step { late_no[r] != 0 && pg_up[at[r]] ->
       SAY(r, "*** a statement that it had given up on arrives at Postgres");
       write_row(at[r], late_f[r], late_sid[r], late_no[r], (late_ok[r] -> DONE : PENDING), ok);
       late_no[r] = 0; late_ok[r] = 0; late_sid[r] = 0; late_f[r] = 0; ok = 0 }
  :: d_step { MAY(F_SLOW) && !slow[r] -> USE(F_SLOW); slow[r] = 1; SAY(r, "*** answers to its heartbeats come late") }
  :: d_step { slow[r] -> slow[r] = 0; NO_ANSWER(r); SAY(r, "*** answers come in time again") }
  od
}

/* Faults of what all replicas share. */
active proctype Disasters() provided (RUNS) {
  do
  :: d_step { MAY(F_KEY_DELETE) && key != 0 -> USE(F_KEY_DELETE); key = 0; SAYX("*** an operator deletes the key") }
  :: d_step { MAY(F_ROW_RESET) && row[PRIMARY] == RUNNING -> USE(F_ROW_RESET); row[PRIMARY] = PENDING; row_sid[PRIMARY] = 0; row_f[PRIMARY] = 0; row_no[PRIMARY] = 0; SAYX("*** an operator sets the row to pending") }
  :: d_step { MAY(F_SEQ_BACK) && seq[PRIMARY] > 0 -> USE(F_SEQ_BACK); seq[PRIMARY] = 0; SAYX("*** an operator sets the sequence of fences back") }

  :: d_step { MAY(F_RESTORE) && !s_made ->
       for (hx : 1 .. NX-1) { s_alive[hx] = c_alive[hx] }; hx = 0;
       s_key = key; s_cid = cid; s_srv = rec_srv; s_ver = rec_ver; s_from = rec_from; s_to = rec_to; s_made = 1; SAYX("a snapshot of Consul is made") }
  :: d_step { MAY(F_RESTORE) && s_made -> USE(F_RESTORE);
       for (hx : 1 .. NX-1) {
         if :: c_alive[hx] && !s_alive[hx] -> c_ended[hx] = ENDED_NOW :: else fi;
         c_alive[hx] = s_alive[hx];
         c_left[hx] = (s_alive[hx] -> CHECK_TTL : 0);
         s_alive[hx] = 0
       };
       hx = 0;
       key = s_key; cid = s_cid; rec_srv = s_srv; rec_ver = s_ver; rec_from = s_from; rec_to = s_to; delay = 0;
       s_key = 0; s_cid = 0; s_srv = 0; s_ver = 0; s_from = 0; s_to = 0; s_made = 0; SAYX("*** Consul is restored from the snapshot") }
  /* a snapshot from before the sessions began: it has the cluster's id and the record, and nothing else */
  :: d_step { MAY(F_RESTORE) && !s_made -> USE(F_RESTORE);
       for (hx : 1 .. NX-1) { if :: c_alive[hx] -> c_ended[hx] = ENDED_NOW :: else fi; c_alive[hx] = 0; c_left[hx] = 0 }; hx = 0;
       key = 0; delay = 0; cid = 1; rec_srv = 0; rec_ver = 1; rec_from = 0; rec_to = BLOCK; SAYX("*** Consul is restored from a snapshot that knows no session") }
  :: d_step { MAY(F_WIPE) -> USE(F_WIPE);
       for (hx : 1 .. NX-1) { if :: c_alive[hx] -> c_ended[hx] = ENDED_NOW :: else fi; c_alive[hx] = 0; c_left[hx] = 0 }; hx = 0;
       key = 0; delay = 0; cid = 0; rec_srv = NO_RECORD; rec_ver = 0; rec_from = 0; rec_to = 0; SAYX("*** Consul loses everything") }

  :: d_step { LAGS && PG_GOES_BACK && !synced && !pg_up[1] && !over -> synced = 1; COPY; SAYX("the standby has everything up to now") }
  :: d_step { MAY(F_FAILOVER) -> USE(F_FAILOVER);
       if :: !pg_up[1] -> PROMOTE :: else fi;
       GONE; SAYX("*** the primary dies; the standby takes its place") }
  :: d_step { MAY(F_SPLIT) && !pg_up[1] -> USE(F_SPLIT); PROMOTE; SAYX("*** the standby is promoted while the primary lives on") }
#ifdef LIVE
  :: d_step { pg_up[0] && pg_up[1] -> GONE; SAYX("*** the old primary is gone") }
#endif

#ifdef LIVE
  /* the faults are over: what was cut is joined, what was frozen goes on */
  :: d_step { !over && !(cutC[0] || cutC[1] || cutP[0] || cutP[1] || slow[0] || slow[1] || st[0] == FROZEN || st[1] == FROZEN || susp[0] || susp[1] || late_no[0] || late_no[1]) && !(pg_up[0] && pg_up[1]) ->
       over = 1; SAYX("the faults are over") }
#endif
  od
}

#ifdef NARROW
#define FIRST_GEN GENERATIONS
#else
#define FIRST_GEN 1
#endif

/* ---- The beginning: both replicas have a session, the task is pending ---- */

init {
  d_step {
#ifdef FAULTS_OF_ENVIRONMENT
    c_code { now.faults = atoi(getenv("FAULTS")); };
#else
    faults = FAULTS;
#endif
    budget = faults;
    pg_up[0] = 1; cid = 1; l_cid[0] = 1; l_cid[1] = 1;
    rec_srv = 0; rec_ver = 1; records = 1; rec_to = BLOCK; p_from[0] = 0;
    for (hx : 0 .. 1) {
      sup[hx] = 1; kill_in[hx] = NEVER; sid[hx] = SESSION(hx, 0); gen[hx] = FIRST_GEN; t_cid[hx] = 1; trusted[hx] = 1; k_ver[hx] = 1;
      c_alive[SESSION(hx, 0)] = 1; c_left[SESSION(hx, 0)] = CHECK_TTL;
      l_st[L(0, SESSION(hx, 0))] = WORKING; l_here[L(0, SESSION(hx, 0))] = 1;
      d_check[hx] = CHECK_TTL - MARGIN; d_list[hx] = SILENCE - MARGIN;
    }
    for (hx : 1 .. NX-2) { c_ended[hx] = TAKEOVER_WAIT }; hx = 0
#ifdef OUTSIDER
    c_alive[OUTSIDERS] = 1; claims = 0;
#endif
  }
  atomic { run Replica(0); run Host(0); run Faults(0);
#ifndef OUTSIDER
    run Replica(1); run Host(1)
#ifndef NARROW
    ; run Faults(1)
#endif
#endif
  }
}
