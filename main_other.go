//go:build !linux

package onejob

import (
	"fmt"
	"os"
)

// Main needs Linux. On other systems it says so on stderr and ends the process with exit
// code 2; handlers can be compiled and tested there.
func Main(kinds ...Kinds) {
	merge(kinds)
	fmt.Fprintln(os.Stderr, "onejob: a replica needs Linux; on this system handlers can be compiled and tested")
	os.Exit(2)
}
