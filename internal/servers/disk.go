package servers

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
)

// CanFillDisks returns why servers cannot have file systems of their own here, which can be
// made full; nil if they can.
var CanFillDisks = sync.OnceValue(func() error {
	if os.Geteuid() != 0 {
		return errors.New("it needs root, to mount file systems")
	}
	f, err := makeFolder("", "disk", 4<<20)
	if err != nil {
		return err
	}
	return f.remove()
})

// image is the file that holds a folder's own file system, beside it.
func (f *folder) image() string { return f.path + ".disk" }

// filler is the file that leaves no room for others in it.
func (f *folder) filler() string { return filepath.Join(f.path, "filler") }

// mount gives the folder a file system of its own, of so many bytes. The image has holes: it
// takes no more room than what is written there, and what fills it takes none.
func (f *folder) mount(bytes int64) error {
	image, err := os.OpenFile(f.image(), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err == nil {
		err = errors.Join(image.Truncate(bytes), image.Close())
	}
	if err != nil {
		return err
	}
	// Nothing is reserved for root: full is full.
	for _, do := range [][]string{{"mkfs.ext4", "-q", "-F", "-m", "0", f.image()}, {"mount", "-o", "loop", f.image(), f.path}} {
		if out, err := exec.Command(do[0], do[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%v: %w: %s", do, err, out)
		}
	}
	f.mounted = true
	return nil
}

// unmount takes a file system away again, if there is one, also one that another process has mounted.
func (f *folder) unmount() {
	_ = unmountLazily(f.path)
	_ = os.Remove(f.image())
}

// fill leaves no room in the folder's own file system. What is deleted there later makes
// room again, until the next call.
func (f *folder) fill() error {
	if !f.mounted {
		return fmt.Errorf("fill the disk of %s: it has none of its own", f.path)
	}
	filler, err := os.OpenFile(f.filler(), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		if errors.Is(err, syscall.ENOSPC) {
			return nil
		}
		return fmt.Errorf("fill the disk of %s: %w", f.path, err)
	}
	defer filler.Close()
	info, err := filler.Stat()
	if err != nil {
		return fmt.Errorf("fill the disk of %s: %w", f.path, err)
	}
	size := info.Size()
	for more := int64(1 << 30); more >= 4096; {
		switch err := allocate(filler, size, more); err {
		case nil:
			size += more
		case syscall.ENOSPC:
			more /= 2
		case syscall.EINTR:
		default:
			return fmt.Errorf("fill the disk of %s: %w", f.path, err)
		}
	}
	return nil
}

// free makes room again.
func (f *folder) free() error {
	if err := os.Remove(f.filler()); err != nil && !os.IsNotExist(err) {
		return fmt.Errorf("make room on the disk of %s: %w", f.path, err)
	}
	return nil
}

// FillDisk leaves no room on the server's disk, which is there with DiskBytes. What the server
// deletes makes room again, until the next call. FreeDisk ends it.
func (p *Postgres) FillDisk() error { return p.folder.fill() }

// FreeDisk makes room again on the server's disk. A server that has ended is not started.
func (p *Postgres) FreeDisk() error { return p.folder.free() }

// FillDisk is like that of [Postgres].
func (c *Consul) FillDisk() error { return c.folder.fill() }

// FreeDisk is like that of [Postgres].
func (c *Consul) FreeDisk() error { return c.folder.free() }

// Dir is the server's own folder, with its disk if it has one. Close removes it.
func (c *Consul) Dir() string { return c.folder.path }
