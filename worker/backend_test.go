package worker

import (
	"errors"
	"strings"
	"testing"

	"onejob/boottime"
	"onejob/tasks"
)

// Of replicas with different backends, the one that began first takes slots, and no other does
// while it is alive. Slots that were not taken are asked for as soon as they may be.
func TestSameBackend(t *testing.T) {
	replica := func(session, backend string, state tasks.ReplicaState) tasks.Replica {
		return tasks.Replica{Session: session, Process: "process of " + session, LimitsBackend: backend, State: state}
	}
	me := replica("me", "consul", tasks.ReplicaWorking)
	m := &members{me: me}
	woken := 0
	l := &limits{ours: func() error { return m.sameBackend("me") }, wake: func() { woken++ }}
	l.held.Store(true)
	again := me
	again.Session, again.LimitsBackend = "mine before a reload", "rabbitmq"
	for _, test := range []struct {
		name string
		list []tasks.Replica
		want string // in the error; empty for none
	}{
		{"the list was not had yet", nil, "not known yet"},
		{"it does not have this session", []tasks.Replica{replica("a", "consul", tasks.ReplicaWorking)}, "not known yet"},
		{"another backend began before", []tasks.Replica{replica("a", "consul", tasks.ReplicaWorking), replica("b", "rabbitmq", tasks.ReplicaWorking), me}, "replica  keeps limits in rabbitmq"},
		{"it stops, and has tasks yet", []tasks.Replica{replica("b", "rabbitmq", tasks.ReplicaStopping), me}, "keeps limits in rabbitmq"},
		{"it has ended", []tasks.Replica{replica("b", "rabbitmq", tasks.ReplicaDead), me}, ""},
		{"it does not tell", []tasks.Replica{replica("b", "", tasks.ReplicaWorking), me}, ""},
		{"it began later", []tasks.Replica{me, replica("b", "rabbitmq", tasks.ReplicaWorking)}, ""},
		{"it is this process", []tasks.Replica{again, me}, ""},
	} {
		if test.list != nil {
			m.saw(test.list, boottime.Now())
		}
		switch err := m.sameBackend("me"); {
		case (err == nil) != (test.want == ""), err != nil && !strings.Contains(err.Error(), test.want):
			t.Errorf("%s: %v", test.name, err)
		case (test.want == "not known yet") != errors.Is(err, errUnlisted):
			t.Errorf("%s: %v is to be logged, or not", test.name, err)
		}
		if l.again(); woken > 0 != !l.held.Load() || test.want != "" && woken > 0 {
			t.Errorf("%s: woken %d times", test.name, woken)
		}
	}
	if woken != 1 {
		t.Errorf("woken %d times, not once", woken)
	}
	m.me.LimitsBackend = ""
	m.saw([]tasks.Replica{replica("b", "rabbitmq", tasks.ReplicaWorking)}, boottime.Now())
	if err := m.sameBackend("me"); err != nil {
		t.Errorf("with no backend to compare: %v", err)
	}
}
