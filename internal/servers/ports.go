package servers

import (
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
)

// Ports are chosen below Linux's range for outgoing connections (32768 and up):
// a server that is stopped and started again must find its port still free, and
// no client's connection takes one of these in the meantime.
const (
	lowestPort  = 15000
	highestPort = 32000
)

// freePorts returns n different ports of 127.0.0.1 that were free for both TCP
// and UDP a moment ago. Another process may take one before the caller does.
func freePorts(n int) ([]int, error) {
	var ports []int
	for range 1000 {
		port := lowestPort + rand.IntN(highestPort-lowestPort)
		if slices.Contains(ports, port) || !isFree(port) {
			continue
		}
		if ports = append(ports, port); len(ports) == n {
			return ports, nil
		}
	}
	return nil, fmt.Errorf("found no %d free ports between %d and %d on 127.0.0.1", n, lowestPort, highestPort)
}

func isFree(port int) bool {
	address := localAddress(port)
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

func localAddress(port int) string {
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
}
