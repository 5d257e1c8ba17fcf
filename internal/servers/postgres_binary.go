package servers

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
)

const postgresHint = "run scripts/postgres.sh, install your distribution's PostgreSQL server package, or set ONEJOB_POSTGRES_BIN to the folder that holds postgres and initdb"

// findPostgres returns the folder with PostgreSQL's server binaries: what
// ONEJOB_POSTGRES_BIN says, else PATH's, else the newest version in the folder
// that Debian and its kin use.
func findPostgres() (string, error) {
	if folder := os.Getenv("ONEJOB_POSTGRES_BIN"); folder != "" {
		if !holdsPostgres(folder) {
			return "", fmt.Errorf("ONEJOB_POSTGRES_BIN: %s does not hold postgres and initdb", folder)
		}
		return folder, nil
	}
	if path, err := exec.LookPath("postgres"); err == nil {
		// PATH may hold a link to the binary and none to its siblings.
		if path, err = filepath.EvalSymlinks(path); err == nil && holdsPostgres(filepath.Dir(path)) {
			return filepath.Dir(path), nil
		}
	}
	folders, _ := filepath.Glob("/usr/lib/postgresql/*/bin")
	slices.SortFunc(folders, func(a, b string) int { return postgresVersion(b) - postgresVersion(a) })
	for _, folder := range folders {
		if holdsPostgres(folder) {
			return folder, nil
		}
	}
	return "", errors.New("found no PostgreSQL server on this machine: " + postgresHint)
}

func holdsPostgres(folder string) bool {
	for _, name := range []string{"postgres", "initdb"} {
		if _, err := exec.LookPath(filepath.Join(folder, name)); err != nil {
			return false
		}
	}
	return true
}

// postgresVersion returns the 15 of /usr/lib/postgresql/15/bin.
func postgresVersion(folder string) int {
	version, _ := strconv.Atoi(filepath.Base(filepath.Dir(folder)))
	return version
}
