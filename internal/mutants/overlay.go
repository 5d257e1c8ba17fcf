// Package mutants holds builds of onejob in each of which one thing that protects is broken. A
// test that does not tell them from the real one is worth nothing.
//
// A mutant is a text of the source that is replaced by another one when it is built. So nothing
// of it is in the product: the flag -overlay of the go command names files to take instead.
package mutants

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// A Patch replaces a text of a file, which has it once.
type Patch struct{ File, Old, New string }

// Overlay is the files of a build that are not taken as they are.
type Overlay map[string]string

// Apply applies a patch to a file below root.
func (o Overlay) Apply(root string, p Patch) error {
	path := filepath.Join(root, p.File)
	text, ok := o[path]
	if !ok {
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		text = string(b)
	}
	if n := strings.Count(text, p.Old); n != 1 {
		return fmt.Errorf("%s has %d times, not once: %q", path, n, p.Old)
	}
	o[path] = strings.Replace(text, p.Old, p.New, 1)
	return nil
}

// Write writes the files into a folder, and the file that -overlay takes. It returns the path of
// that. What is there already stays as it is, so that a build need not begin anew.
func (o Overlay) Write(folder string) (string, error) {
	replace := map[string]string{}
	for file, text := range o {
		path := filepath.Join(folder, strings.ReplaceAll(strings.TrimPrefix(file, "/"), "/", "_"))
		if old, err := os.ReadFile(path); err != nil || string(old) != text {
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				return "", err
			}
		}
		replace[file] = path
	}
	b, err := json.MarshalIndent(struct{ Replace map[string]string }{replace}, "", "  ")
	if err != nil {
		return "", err
	}
	path := filepath.Join(folder, "overlay.json")
	return path, os.WriteFile(path, b, 0o600)
}

// Root returns the folder of the module.
func Root() (string, error) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "onejob").Output()
	if err != nil {
		return "", fmt.Errorf("go list: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}
