// Package onejob_test holds the documents to their word.
package onejob_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// tree returns the files of the project whose name has the ending.
func tree(t *testing.T, ending string) map[string]string {
	t.Helper()
	files := map[string]string{}
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && strings.HasPrefix(d.Name(), ".") && path != ".":
			return filepath.SkipDir
		case strings.HasSuffix(path, ending):
			b, err := os.ReadFile(path)
			files[path] = string(b)
			return err
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func TestTestsThatDocumentsNameAreThere(t *testing.T) {
	var sources strings.Builder
	for _, text := range tree(t, "_test.go") {
		sources.WriteString(text)
	}
	named := 0
	for path, text := range tree(t, ".md") {
		for _, m := range regexp.MustCompile("`((?:Test|Benchmark|Fuzz)[A-Z][A-Za-z0-9]*)`").FindAllStringSubmatch(text, -1) {
			named++
			if !strings.Contains(sources.String(), "func "+m[1]+"(") {
				t.Errorf("%s names %s, which is not there", path, m[1])
			}
		}
	}
	if named == 0 {
		t.Error("no document names a test")
	}
}

func TestLinksLeadSomewhere(t *testing.T) {
	for path, text := range tree(t, ".md") {
		for _, m := range regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)`).FindAllStringSubmatch(text, -1) {
			if _, err := os.Stat(filepath.Join(filepath.Dir(path), m[1])); err != nil {
				t.Errorf("%s: the link to %s leads nowhere", path, m[1])
			}
		}
	}
}

// The table of settings in the README has every key of the example, which in
// turn has every setting that there is.
func TestReadmeHasEverySetting(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	example, err := os.ReadFile("config.example.yaml")
	if err != nil {
		t.Fatal(err)
	}
	section := ""
	for line := range strings.Lines(string(example)) {
		m := regexp.MustCompile(`^( *)([a-z_]+):`).FindStringSubmatch(line)
		if m == nil {
			continue
		}
		key := m[2]
		switch len(m[1]) {
		case 0:
			if section = key; strings.TrimSpace(strings.TrimPrefix(strings.SplitN(line, "#", 2)[0], key+":")) == "" {
				continue // the settings follow below it
			}
		case 2:
			if section == "kinds" {
				continue
			}
			key = section + "." + key
		default:
			continue
		}
		if !strings.Contains(string(readme), "`"+key+"`") {
			t.Errorf("README.md does not have the setting %s", key)
		}
	}
}
