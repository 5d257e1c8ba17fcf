package overlay

import "testing"

// Every line that is replaced is there, once, in the Go that is used, and in the product.
func TestPatches(t *testing.T) {
	for _, m := range append([]Mutant{Nothing}, Mutants...) {
		if _, err := Write(t.TempDir(), m); err != nil {
			t.Error(err)
		}
	}
}
