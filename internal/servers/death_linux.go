package servers

import "syscall"

// DieWithParent makes the kernel send signal to the process when its parent ends.
func DieWithParent(attr *syscall.SysProcAttr, signal syscall.Signal) { attr.Pdeathsig = signal }
