package servers

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// removeSharedMemory gives back the few bytes of System V shared memory that mark
// a data folder as in use. A server does so itself when it stops; one that was
// killed leaves it to the next start, which may never come. The server must have
// ended. Root in a container may not remove what belongs to others, so the
// server's own account is asked to then.
func removeSharedMemory(data string, owner *account) {
	id, ok := sharedMemory(data)
	if !ok {
		return
	}
	if _, err := unix.SysvShmCtl(id, unix.IPC_RMID, nil); err == unix.EPERM || err == unix.EACCES {
		cmd := exec.Command("ipcrm", "-m", strconv.Itoa(id))
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: owner.credential()}
		_ = cmd.Run() // some bytes are left if it fails
	}
}

// sharedMemory returns the number of the segment, if there is one: it is in a
// file that a server removes when it stops.
func sharedMemory(data string) (id int, ok bool) {
	text, err := os.ReadFile(filepath.Join(data, "postmaster.pid"))
	if err != nil {
		return 0, false
	}
	const line = 6 // counted from 0: the segment's key and its number
	lines := strings.Split(string(text), "\n")
	if len(lines) <= line {
		return 0, false
	}
	fields := strings.Fields(lines[line])
	if len(fields) != 2 {
		return 0, false
	}
	id, err = strconv.Atoi(fields[1])
	return id, err == nil
}
