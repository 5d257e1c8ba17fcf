package fakestore

import "time"

// Unhear makes the last heartbeat of a session one of an hour before.
func (d *Database) Unhear(session string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if m, ok := d.state.members[session]; ok {
		m.HeartbeatAt = m.HeartbeatAt.Add(-time.Hour)
		d.state.members[session] = m
	}
}
