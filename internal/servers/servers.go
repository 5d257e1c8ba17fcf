// Package servers runs a private PostgreSQL and a private Consul: real servers,
// for tests and for trying things out on one machine.
//
// Every server listens on 127.0.0.1 only, on ports that nobody else was using and
// that this package gives to nobody else until Close, and keeps its data in a folder
// of its own. Stop, Kill and Start again on the same ports and the same data are how
// tests take a service away and give it back.
// The servers do not share the terminal's process group, so Ctrl-C reaches the
// program that started them and not the servers.
//
// What is promised about the end: Close stops the server and removes its folder.
// When the program dies without Close, even by kill -9, the kernel takes its
// servers down too, and the next program that starts a server removes the
// folder that was left.
//
// What is not promised is anything that a production server needs. There are no
// passwords: everybody who can log in to this machine can use the servers. Unless
// asked otherwise, PostgreSQL leaves syncing to the kernel: it survives its own
// death by kill -9 but not that of the machine.
//
// The servers must be installed; scripts/postgres.sh and scripts/consul.sh see
// to that. Linux only.
package servers

import (
	"context"
	"errors"
	"fmt"
	"time"
)

const (
	startTimeout = 8 * time.Minute  // a server that takes longer is broken
	stopTimeout  = 20 * time.Second // a server that takes longer is killed
	startTries   = 5                // as ports may be taken between choosing and binding
)

// startOnFreePorts chooses n ports that are free on all hosts (127.0.0.1 if there
// are none) and calls start with them, and does so again with other ports when
// somebody was faster at taking one. held has those of the last call.
func startOnFreePorts(ctx context.Context, held *heldPorts, n int, start func(ports []int) error, hosts ...string) error {
	for try := 1; ; try++ {
		held.release()
		if err := held.choose(n, hosts...); err != nil {
			return err
		}
		err := start(held.numbers)
		if err == nil || try == startTries || ctx.Err() != nil {
			return err
		}
		if exit, ok := errors.AsType[*exitError](err); !ok || !exit.portTaken() {
			return err
		}
	}
}

// startContext bounds how long a start may take.
func startContext(ctx context.Context, what string) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, startTimeout,
		fmt.Errorf("%s was not ready within %v", what, startTimeout))
}
