package cli

import (
	"os"
	"path/filepath"
	"testing"
)

// A file that "onejob dev" did not make is neither replaced nor removed.
func TestFilesOfOthersStay(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "env")
	has := func(want string) {
		t.Helper()
		if got, err := os.ReadFile(path); err != nil || string(got) != want {
			t.Errorf("the file has %q, %v; want %q", got, err, want)
		}
	}
	remove, err := writeWhole(path, "addresses")
	if err != nil {
		t.Fatal(err)
	}
	has("addresses")
	if _, err := writeWhole(path, "others"); err == nil {
		t.Error("a file was replaced")
	}
	has("addresses")
	if err := os.Rename(fileWith(t, "mine"), path); err != nil {
		t.Fatal(err)
	}
	remove()
	has("mine")
	if all, err := os.ReadDir(dir); err != nil || len(all) != 1 {
		t.Errorf("the folder has %v, %v", all, err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if remove, err = writeWhole(path, "addresses"); err != nil {
		t.Fatal(err)
	}
	remove()
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("its own file stays: %v", err)
	}
}
