// Package discover stands in for github.com/hashicorp/go-discover when Consul is built here. The original
// asks the interfaces of clouds for addresses of servers, and brings a client of each: a hundred packages,
// among them the largest of all that Consul compiles. This one has what Consul's agent calls, and no cloud.
package discover

import (
	"errors"
	"log"
)

// Provider is a cloud that knows addresses of servers.
type Provider interface {
	Addrs(args map[string]string, l *log.Logger) ([]string, error)
	Help() string
}

// Providers holds none.
var Providers = map[string]Provider{}

// Discover knows no address.
type Discover struct{}

// Option is an option of New.
type Option func(*Discover) error

// New returns a Discover, with any options the same one.
func New(...Option) (*Discover, error) { return &Discover{}, nil }

// WithUserAgent returns an Option that is ignored.
func WithUserAgent(string) Option { return nil }

// WithProviders returns an Option that is ignored.
func WithProviders(map[string]Provider) Option { return nil }

// Names returns none.
func (*Discover) Names() []string { return nil }

// Addrs returns an error. Consul logs it, and goes on with the addresses that it was given.
func (*Discover) Addrs(string, *log.Logger) ([]string, error) {
	return nil, errors.New("this Consul was built without clients of clouds: give it addresses instead of provider=...")
}
