package http

import (
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"unicode"

	"onejob/internal/quiet"
)

// allowList says where requests may go.
type allowList []place

// place is an origin, and the path of a URL there.
type place struct {
	origin string // scheme, host and port, each in its one canonical form
	path   string // decoded
}

func parseAllowed(entry string) (place, error) {
	u, err := url.Parse(entry)
	if err != nil {
		return place{}, quiet.URL(err)
	}
	if strings.ContainsAny(entry, "?#") {
		return place{}, errors.New("must have no query and no fragment")
	}
	p, err := locate(u)
	if err != nil {
		return place{}, err
	}
	p.path = strings.TrimSuffix(p.path, "/")
	if strings.Contains(p.path+"/", "//") {
		return place{}, errors.New("must have no empty segments in its path")
	}
	return p, nil
}

// check returns an error, made for the one who wrote the URL, unless u leads to
// where the list allows.
func (l allowList) check(u *url.URL) error {
	p, err := locate(u)
	if err != nil {
		return err
	}
	for _, allowed := range l {
		below, ok := strings.CutPrefix(p.path, allowed.path)
		if ok && p.origin == allowed.origin && (below == "" || below[0] == '/') {
			return nil
		}
	}
	return fmt.Errorf("is not allowed; to open it, add %s://%s, with as much of its path as should be opened, to kinds.http.allow",
		u.Scheme, u.Host)
}

// locate returns where a URL leads. It refuses whatever two programs could read
// in two ways, so that what is checked here is what the receiver acts on.
func locate(u *url.URL) (place, error) {
	if u.Scheme != "http" && u.Scheme != "https" {
		return place{}, errors.New("must begin with http:// or https://")
	}
	if u.Opaque != "" || u.Hostname() == "" {
		return place{}, errors.New("must name a host")
	}
	if u.User != nil {
		return place{}, errors.New("must not hold a user name or password; send an Authorization header")
	}
	host, err := canonicalHost(u.Hostname())
	if err != nil {
		return place{}, err
	}
	port := uint64(80)
	if u.Scheme == "https" {
		port = 443
	}
	if s := u.Port(); s != "" {
		if port, err = strconv.ParseUint(s, 10, 64); err != nil || port < 1 || port > math.MaxUint16 {
			return place{}, fmt.Errorf("port %s is not between 1 and %d", s, math.MaxUint16)
		}
	}
	for segment := range strings.SplitSeq(u.EscapedPath(), "/") {
		if err := checkSegment(segment); err != nil {
			return place{}, err
		}
	}
	return place{
		origin: fmt.Sprintf("%s://%s:%d", u.Scheme, host, port),
		path:   u.Path,
	}, nil
}

func canonicalHost(host string) (string, error) {
	if strings.Contains(host, ":") {
		ip, err := netip.ParseAddr(host)
		if err != nil || ip.Zone() != "" {
			return "", fmt.Errorf("host %q is not an IPv6 address without a zone", host)
		}
		return "[" + ip.String() + "]", nil
	}
	if strings.ContainsFunc(host, func(r rune) bool {
		return r > unicode.MaxASCII || !unicode.IsLetter(r) && !unicode.IsDigit(r) && !strings.ContainsRune("-._", r)
	}) {
		return "", fmt.Errorf("host %q must be letters, digits, hyphens and dots; write other alphabets as xn--", host)
	}
	return strings.ToLower(host), nil
}

// checkSegment refuses a segment of a path that a receiver could take for a
// step upwards, or for several segments, however often it decodes it and
// whether or not it cuts off parameters (..;x=y).
func checkSegment(escaped string) error {
	segment := decoded(escaped)
	name, _, _ := strings.Cut(segment, ";")
	if name == "." || name == ".." || strings.ContainsAny(segment, `/\`) || strings.ContainsFunc(segment, unicode.IsControl) {
		return fmt.Errorf("must have no dots alone, slashes, backslashes or control characters, encoded or not, in a segment of its path (%q)", escaped)
	}
	return nil
}

// decoded returns a segment decoded until nothing in it is encoded. A percent sign that begins no
// encoding stays, as with receivers that are lenient. What must not be in a segment does not go away
// by decoding it once more, so the end is all that has to be looked at. It takes one pass: %252525...
// decoded step by step would take minutes for a path that fits into a row.
func decoded(segment string) string {
	b := make([]byte, 0, len(segment))
	for _, c := range []byte(segment) {
		b = append(b, c)
		for n := len(b); n >= 3 && b[n-3] == '%'; n = len(b) {
			var one [1]byte
			if _, err := hex.Decode(one[:], b[n-2:]); err != nil {
				break
			}
			b = append(b[:n-3], one[0])
		}
	}
	return string(b)
}
