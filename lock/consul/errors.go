package consul

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"syscall"

	"github.com/hashicorp/consul/api"
)

// answer is what is known after a request that was to change something.
type answer int

const (
	applied    answer = iota
	conflict          // nothing was changed, because of the operations listed
	notApplied        // nothing was changed, and later it may work
	unknown           // it may have been applied, or may still be
	wrong             // the request can never work: a bug, or a right that is missing
)

// classify says what an error means for a request that was to change something.
// The texts are Consul's own; a test against a real server holds each of them.
func classify(err error) answer {
	if err == nil {
		return applied
	}
	var status api.StatusError
	if errors.As(err, &status) {
		switch status.Code {
		case http.StatusConflict:
			return conflict
		case http.StatusTooManyRequests, http.StatusServiceUnavailable:
			return notApplied
		case http.StatusBadRequest, http.StatusForbidden, http.StatusRequestEntityTooLarge:
			return wrong
		}
		if strings.Contains(status.Body, "No cluster leader") {
			return notApplied
		}
		return unknown
	}
	var dial *net.OpError
	if errors.As(err, &dial) && dial.Op == "dial" || errors.Is(err, syscall.ECONNREFUSED) {
		return notApplied
	}
	return unknown
}

// txnErrors returns what a conflict lists, by operation.
func txnErrors(err error) api.TxnErrors {
	var status api.StatusError
	if !errors.As(err, &status) || status.Code != http.StatusConflict {
		return nil
	}
	var body api.TxnResponse
	if json.Unmarshal([]byte(status.Body), &body) != nil {
		return nil
	}
	return body.Errors
}

// rules are the rights that a token needs, as Consul's policies have them.
func (c Config) rules() []string {
	rules := []string{
		fmt.Sprintf("key_prefix %q { policy = \"write\" }", c.Prefix+"/"),
		`session_prefix "" { policy = "write" }`,
	}
	if c.Liveness == Check {
		rules = append(rules, fmt.Sprintf("service %q { policy = \"write\" }", c.Service))
	}
	return rules
}

// explain adds what an operator can do about err.
func (c Config) explain(err error) error {
	var status api.StatusError
	var dns *net.DNSError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &status) && status.Code == http.StatusForbidden, strings.Contains(err.Error(), "Permission denied"), strings.Contains(err.Error(), "ACL not found"):
		return fmt.Errorf("%w; the token (consul.token or CONSUL_HTTP_TOKEN) needs these rules: %s", err, strings.Join(c.rules(), "  "))
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("%w; is a Consul agent running at %s? (consul.address or CONSUL_HTTP_ADDR)", err, c.Client.Address)
	case errors.As(err, &dns):
		return fmt.Errorf("%w; check the name in consul.address or CONSUL_HTTP_ADDR", err)
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%w; Consul at %s does not answer in time", err, c.Client.Address)
	}
	return err
}
