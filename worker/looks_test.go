package worker

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"onejob/boottime"
	"onejob/tasks"
)

// listedReplica is a row of a list that answers heartbeats as store does.
type listedReplica struct {
	tasks.Replica
	transaction uint32
	sent        boottime.Instant
}

// Silence is never counted from before the last heartbeat was sent, and from no later than the
// look at which a whole list would have shown it, as soon as it lasts for two looks. That holds
// whatever whole lists and outages come in between.
func TestSilenceIsCountedFromTheLastHeartbeat(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	const replicas, all = 6, 20_000
	list := map[string]*listedReplica{}
	var transaction uint32
	server := time.Now()
	for i := range replicas {
		s := fmt.Sprint("r", i)
		list[s] = &listedReplica{Replica: tasks.Replica{Session: s, State: tasks.ReplicaWorking}}
	}
	beat := func(s string) {
		transaction++
		// Postgres' clock may be set back, so that two heartbeats may have the same time.
		list[s].transaction, list[s].sent, list[s].HeartbeatAt = transaction, boottime.Now(), time.Unix(r.Int64N(1_000_000), 0)
	}
	answer := func(k tasks.Known) tasks.Answer {
		digest := ""
		for i := range replicas {
			digest += fmt.Sprint(list[fmt.Sprint("r", i)].Running)
		}
		transaction++
		a := tasks.Answer{Server: server, Digest: digest, Transaction: transaction, Whole: digest != k.Digest || !k.Server.Equal(server)}
		for _, l := range list {
			if l.Quiet = k.Server.Equal(server) && l.transaction < k.Since; a.Whole || l.Quiet {
				a.Replicas = append(a.Replicas, l.Replica)
			}
		}
		return a
	}
	whole := func() (rows []tasks.Replica) {
		for _, l := range list {
			rows = append(rows, l.Replica)
		}
		return rows
	}
	for s := range list {
		beat(s)
	}
	m := &members{}
	shown := map[string]boottime.Instant{} // when a whole list would have shown the last heartbeat
	last := map[string]uint32{}
	looks, untold := map[string]int{}, 0 // since it was shown; answers with nobody
	for look := range all {
		for s := range list {
			if s != "r0" && r.IntN(8) > 0 { // r0 lives, others have pauses
				beat(s)
			}
		}
		beat("r0")
		switch r.IntN(40) {
		case 0:
			m.blind()
			clear(last) // the next answer shows all heartbeats
			continue
		case 1:
			m.saw(whole(), boottime.Now())
		case 2:
			list["r0"].Running++
		case 3:
			server = server.Add(time.Hour) // so does its first answer
			clear(last)
		}
		known, lists := m.known()
		a := answer(known)
		if r.IntN(40) == 0 {
			m.saw(whole(), boottime.Now())
		}
		m.answered(a, lists, boottime.Now())
		if !a.Whole && len(a.Replicas) == 0 {
			untold++
		}
		for s, l := range list {
			if looks[s]++; last[s] != l.transaction {
				last[s], shown[s], looks[s] = l.transaction, boottime.Now(), 0
			}
			since := m.seen[s].since // only the order counts here, and no time has to pass
			if since < l.sent {
				t.Fatalf("look %d: %s counts as silent since %v before its last heartbeat", look, s, l.sent.Sub(since))
			}
			if looks[s] >= 4 && since > shown[s] {
				t.Fatalf("look %d: %s counts as silent since %v after its last heartbeat was to be seen", look, s, since.Sub(shown[s]))
			}
		}
	}
	if untold < all/4 {
		t.Errorf("%d of %d answers told nothing", untold, all)
	}
}
