package overlay

import (
	"testing"

	"onejob/internal/mutants"
)

// Every line that is replaced is there, once, in the Go that is used, and in the product.
func TestPatches(t *testing.T) {
	for _, m := range append([]mutants.Mutant{mutants.Nothing}, mutants.All...) {
		if !m.Simulated && m.Name != "" {
			continue
		}
		if _, err := Write(t.TempDir(), m); err != nil {
			t.Error(err)
		}
	}
}
