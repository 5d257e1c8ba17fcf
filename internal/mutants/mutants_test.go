package mutants

import (
	"go/parser"
	"go/token"
	"reflect"
	"strings"
	"testing"

	"onejob/chaos/checker"
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

// Each number of a report of chaos that must be 0 has a mutant that makes it more: it shows that the
// harness gives the checker what it needs to count it.
func TestEachNumberHasAMutant(t *testing.T) {
	asked := map[string]bool{
		"double_success": true, // completions under an old fence are refused twice, by the status and by the fence
	}
	for _, m := range All {
		for _, number := range m.Found {
			asked[number] = true
		}
	}
	if !asked["leaks"] {
		t.Error("no mutant asks for leaks")
	}
	for i, f := range reflect.VisibleFields(reflect.TypeFor[checker.Report]()) {
		var r checker.Report
		n := reflect.ValueOf(&r).Elem().Field(i)
		if !n.CanInt() {
			continue
		}
		n.SetInt(1)
		if name := f.Tag.Get("json"); r.Violated() && !asked[name] {
			t.Errorf("no mutant asks for %s", name)
		}
	}
}
