package consul

import "github.com/hashicorp/consul/api"

// keyNames makes the names of keys from what all of them begin with. The reused names of
// tasks are in names.go.
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
