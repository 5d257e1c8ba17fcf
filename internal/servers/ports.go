package servers

import (
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
)

// Ports are chosen below Linux's range for outgoing connections (32768 and up):
// a server that is stopped and started again must find its port still free, and
// no client's connection takes one of these in the meantime, nor a server of
// another program; see heldPorts.
const (
	lowestPort  = 15000
	highestPort = 32000
)

// localhost is where servers listen that have no reason to be elsewhere.
const localhost = "127.0.0.1"

// heldPorts are those of one server, or of the servers of one cluster: nobody else who chooses
// ports with this package gets them, in this program or another, until release or the end of
// this program. The zero value has none.
//
// A port is held by a socket in Linux's abstract namespace whose name has the number. Such a
// name has no file and no permissions, and the kernel drops it with the process. Like ports, names
// are those of a network namespace. Nobody connects to the socket.
type heldPorts struct {
	numbers []int
	sockets []net.Listener
}

// choose holds n ports that were free for both TCP and UDP a moment ago, on each of the hosts;
// without hosts, on 127.0.0.1. A process that does not use this package may take one before the
// caller does.
func (h *heldPorts) choose(n int, hosts ...string) error {
	if len(hosts) == 0 {
		hosts = []string{localhost}
	}
	for range 1000 {
		if h.take(lowestPort+rand.IntN(highestPort-lowestPort), hosts...) && len(h.numbers) == n {
			return nil
		}
	}
	h.release()
	return fmt.Errorf("found no %d free ports between %d and %d on %s", n, lowestPort, highestPort, strings.Join(hosts, ", "))
}

// take holds a port if nobody does and it is free on all hosts, and reports whether it could.
// The name comes first: isFree binds the port for a moment, in which its server could not start
// again.
func (h *heldPorts) take(port int, hosts ...string) bool {
	socket, err := net.Listen("unix", fmt.Sprint("@onejob-port-", port))
	if err != nil {
		return false
	}
	for _, host := range hosts {
		if !isFree(address(host, port)) {
			socket.Close()
			return false
		}
	}
	h.numbers, h.sockets = append(h.numbers, port), append(h.sockets, socket)
	return true
}

// release gives all ports back.
func (h *heldPorts) release() {
	for _, socket := range h.sockets {
		socket.Close()
	}
	*h = heldPorts{}
}

func isFree(address string) bool {
	tcp, err := net.Listen("tcp", address)
	if err != nil {
		return false
	}
	defer tcp.Close()
	udp, err := net.ListenPacket("udp", address)
	if err != nil {
		return false
	}
	udp.Close()
	return true
}

func localAddress(port int) string { return address(localhost, port) }

func address(host string, port int) string { return net.JoinHostPort(host, strconv.Itoa(port)) }
