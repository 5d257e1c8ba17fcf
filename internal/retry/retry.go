// Package retry waits, and says for how long before what has failed is tried again.
package retry

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/url"
	"time"
)

// Network reports whether an error is the network's, so that it may not come again: nobody listens,
// no answer came in time, or a connection broke off. What TLS refuses, such as a certificate, stays
// refused.
func Network(err error) bool {
	if errors.As(err, new(*tls.CertificateVerificationError)) {
		return false
	}
	if op, ok := errors.AsType[*net.OpError](err); ok {
		return op.Op != "remote error" && op.Op != "local error" // an alert of TLS
	}
	timed, ok := errors.AsType[net.Error](err)
	return ok && timed.Timeout() || errors.As(err, new(*url.Error)) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}

// Backoff returns how long to wait after so many failures: 100 ms doubling up to 2 s, with
// jitter, so that replicas do not come back in step.
func Backoff(failures int) time.Duration {
	d := min(2*time.Second, 100*time.Millisecond<<min(failures-1, 5))
	return d/2 + rand.N(d/2+1)
}

// Pause waits for d, or for ctx to end.
func Pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}
