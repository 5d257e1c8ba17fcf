package exec

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"time"

	"onejob/internal/guard"
)

// What a command's process may use, and as whom it runs.

// Size is a number of bytes. As a text it may have a unit: 64KiB, 512MiB, 2GiB.
type Size int64

var sizeUnits = []struct {
	name  string
	bytes int64
}{{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40}}

// UnmarshalText accepts a whole number of bytes, or one with a unit.
func (s *Size) UnmarshalText(text []byte) error {
	number, unit := string(text), int64(1)
	for _, u := range sizeUnits {
		if rest, ok := strings.CutSuffix(number, u.name); ok {
			number, unit = strings.TrimSpace(rest), u.bytes
		}
	}
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil || n < 0 || n > math.MaxInt64/unit {
		return errors.New("a size in bytes, such as 1048576, 64KiB, 512MiB or 2GiB")
	}
	*s = Size(n * unit)
	return nil
}

// String returns the size with the largest unit that divides it.
func (s Size) String() string {
	for _, u := range slices.Backward(sizeUnits) {
		if s != 0 && int64(s)%u.bytes == 0 {
			return fmt.Sprintf("%d%s", int64(s)/u.bytes, u.name)
		}
	}
	return strconv.FormatInt(int64(s), 10)
}

// Name is the name or the number of a user or a group.
type Name string

// UnmarshalText accepts every text.
func (n *Name) UnmarshalText(text []byte) error {
	*n = Name(text)
	return nil
}

// limits returns those of the command.
func (c Command) limits() guard.Limits {
	return guard.Limits{Memory: int64(c.MemoryMax), PIDs: c.PIDsMax, CPU: c.CPUMax}
}

// EnableLimits makes the limits of the commands available, or returns an error that
// says what to do. A replica calls it before it runs anything, and when it reloads its
// configuration: it may move the process to another cgroup.
func (c Config) EnableLimits() error {
	var all guard.Limits
	var who []string
	for _, name := range slices.Sorted(maps.Keys(c.Commands)) {
		l := c.Commands[name].limits()
		if l != (guard.Limits{}) {
			who = append(who, strconv.Quote(name))
		}
		all.Memory, all.PIDs, all.CPU = max(all.Memory, l.Memory), max(all.PIDs, l.PIDs), max(all.CPU, l.CPU)
	}
	if err := guard.EnableLimits(all); err != nil {
		return fmt.Errorf("memory_max, pids_max or cpu_max of command %s: %w", strings.Join(who, ", "), err)
	}
	return nil
}

// CheckTimes returns an error if a command could still be running when its lock is granted to
// another task: margin is how much earlier than the backend a replica ends a lease, lockDelay how
// long a key stays locked whose session was ended. Times that are not above zero are not looked at.
func CheckTimes(margin, lockDelay time.Duration) error {
	const kill = "a command can live for 500ms after %s, and the kernel needs up to 100ms to kill it; the minimum is 500ms + 100ms = %v"
	var errs []error
	if margin > 0 && margin < guard.MinMargin {
		errs = append(errs, fmt.Errorf("consul.margin: %v is too short for commands: "+kill, margin, "its lease has ended", guard.MinMargin))
	}
	if lockDelay > 0 && lockDelay < guard.MinMargin {
		errs = append(errs, fmt.Errorf("consul.lock_delay: %v is too short for commands: "+kill, lockDelay, "its session was destroyed", guard.MinMargin))
	}
	return errors.Join(errs...)
}

// Enable makes the limits of the commands available, see [Config.EnableLimits], or returns an
// error if commands cannot be had with these times, see [CheckTimes]. A worker calls it before
// it runs anything of the kind.
func (k *Kind) Enable(margin, lockDelay time.Duration) error {
	if len(k.commands) == 0 {
		return nil
	}
	if err := cmp.Or(CheckTimes(margin, lockDelay), guard.CheckProc()); err != nil {
		return err
	}
	if err := guard.Try(); err != nil {
		return err
	}
	return Config{Commands: k.commands}.EnableLimits()
}

// credential returns the user that the command runs as, or nil if that is the
// daemon's own.
func (c Command) credential() (*guard.Credential, error) {
	if c.User == "" && c.Group == "" {
		return nil, nil
	}
	found := &user.User{Uid: strconv.Itoa(os.Geteuid())}
	if c.User != "" {
		found = &user.User{Uid: string(c.User)}
	}
	known, err := lookupUser(found.Uid)
	if err == nil {
		found = known
	} else if _, notNumber := parseID(found.Uid); notNumber != nil {
		return nil, fmt.Errorf("user: there is no user %q", found.Uid)
	} else if c.Group == "" {
		return nil, fmt.Errorf("user: there is no user with the number %s, so group must be set as well", found.Uid)
	}
	if c.Group != "" {
		if g, err := user.LookupGroup(string(c.Group)); err == nil {
			found.Gid = g.Gid
		} else if _, notNumber := parseID(string(c.Group)); notNumber != nil {
			return nil, fmt.Errorf("group: there is no group %q", c.Group)
		} else {
			found.Gid = string(c.Group)
		}
	}
	var all guard.Credential
	var errs [2]error
	all.UID, errs[0] = parseID(found.Uid)
	all.GID, errs[1] = parseID(found.Gid)
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fmt.Errorf("user: %w", err)
	}
	if known != nil {
		groups, err := known.GroupIds()
		if err != nil {
			return nil, fmt.Errorf("user: look up the groups of %s: %w", known.Username, err)
		}
		for _, text := range groups {
			if id, err := parseID(text); err == nil && id != all.GID {
				all.Groups = append(all.Groups, id)
			}
		}
	}
	if os.Geteuid() != 0 {
		if int(all.UID) == os.Geteuid() && int(all.GID) == os.Getegid() {
			return nil, nil // it is the daemon's own already
		}
		return nil, fmt.Errorf("user: only root can run a command as another user, and this is user %d; "+
			"run onejob as root, or as that user, or remove user and group", os.Geteuid())
	}
	return &all, nil
}

func lookupUser(nameOrNumber string) (*user.User, error) {
	if u, err := user.Lookup(nameOrNumber); err == nil {
		return u, nil
	}
	return user.LookupId(nameOrNumber)
}

func parseID(text string) (uint32, error) {
	id, err := strconv.ParseUint(text, 10, 32)
	if err != nil || id == math.MaxUint32 { // setuid(2) takes that for "do not change"
		return 0, fmt.Errorf("%q is no number of a user or a group", text)
	}
	return uint32(id), nil
}
