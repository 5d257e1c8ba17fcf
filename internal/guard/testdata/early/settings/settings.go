// Package settings ends the program if a variable is missing, as packages of users do.
package settings

import (
	"fmt"
	"os"
)

// Needed is read before main, and in this program before the guard begins.
var Needed = needed()

func needed() string {
	text, ok := os.LookupEnv("NEEDED")
	if !ok {
		fmt.Fprintln(os.Stderr, "NEEDED is not set")
		os.Exit(1)
	}
	return text
}
