package servers

import (
	_ "embed"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

//go:embed clock/clock.c
var clockSource []byte

// makeClock makes a clock in a folder, right at first, and returns the environment of a
// program that has it. It compiles a library, because libfaketime cannot be used: it reads
// its file with what may allocate memory, and a server of PostgreSQL that looks at the clock
// in a signal handler dies of that now and then.
func makeClock(dir string) (environment []string, err error) {
	file, library := clockFile(dir), filepath.Join(dir, "clock.so")
	environment = []string{"LD_PRELOAD=" + library, "ONEJOB_CLOCK=" + file}
	if exists(library) {
		return environment, nil
	}
	source := filepath.Join(dir, "clock.c")
	if err := os.WriteFile(source, clockSource, 0o644); err != nil {
		return nil, err
	}
	if err := os.WriteFile(file, make([]byte, 8), 0o644); err != nil {
		return nil, err
	}
	if err := os.Chmod(file, 0o644); err != nil { // the server may run as another user, and the umask be strict
		return nil, err
	}
	if out, err := exec.Command("cc", "-shared", "-fPIC", "-O2", "-o", library, source).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("compile a clock (install a C compiler, gcc and libc6-dev on Debian): %w\n%s", err, out)
	}
	return environment, os.Chmod(library, 0o755)
}

// setClock sets the clock in a folder to so much ahead of the machine's.
func setClock(dir string, ahead time.Duration) error {
	file, err := os.OpenFile(clockFile(dir), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer file.Close()
	_, err = file.WriteAt(binary.NativeEndian.AppendUint64(nil, uint64(ahead)), 0) // in place: the file is mapped
	return err
}

func clockFile(dir string) string { return filepath.Join(dir, "clock") }
