package servers

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"strconv"
	"syscall"
)

// account is the user that a server runs as, when it is not the current one.
type account struct{ uid, gid uint32 }

// unprivileged returns the account for a server that refuses to run as root:
// nil, which means the current user, unless that is root.
func unprivileged() (*account, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		found, err := user.Lookup(name)
		if errors.As(err, new(user.UnknownUserError)) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("look up user %s: %w", name, err)
		}
		uid, err := strconv.ParseUint(found.Uid, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("user %s: %w", name, err)
		}
		gid, err := strconv.ParseUint(found.Gid, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("user %s: %w", name, err)
		}
		return &account{uid: uint32(uid), gid: uint32(gid)}, nil
	}
	return nil, errors.New("PostgreSQL does not run as root and there is neither a user postgres nor nobody to run it as: add one of them, or run this as another user")
}

// credential is for syscall.SysProcAttr.
func (a *account) credential() *syscall.Credential {
	if a == nil {
		return nil
	}
	return &syscall.Credential{Uid: a.uid, Gid: a.gid}
}
