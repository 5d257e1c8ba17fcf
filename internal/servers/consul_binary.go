package servers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
)

// oldestConsul is the first version that knows the settings used here.
var oldestConsul = consulVersion{1, 14, 0}

// findConsul returns the path of Consul's binary: what ONEJOB_CONSUL_BIN says,
// else PATH's unless it is too old, else the newest that was built into the
// cache. scripts/consul.sh looks in the same places.
func findConsul(ctx context.Context) (string, error) {
	if path := os.Getenv("ONEJOB_CONSUL_BIN"); path != "" {
		path, err := exec.LookPath(path)
		if err != nil {
			return "", fmt.Errorf("ONEJOB_CONSUL_BIN: %w", err)
		}
		return path, nil
	}
	tooOld := ""
	if path, err := exec.LookPath("consul"); err == nil {
		output, err := exec.CommandContext(ctx, path, "version").Output()
		if version, ok := parseConsulVersion(string(output)); err == nil && ok && version.compare(oldestConsul) >= 0 {
			return path, nil
		}
		tooOld = fmt.Sprintf(" (%s is older than %v)", path, oldestConsul)
	}
	if path, ok := cachedConsul(); ok {
		return path, nil
	}
	return "", errors.New("found no Consul server on this machine" + tooOld +
		": run `make consul`, which builds one, or set ONEJOB_CONSUL_BIN to its path")
}

// cachedConsul returns the newest $XDG_CACHE_HOME/onejob/consul-*/consul.
func cachedConsul() (string, bool) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", false
	}
	paths, _ := filepath.Glob(filepath.Join(cache, "onejob", "consul-*", "consul"))
	slices.SortFunc(paths, func(a, b string) int {
		newer, _ := parseConsulVersion(filepath.Dir(b))
		older, _ := parseConsulVersion(filepath.Dir(a))
		return newer.compare(older)
	})
	for _, path := range paths {
		if _, err := exec.LookPath(path); err == nil {
			return path, true
		}
	}
	return "", false
}

type consulVersion [3]int

var consulVersionPattern = regexp.MustCompile(`(?i)consul[- ]v?(\d+)\.(\d+)\.(\d+)`)

// parseConsulVersion finds the version in "Consul v1.22.5" and in "consul-1.22.5".
func parseConsulVersion(text string) (version consulVersion, ok bool) {
	match := consulVersionPattern.FindStringSubmatch(text)
	if match == nil {
		return version, false
	}
	for i := range version {
		version[i], _ = strconv.Atoi(match[i+1])
	}
	return version, true
}

func (v consulVersion) compare(w consulVersion) int { return slices.Compare(v[:], w[:]) }

func (v consulVersion) String() string { return fmt.Sprintf("%d.%d.%d", v[0], v[1], v[2]) }
