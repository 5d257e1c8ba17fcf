package mutants

import (
	"fmt"
	"path"
	"strings"
)

// A Mutant is a build in which one thing is broken.
type Mutant struct {
	Name    string
	What    string // is broken
	patches []Patch

	// Who must catch it; what is empty need not.
	Simulated bool     // the simulation, by itself
	Test      string   // a test, as PACKAGE.TestName
	Faults    string   // a run of chaos with these faults,
	Found     []string // and one of these numbers of its report
}

// Nothing is the real build.
var Nothing = Mutant{}

// Apply adds what is broken to an overlay. root is the folder of the module.
func (m Mutant) Apply(root string, o Overlay) error {
	for _, p := range m.patches {
		if err := o.Apply(root, p); err != nil {
			return fmt.Errorf("mutant %s: %w", m.Name, err)
		}
	}
	return nil
}

// Write writes the overlay of the mutant alone, see [Overlay.Write].
func (m Mutant) Write(folder string) (string, error) {
	root, err := Root()
	if err != nil {
		return "", err
	}
	o := Overlay{}
	if err := m.Apply(root, o); err != nil {
		return "", err
	}
	return o.Write(folder)
}

// Packages are the import paths of what is broken.
func (m Mutant) Packages() (all []string) {
	for _, p := range m.patches {
		if in := "onejob/" + path.Dir(p.File); len(all) == 0 || all[len(all)-1] != in {
			all = append(all, in)
		}
	}
	return all
}

// TestOf splits the name of a test into that of its package and its own.
func TestOf(name string) (pkg, test string) {
	i := strings.LastIndexByte(name, '.')
	return "onejob/" + name[:i], name[i+1:]
}

// Named returns the mutant of a name.
func Named(name string) (Mutant, error) {
	for _, m := range All {
		if m.Name == name {
			return m, nil
		}
	}
	return Nothing, fmt.Errorf("there is no mutant %q", name)
}

func one(name, what, file, old, new string) Mutant {
	return Mutant{Name: name, What: what, patches: []Patch{{file, old, new}}}
}

// and adds patches: a file, a text of it and what replaces that, again and again.
func (m Mutant) and(patches ...string) Mutant {
	for ; len(patches) > 0; patches = patches[3:] {
		m.patches = append(m.patches, Patch{patches[0], patches[1], patches[2]})
	}
	return m
}

// failing says that a test must fail.
func (m Mutant) failing(test string) Mutant {
	m.Test = test
	return m
}

// under says that a run of chaos with these faults must find one of these numbers above zero.
func (m Mutant) under(faults string, found ...string) Mutant {
	m.Faults, m.Found = faults, found
	return m
}

// InSimulation reports whether the simulation runs what is broken.
func (m Mutant) InSimulation() bool {
	for _, p := range m.Packages() {
		switch p {
		case "onejob/worker", "onejob/lock", "onejob/lock/consul", "onejob/lock/internal/hold", "onejob/boottime", "onejob/simulate/fakestore":
			return true
		}
	}
	return false
}
