//go:build !linux

package servers

import "syscall"

// DieWithParent does nothing: only Linux can tell a process of the end of its parent.
func DieWithParent(*syscall.SysProcAttr, syscall.Signal) {}
