package tasks

import (
	"fmt"
	"strings"
	"time"
)

// A HeldSnapshot is something that keeps Postgres from removing rows that were
// deleted or updated since it began: every claim reads past them.
type HeldSnapshot struct {
	What        string        // transaction, prepared transaction, replication slot or standby
	PID         int           // of the backend; zero if there is none
	Name        string        // of a prepared transaction or a replication slot
	User        string        // empty for a slot
	Application string        // application_name, which its client chose
	Age         time.Duration // since it began; zero for slots and standbys, whose beginning Postgres does not know
	Behind      int           // how many transactions began since, the database's age of its xmin
}

// String says what it is, and what there is to find it by.
func (h HeldSnapshot) String() string {
	parts := []string{h.What}
	add := func(format string, value any, there bool) {
		if there {
			parts = append(parts, fmt.Sprintf(format, value))
		}
	}
	add("%q", h.Name, h.Name != "")
	add("of pid %d", h.PID, h.PID != 0)
	text := strings.Join(parts, " ")
	parts = []string{text}
	add("user %q", h.User, h.User != "")
	add("application %q", h.Application, h.Application != "")
	add("open for %v", h.Age.Round(time.Second), h.Age > 0)
	add("%d transactions behind", h.Behind, true)
	return strings.Join(parts, ", ")
}
