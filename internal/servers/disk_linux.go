package servers

import (
	"os"
	"syscall"
)

// unmountLazily takes a file system away from path, though files of it may be open.
func unmountLazily(path string) error { return syscall.Unmount(path, syscall.MNT_DETACH) }

// allocate makes a file longer by so many bytes, without writing them.
func allocate(f *os.File, size, more int64) error {
	return syscall.Fallocate(int(f.Fd()), 0, size, more)
}
