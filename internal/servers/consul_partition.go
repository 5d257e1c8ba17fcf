package servers

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
)

// CanPartition returns why the servers of a cluster cannot be cut off from each other here;
// nil if they can.
func CanPartition() error {
	if os.Geteuid() != 0 {
		return errors.New("it needs root, for iptables")
	}
	if out, err := exec.Command("iptables", "-w", "-S", "INPUT").CombinedOutput(); err != nil {
		return fmt.Errorf("iptables does not work here: %w: %s", err, out)
	}
	return nil
}

// Isolate cuts a server off from the others of its cluster, until the func that it returns is
// called. Clients and agents reach all servers meanwhile. The rules are the kernel's, and
// survive this process; they name the cluster's ports.
func (k *ConsulCluster) Isolate(server *Consul) (rejoin func() error, err error) {
	var rules [][]string
	for _, other := range k.Servers {
		if other == server {
			continue
		}
		for _, way := range [][2]string{{server.host, other.host}, {other.host, server.host}} {
			for _, protocol := range []string{"tcp", "udp"} {
				rules = append(rules, []string{"INPUT", "-i", "lo", "-s", way[0], "-d", way[1], "-p", protocol, "-m", "multiport",
					"--ports", strconv.Itoa(server.ports.server) + "," + strconv.Itoa(server.ports.serf), "-j", "DROP"})
			}
		}
	}
	rejoin = func() error {
		var errs []error
		for _, rule := range rules {
			errs = append(errs, iptables("-D", rule))
		}
		return errors.Join(errs...)
	}
	for i, rule := range rules {
		if err := iptables("-I", rule); err != nil {
			rules = rules[:i]
			return nil, errors.Join(err, rejoin())
		}
	}
	return rejoin, nil
}

func iptables(do string, rule []string) error {
	if out, err := exec.Command("iptables", append([]string{"-w", do}, rule...)...).CombinedOutput(); err != nil {
		return fmt.Errorf("iptables %s %v: %w: %s", do, rule, err, out)
	}
	return nil
}
