package consul

import (
	"bytes"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/boottime"
)

// keyNames makes the names of keys from what all of them begin with.
type keyNames string

func (p keyNames) taskKey(key string) string        { return string(p) + "/tasks/" + key }
func (p keyNames) replicaKey(session string) string { return string(p) + "/replicas/" + session }
func (p keyNames) leaderPath() string               { return string(p) + "/leader" }
func (p keyNames) clusterKey() string               { return string(p) + "/cluster" }

// databaseKey holds the record of the database. It belongs to no session. Every
// transaction that locks a task checks that the record is the one that the task was
// claimed under, so a replica that has missed a change of it locks nothing.
func (p keyNames) databaseKey() string { return string(p) + "/database" }

// stoppedKey is where a replica says that it has stopped in order, if the cluster's list
// could not be told. No session holds it.
func (p keyNames) stoppedKey(session string) string { return string(p) + "/stopped/" + session }

func (p keyNames) limitsFolder() string           { return string(p) + "/limits/" }
func (p keyNames) limitFolder(name string) string { return string(p) + "/limits/" + name + "/" }
func (p keyNames) limitLock(name string) string   { return p.limitEntry(name, api.DefaultSemaphoreKey) }
func (p keyNames) limitEntry(name, session string) string {
	return string(p) + "/limits/" + name + "/" + session
}
func (p keyNames) settingsFolder() string          { return string(p) + "/limit-settings/" }
func (p keyNames) limitSetting(name string) string { return string(p) + "/limit-settings/" + name }

// Reused names. A key that is deleted leaves a tombstone in Consul for a quarter of an
// hour, so a key per task would make Consul's memory grow with the number of tasks done.
// A task that shares its lock with nothing else (lock.Request.Task) is locked under one
// of a fixed set of names instead, <prefix>/running/<id modulo names>, and released by
// unlocking the key, which stays there. The value begins with the task's id.
//
// If another task has that name, the task is locked under its own name,
// <prefix>/tasks/<id>, and a marker, <prefix>/overflow/<group>, says that this group of
// names has such tasks. Two replicas that lock one task collide, whichever name each of
// them uses, because each of these is one transaction:
//
//   - Where there is no marker, the reused name is locked if there is still none.
//   - Where there is one, the reused name is locked if there is no own name and it could be
//     locked; it is then deleted again. Locking it, and not only looking for it, also
//     observes its lock-delay.
//   - The own name is locked, and the marker is written, if the reused name is still as
//     it was when its value was found to name another task, or if it is not there and
//     could be locked.
//
// So a task is held under its own name only while there is a marker, and under at most
// one of the two names. A marker is deleted when no task of its group has been held under
// its own name for a while, if nobody has written it since that was looked at.
//
// While a replica lives that locks every task under its own name, of an older version or
// with another number of names, and for a while after, all replicas use own names, in the
// third way.
//
// A session that dies while it holds a reused name takes the value along: for the
// lock-delay no other task gets that name, nor its own.
//
// Within one session Consul would grant a name twice. Names in use are on the session's
// list; and a name about which a request was not answered is not used again for burntFor,
// since the request may be applied late and would lock or unlock what another task has
// locked.
const (
	names     = 16384 // a takeover lists all of them, some 200 bytes of JSON each
	groupSize = 64    // tasks that are claimed together have ids in a row, and so few groups

	// gateRest is for how long a marker that was seen is taken to be there still.
	gateRest = 10 * time.Second

	// burntFor is for how long a name is not used again about which a request was not
	// answered: much longer than Consul may take to apply it, see lateness.
	burntFor = 15 * time.Minute
)

// A group is a part of the reused names.
type group int

func groupOf(task int64) group { return group(task % names / groupSize) }

// TaskKeys returns the keys under which the lock of a task may be kept, the usual one
// first, given the prefix of all keys and the row's lock_key, nil if it has none.
func TaskKeys(prefix string, task int64, lockKey *string) []string {
	p := keyNames(prefix)
	if lockKey != nil {
		return []string{p.taskKey(*lockKey)}
	}
	return []string{p.reusedKey(task), p.taskKey(strconv.FormatInt(task, 10))}
}

func (p keyNames) reusedFolder() string { return string(p) + "/running/" }
func (p keyNames) reusedKey(task int64) string {
	return string(p) + "/running/" + strconv.FormatInt(task%names, 10)
}
func (p keyNames) markersFolder() string    { return string(p) + "/overflow/" }
func (p keyNames) markerKey(g group) string { return p.markersFolder() + strconv.Itoa(int(g)) }

// appendReusedValue appends the value of the reused name of a task with this key.
func appendReusedValue(b []byte, key string, rest []byte) []byte {
	return append(append(append(b, key...), ' '), rest...)
}

// namesAnother reports whether the value of a reused name says that a task other than
// the one with this key has it. A value that is not understood does not.
func namesAnother(value []byte, key string) bool {
	holder, _, ok := bytes.Cut(value, []byte(" "))
	if _, err := strconv.ParseUint(string(holder), 10, 63); err != nil || !ok {
		return false
	}
	return string(holder) != key
}

// markers remembers which groups had a marker when this replica last heard of them.
type markers struct {
	mu    sync.Mutex
	seen  map[group]boottime.Instant
	empty map[group]emptied
}

// emptied is since when no task of a group was seen under its own name, while the group's
// marker had this index.
type emptied struct {
	index uint64
	at    boottime.Instant
}

func (m *markers) add(g group) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.seen[g] = boottime.Now()
}

func (m *markers) has(g group) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	at, ok := m.seen[g]
	if ok && boottime.Now().Sub(at) > gateRest {
		delete(m.seen, g)
		return false
	}
	return ok
}

// unused returns operations that delete the markers which have not been in use for a
// while: the own name of a holder that died may not be had before.
func (m *markers) unused(all api.KVPairs, inUse map[string]bool, folder string, rest time.Duration) (gone api.TxnOps) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := boottime.Now()
	empty := map[group]emptied{}
	for _, pair := range all {
		n, err := strconv.Atoi(strings.TrimPrefix(pair.Key, folder))
		if err != nil || inUse[pair.Key] {
			continue
		}
		e := m.empty[group(n)]
		if e.index != pair.ModifyIndex {
			e = emptied{pair.ModifyIndex, now}
		}
		empty[group(n)] = e
		if now.Sub(e.at) > rest {
			gone = append(gone, op(api.KVDeleteCAS, api.KVTxnOp{Key: pair.Key, Index: pair.ModifyIndex}))
		}
	}
	m.empty = empty
	return gone
}
