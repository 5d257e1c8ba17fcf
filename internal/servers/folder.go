package servers

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

const folderPrefix = "onejob-"

// marker is a file in each folder that was made here. Nothing else is ever swept away, whatever
// its name.
const marker = ".made-by-onejob"

// newFolder is the age below which folders are left alone by sweep,
// as their owner may be about to lock them.
const newFolder = time.Minute

// folder is where one server keeps all its files. Its owner holds a lock on it,
// which the kernel drops when the owner dies: a folder that can be locked is
// litter.
type folder struct {
	path    string
	lock    *os.File
	mounted bool // it has a file system of its own
}

// makeFolder makes a folder under base, or under /tmp when base is empty, that
// every user can enter. It does not honour TMPDIR, which often lies where
// the user that PostgreSQL runs as cannot go. If disk is not zero, the folder is a file system
// of its own, of so many bytes; that needs root.
func makeFolder(base, server string, disk int64) (*folder, error) {
	if base == "" {
		base = "/tmp"
	}
	base, err := filepath.Abs(base)
	if err != nil {
		return nil, fmt.Errorf("folder for %s: %w", server, err)
	}
	sweep(base)
	path, err := os.MkdirTemp(base, folderPrefix+server+"-*")
	if err != nil {
		return nil, fmt.Errorf("make a folder for %s: %w", server, err)
	}
	f := &folder{path: path}
	if err := f.mark(); err != nil {
		return nil, f.abandon(err)
	}
	if disk > 0 {
		if err := errors.Join(f.mount(disk), f.mark()); err != nil {
			return nil, f.abandon(err)
		}
	}
	if err := os.Chmod(path, 0o755); err != nil {
		return nil, f.abandon(err)
	}
	if f.lock, err = lockFolder(path); err != nil {
		return nil, f.abandon(err)
	}
	return f, nil
}

// MakeFolder makes a folder for the files of one process, under base, or under /tmp when base is
// empty. If the process dies without remove, a later one that makes a folder there removes it.
func MakeFolder(base, name string) (path string, remove func() error, err error) {
	f, err := makeFolder(base, name, 0)
	if err != nil {
		return "", nil, err
	}
	return f.path, f.remove, nil
}

// mark notes that the folder was made here.
func (f *folder) mark() error { return os.WriteFile(filepath.Join(f.path, marker), nil, 0o644) }

// abandon removes a folder that is not going to be used, because of err.
func (f *folder) abandon(err error) error {
	f.remove()
	return fmt.Errorf("prepare folder %s: %w", f.path, err)
}

// remove deletes the folder and all it holds.
func (f *folder) remove() error {
	if f.lock != nil {
		defer f.lock.Close()
	}
	f.unmount()
	return os.RemoveAll(f.path)
}

// sub makes a folder within the folder that belongs to user, and only to it.
func (f *folder) sub(name string, owner *account) (string, error) {
	path := filepath.Join(f.path, name)
	if err := os.Mkdir(path, 0o700); err != nil {
		return "", err
	}
	if owner != nil {
		if err := os.Chown(path, int(owner.uid), int(owner.gid)); err != nil {
			return "", err
		}
	}
	return path, nil
}

// lockFolder fails when another process holds the lock. The servers do not
// inherit the lock: it ends with this process, whatever becomes of them.
func lockFolder(path string) (*os.File, error) {
	dir, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(dir.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		dir.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return dir, nil
}

// sweep removes what processes of this user that died without Close left in
// base. It is a courtesy, so it has no errors.
func sweep(base string) {
	paths, _ := filepath.Glob(filepath.Join(base, folderPrefix+"*-*"))
	for _, path := range paths {
		info, err := os.Lstat(path)
		if err != nil || !info.IsDir() || time.Since(info.ModTime()) < newFolder {
			continue
		}
		if _, err := os.Lstat(filepath.Join(path, marker)); err != nil {
			continue
		}
		if owner := info.Sys().(*syscall.Stat_t).Uid; int(owner) != os.Geteuid() {
			continue
		}
		if lock, err := lockFolder(path); err == nil {
			(&folder{path: path, lock: lock}).remove()
		}
	}
}
