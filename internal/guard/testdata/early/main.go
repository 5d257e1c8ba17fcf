// Command early cannot start a guard: a package of its own needs a variable, which guards do not have.
package main

import (
	"fmt"

	"onejob/internal/guard"
	"onejob/internal/guard/testdata/early/settings"
)

func main() {
	fmt.Println(settings.Needed, guard.Try())
}
