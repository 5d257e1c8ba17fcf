package servers

import (
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"strings"
)

// Ports are chosen below Linux's range for outgoing connections (32768 and up):
// a server that is stopped and started again must find its port still free, and
// no client's connection takes one of these in the meantime.
const (
	lowestPort  = 15000
	highestPort = 32000
)

// localhost is where servers listen that have no reason to be elsewhere.
const localhost = "127.0.0.1"

// freePorts returns n different ports that were free for both TCP and UDP a
// moment ago, on each of the hosts; without hosts, on 127.0.0.1. Another process
// may take one before the caller does.
func freePorts(n int, hosts ...string) ([]int, error) {
	if len(hosts) == 0 {
		hosts = []string{localhost}
	}
	var ports []int
	for range 1000 {
		port := lowestPort + rand.IntN(highestPort-lowestPort)
		taken := func(host string) bool { return !isFree(address(host, port)) }
		if slices.Contains(ports, port) || slices.ContainsFunc(hosts, taken) {
			continue
		}
		if ports = append(ports, port); len(ports) == n {
			return ports, nil
		}
	}
	return nil, fmt.Errorf("found no %d free ports between %d and %d on %s", n, lowestPort, highestPort, strings.Join(hosts, ", "))
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
