package consul

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"syscall"

	"github.com/hashicorp/consul/api"

	"onejob/internal/retry"
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
	if status, ok := errors.AsType[api.StatusError](err); ok {
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
	if dial, ok := errors.AsType[*net.OpError](err); ok && dial.Op == "dial" || errors.Is(err, syscall.ECONNREFUSED) {
		return notApplied
	}
	return unknown
}

// Unavailable reports whether an error of this package says that Consul, or the way to it, is
// unavailable or busy, so that the same request may succeed later. A missing right, a certificate
// that is not trusted and a limit that does not exist are no such errors. What a request was
// to change may have been changed nevertheless.
func Unavailable(err error) bool {
	switch status, answered := errors.AsType[api.StatusError](err); {
	case err == nil, denied(err):
		return false
	case answered:
		return status.Code >= 500 || status.Code == http.StatusTooManyRequests ||
			status.Code == http.StatusConflict // others were faster at each try
	}
	return retry.Network(err)
}

// txnErrors returns what a conflict lists, by operation.
func txnErrors(err error) api.TxnErrors {
	status, ok := errors.AsType[api.StatusError](err)
	if !ok || status.Code != http.StatusConflict {
		return nil
	}
	var body api.TxnResponse
	if json.Unmarshal([]byte(status.Body), &body) != nil {
		return nil
	}
	return body.Errors
}

// rules are the rights that a token needs at least, as Consul's policies have them,
// given the name of the agent's node.
func (c Config) rules(node string) []string {
	rules := []string{
		fmt.Sprintf("key_prefix %q { policy = \"write\" }", c.Prefix+"/"),
		fmt.Sprintf("session %q { policy = \"write\" }", node),
	}
	if c.Liveness == Check {
		rules = append(rules, fmt.Sprintf("service %q { policy = \"write\" }", c.Service))
	}
	return rules
}

// incomplete is what a list is an error of that Consul has left something out of,
// because the token may not see it. It counts as a right that is missing.
func incomplete(what string) error {
	return api.StatusError{Code: http.StatusForbidden, Body: "Permission denied: the token lacks permission 'key:read' on " + what}
}

// denied reports whether Consul has refused a request for want of a right, or does not know the token.
func denied(err error) bool {
	status, ok := errors.AsType[api.StatusError](err)
	return ok && status.Code == http.StatusForbidden || strings.Contains(err.Error(), "Permission denied") || strings.Contains(err.Error(), "ACL not found")
}

// explain adds what an operator can do about err.
func (c Config) explain(err error) error {
	switch {
	case err == nil:
		return nil
	case denied(err):
		return fmt.Errorf("%w; the token (consul.token or CONSUL_HTTP_TOKEN) needs these rules: %s (NODE is the name of the agent's node)", err, strings.Join(c.rules("NODE"), "  "))
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("%w; is a Consul agent running at %s? (consul.address or CONSUL_HTTP_ADDR)", err, c.Client.Address)
	case errors.As(err, new(x509.UnknownAuthorityError)):
		return fmt.Errorf("%w; set consul.ca_file (CONSUL_CACERT) to the certificate of the authority that signed the agent's", err)
	case errors.As(err, new(x509.HostnameError)):
		return fmt.Errorf("%w; set consul.tls_server_name (CONSUL_TLS_SERVER_NAME) to a name in the agent's certificate", err)
	case strings.Contains(err.Error(), "remote error: tls: "):
		return fmt.Errorf("%w; does the agent accept the client certificate? (consul.cert_file and consul.key_file, or CONSUL_CLIENT_CERT and CONSUL_CLIENT_KEY)", err)
	case strings.Contains(err.Error(), "HTTP request to an HTTPS server"):
		return fmt.Errorf("%w; write consul.address (CONSUL_HTTP_ADDR) with https://", err)
	case strings.Contains(err.Error(), "HTTP response to HTTPS client"):
		return fmt.Errorf("%w; is %s the agent's HTTPS port? (ports.https in the agent's configuration)", err, c.Client.Address)
	case errors.As(err, new(*net.DNSError)):
		return fmt.Errorf("%w; check the name in consul.address or CONSUL_HTTP_ADDR", err)
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%w; Consul at %s does not answer in time", err, c.Client.Address)
	}
	return err
}
