package mutants

import (
	"go/parser"
	"go/token"
	"strings"
	"testing"
)

// Every text that a mutant replaces is there, once; and each mutant has a name of its own, and
// somebody who must catch it.
func TestMutants(t *testing.T) {
	root, err := Root()
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, m := range All {
		if names[m.Name] {
			t.Errorf("two mutants are called %s", m.Name)
		}
		names[m.Name] = true
		if !m.Simulated && m.Test == "" && m.Faults == "" {
			t.Errorf("nobody must catch %s", m.Name)
		}
		o := Overlay{}
		if err := m.Apply(root, o); err != nil {
			t.Error(err)
			continue
		}
		for path, text := range o {
			if !strings.HasSuffix(path, ".go") {
				continue
			}
			if _, err := parser.ParseFile(token.NewFileSet(), path, text, 0); err != nil {
				t.Errorf("%s is no Go any more: %v", m.Name, err)
			}
		}
	}
}
