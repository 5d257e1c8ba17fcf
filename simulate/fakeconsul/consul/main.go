// Command consul is the fake Consul as a program, for tests that start a server: it takes the
// configuration files of a real one, and looks at nothing in them but what it needs.
//
//	go build -o /tmp/fake/consul ./simulate/fakeconsul/consul
//	ONEJOB_CONSUL_BIN=/tmp/fake/consul go test ./lock/consul -run ...
//
// It keeps nothing on disk, and has no ACLs, TLS or other members.
package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"onejob/simulate/fakeconsul"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 1 && args[0] == "version" {
		fmt.Println("Consul v1.22.5\nThis is the fake of onejob's simulation.")
		return nil
	}
	var settings struct {
		Server     bool           `json:"server"`
		Node       string         `json:"node_name"`
		ClientAddr string         `json:"client_addr"`
		Ports      map[string]int `json:"ports"`
		ACL        any            `json:"acl"`
		TLS        any            `json:"tls"`
		Join       []string       `json:"retry_join"`
		MinTTL     string         `json:"session_ttl_min"`
	}
	for _, arg := range args {
		file, ok := strings.CutPrefix(arg, "-config-file=")
		if !ok {
			continue
		}
		b, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if err := json.Unmarshal(b, &settings); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	if !settings.Server || settings.ACL != nil || settings.TLS != nil || len(settings.Join) > 0 {
		return fmt.Errorf("the fake Consul is one server without ACLs and TLS")
	}
	var config fakeconsul.Config
	if settings.MinTTL != "" {
		var err error
		if config.MinTTL, err = time.ParseDuration(settings.MinTTL); err != nil {
			return err
		}
	}
	return http.ListenAndServe(net.JoinHostPort(settings.ClientAddr, strconv.Itoa(settings.Ports["http"])), fakeconsul.New(config).Agent(settings.Node))
}
