package onejob

import (
	_ "embed"
	"os"
	"path/filepath"

	"onejob/internal/cli"
)

//go:embed config.example.yaml
var exampleConfig string

// Main is the main function of a program with handlers of its own. It has the commands,
// the configuration, the environment, the health endpoint and the logs of the command
// onejob: "PROGRAM serve" runs a replica, which also runs the built-in kinds as they are
// configured. It does not return.
//
// "PROGRAM serve" starts the program once more as the working process, and again after a
// crash. What main does before Main is done in each of these processes; open connections
// when a handler first needs them.
//
// Main panics if two handlers have the same name. Names of built-in kinds (exec, http,
// sql, noop) are refused when a replica starts.
func Main(kinds ...Kinds) {
	cli.Main(cli.Program{Name: filepath.Base(os.Args[0]), Kinds: merge(kinds), Example: exampleConfig})
}
