package store_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"onejob/internal/testenv"
	"onejob/store"
	"onejob/tasks"
)

func TestAClaimNamesItsServer(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	server, err := b.Server(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if server.Timeline != 1 || server.Standby || server.System == "" || server.FencesFrom != -1 {
		t.Errorf("the server is %+v", server)
	}
	b.insert()
	claim := tasks.Claim{Session: b.session, Replica: "r", Kinds: []string{"noop"}, Max: 5, Server: server.Started.Add(time.Microsecond)}
	if got, err := b.Claim(t.Context(), claim); !errors.Is(err, tasks.ErrOtherServer) || len(got.Tasks) > 0 {
		t.Errorf("a claim from another server: %v, %v", got, err)
	}
	equal(t, "after it", strings.Join(b.sql(`SELECT concat_ws(' ', status, attempt, fence IS NULL) FROM onejob.tasks`), " "), "pending 0 t")

	claim.Server, claim.FencesFrom = server.Started, 1000
	got, err := b.Claim(t.Context(), claim)
	if err != nil || len(got.Tasks) != 1 {
		t.Fatal(got, err)
	}
	task := got.Tasks[0]
	after, err := b.Server(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if task.Fence != 1000+after.LastFence || !task.Server.Equal(server.Started) {
		t.Errorf("the fence is %d of %v, after %d", task.Fence, task.Server, after.LastFence)
	}
}

// I3: after a failover a fence alone could be that of somebody else's attempt.
func TestACompletionNeedsItsSession(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.insert()
	task := b.claimOne()
	stranger := *task
	stranger.Session = uuid.NewString()
	if err := b.Complete(t.Context(), succeeded(&stranger)); !errors.Is(err, tasks.ErrRefused) {
		t.Errorf("Complete under another session: %v", err)
	}
	if err := b.Requeue(t.Context(), &stranger, 0); err != nil {
		t.Error(err)
	}
	if err := b.Begin(t.Context(), &stranger); !errors.Is(err, tasks.ErrRefused) {
		t.Errorf("Begin under another session: %v", err)
	}
	equal(t, "the task", strings.Join(b.sql(`SELECT concat_ws(' ', status, attempt, begun_at IS NULL) FROM onejob.tasks`), " "), "running 1 t")
	if err := b.Complete(t.Context(), succeeded(task)); err != nil {
		t.Error(err)
	}
}

// A DSN that names several servers leads past an old primary, and past one that is gone.
func TestOldPrimariesAreLeft(t *testing.T) {
	t.Parallel()
	primary, db := testenv.OwnPostgres(t)
	standby, copied := db.Standby(t, primary)
	host := func(d *testenv.DB) string { return strings.Split(strings.Split(d.DSN, "@")[1], "/")[0] }
	dsn := strings.Replace(db.DSN, host(db), host(db)+","+host(copied), 1) + "&target_session_attrs=read-write"
	s := open(t, store.Config{DSN: dsn})
	old, err := s.Which(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if s.Follow(t.Context(), old) {
		t.Error("a standby is taken for a successor")
	}
	if err := standby.Promote(t.Context()); err != nil {
		t.Fatal(err)
	}
	direct := open(t, store.Config{DSN: copied.DSN})
	now, err := direct.Which(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if old.System != now.System || now.Timeline != old.Timeline+1 || old.Same(now) {
		t.Errorf("the old one is %+v, the new one %+v", old, now)
	}
	if got, err := s.Which(t.Context()); err != nil || !got.Same(old) {
		t.Errorf("before it is refused: %+v, %v", got, err)
	}
	follower := open(t, store.Config{DSN: dsn})
	if got, err := follower.Which(t.Context()); err != nil || !got.Same(old) {
		t.Errorf("before the new one is looked for: %+v, %v", got, err)
	}
	if !follower.Follow(t.Context(), old) {
		t.Error("the new one is not found")
	}
	if got, err := follower.Which(t.Context()); err != nil || !got.Same(now) {
		t.Errorf("after it was found: %+v, %v", got, err)
	}
	if follower.Follow(t.Context(), now) {
		t.Error("the old one is taken for a successor")
	}
	s.Refuse(now)
	if got, err := s.Which(t.Context()); err != nil || !got.Same(now) {
		t.Errorf("after it was refused: %+v, %v", got, err)
	}
	lonely := open(t, store.Config{DSN: db.DSN})
	lonely.Refuse(now)
	if _, err := lonely.Which(t.Context()); err == nil || !strings.Contains(err.Error(), "it is an old primary") {
		t.Errorf("with the old one alone: %v", err)
	}
}

// What a guide for libpq says is understood, and what cannot be meant is refused by name.
func TestNetworkParametersOfLibpq(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	for _, more := range []string{"keepalives=1&keepalives_idle=5&keepalives_interval=2&keepalives_count=3", "tcp_user_timeout=5000", "keepalives=0",
		"load_balance_hosts=random", "load_balance_hosts=disable"} {
		s := open(t, store.Config{DSN: b.dsn + "&" + more})
		if err := s.Ping(t.Context()); err != nil {
			t.Errorf("%s: %v", more, err)
		}
	}
	for more, want := range map[string]string{
		"keepalives_idle=soon":      `keepalives_idle: "soon" is not a whole number`,
		"tcp_user_timeout=-1":       `tcp_user_timeout: "-1" is not a whole number`,
		"load_balance_hosts=always": `load_balance_hosts: "always" is neither disable nor random`,
	} {
		if _, err := store.Open(store.Config{DSN: b.dsn + "&" + more}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", more, err)
		}
	}
}

// A server that is cut off is noticed once, and not once for each connection.
func TestDeadConnectionsAreReplacedTogether(t *testing.T) {
	t.Parallel()
	db := testenv.Postgres(t)
	way := testenv.NewProxy(t, strings.Split(strings.Split(db.DSN, "@")[1], "/")[0])
	s := open(t, store.Config{DSN: strings.Replace(db.DSN, strings.Split(strings.Split(db.DSN, "@")[1], "/")[0], way.Addr, 1), Timeout: time.Second})
	if err := s.CheckPool(t.Context()); err != nil { // opens several
		t.Fatal(err)
	}
	if n := s.Pool().Stat().TotalConns(); n < 2 {
		t.Fatalf("there are %d connections", n)
	}
	way.Cut()
	if _, err := s.Which(t.Context()); err == nil {
		t.Fatal("an answer came through the cut")
	}
	testenv.Eventually(t, time.Minute, "all connections are gone", func() bool { return s.Pool().Stat().TotalConns() == 0 })
	way.Heal()
	if _, err := s.Which(t.Context()); err != nil {
		t.Error(err)
	}
}
