// Package onejob_test holds the documents to their word.
package onejob_test

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"
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

// foreignNames belong to Postgres, Consul, Patroni, Dkron and others, or are put together
// in the code from two parts.
var foreignNames = strings.Fields(`
	cgroup_writable client_connection_check_interval dependent_jobs executor_config first_pickup_p50_ms first_waiting_max
	first_waiting_p50 force_custom_plan last_waiting_max list_operator_policies onejob_observer onejob_operator onejob_worker parent_job parentbased_traceidratio
	pg_drop_replication_slot pg_notification_queue_usage pg_restore set_operator_policy synchronous_commit tls_postgres tls_rabbitmq`)

// Names with an underscore in pieces of code, such as events, settings, columns and files,
// stand in the code, in SQL or in a configuration as well, or are names of such files.
func TestNamesInDocumentsExist(t *testing.T) {
	var sources strings.Builder
	for _, ending := range []string{".go", ".sql", ".yaml", ".sh", ".pml"} {
		for path, text := range tree(t, ending) {
			if path != "docs_test.go" {
				sources.WriteString(path + "\n" + text)
			}
		}
	}
	all, named := sources.String(), 0
	word := regexp.MustCompile(`[a-z]+(?:_[a-z0-9]+)+`)
	known := map[string]bool{}
	for _, name := range foreignNames {
		known[name] = true
	}
	for path, text := range tree(t, ".md") {
		if path == "CHANGELOG.md" { // it names what was renamed since
			continue
		}
		for _, m := range regexp.MustCompile("`([^`\n]+)`").FindAllStringSubmatch(text, -1) {
			for _, name := range word.FindAllString(m[1], -1) {
				named++
				if _, seen := known[name]; !seen {
					known[name] = strings.Contains(all, name)
				}
				if !known[name] {
					t.Errorf("%s: there is no %s in the code", path, name)
				}
			}
		}
	}
	if named < 500 {
		t.Errorf("found only %d names in documents", named)
	}
}

// A link leads to a file or folder of the tree and, if it has an anchor, to a heading
// of that page.
func TestLinksLeadSomewhere(t *testing.T) {
	pages := tree(t, ".md")
	for path, text := range pages {
		for _, m := range regexp.MustCompile(`\]\(([^)#:]*)(?:#([^)]*))?\)`).FindAllStringSubmatch(prose(text), -1) {
			file, anchor := path, m[2]
			if m[1] != "" {
				file = filepath.Join(filepath.Dir(path), m[1])
			}
			if _, err := os.Stat(file); err != nil {
				t.Errorf("%s: the link to %s leads nowhere", path, m[1])
				continue
			}
			if anchor != "" && !slices.Contains(anchors(pages[file]), anchor) {
				t.Errorf("%s: %s has no heading for #%s", path, file, anchor)
			}
		}
	}
}

// Reports of runs whose figures a page cites are there, and each of them says what was run:
// with what, from which seed, and that nothing was violated.
func TestReportsOfRunsAreThere(t *testing.T) {
	const folder = "docs/why/reports"
	named := map[string]bool{}
	for path, text := range tree(t, ".md") {
		for _, m := range regexp.MustCompile(`reports/([A-Za-z0-9._-]+\.(?:json|txt))`).FindAllStringSubmatch(text, -1) {
			named[m[1]] = true
			if _, err := os.Stat(filepath.Join(folder, m[1])); err != nil {
				t.Errorf("%s names a report that is not in %s: %s", path, folder, m[1])
			}
		}
	}
	files, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	if len(files) == 0 {
		t.Error("there are no reports")
	}
	shallow, err := exec.Command("git", "rev-parse", "--is-shallow-repository").Output()
	history := err == nil && strings.TrimSpace(string(shallow)) == "false"
	for _, f := range files {
		if !named[f.Name()] {
			t.Errorf("no page names the report %s", f.Name())
		}
		b, err := os.ReadFile(filepath.Join(folder, f.Name()))
		if err != nil {
			t.Fatal(err)
		}
		if len(b) > 100_000 {
			t.Errorf("%s has %d bytes", f.Name(), len(b))
		}
		var commit string
		if f.Name() == "figures.txt" {
			m := regexp.MustCompile(`\Acommit ([0-9a-f]{12}), go1\S+, [0-9]+ processors, [0-9-]{10}\n`).FindSubmatch(b)
			if m == nil || regexp.MustCompile(`(?m)^(FAIL|panic)|--- FAIL`).Match(b) {
				t.Errorf("%s does not say what was run, or something failed in it", f.Name())
				continue
			}
			commit = string(m[1])
		} else {
			commit = checkReport(t, f.Name(), b)
		}
		if history && exec.Command("git", "cat-file", "-e", commit+"^{commit}").Run() != nil {
			t.Errorf("%s is of commit %s, which is not in the history", f.Name(), commit)
		}
	}
}

// checkReport returns the commit of a report of make chaos or make ha-test.
func checkReport(t *testing.T, name string, text []byte) (commit string) {
	t.Helper()
	var r struct {
		Seed       *uint64
		Started    time.Time
		Build      struct{ Commit, Go, Postgres, Consul string }
		Settings   map[string]string
		Violations []string
	}
	if err := json.Unmarshal(text, &r); err != nil {
		t.Errorf("%s: %v", name, err)
		return ""
	}
	if r.Settings == nil || r.Build.Commit == "" || strings.Contains(r.Build.Commit, "changed") || r.Build.Go == "" || r.Build.Postgres == "" || r.Build.Consul == "" {
		t.Errorf("%s does not say what was run: %+v", name, r)
	}
	want := r.Started.Format(time.DateOnly) + "-ha-" + r.Settings["STANDBY"] + ".json"
	if r.Seed != nil {
		want = fmt.Sprintf("%s-seed-%d.json", r.Started.Format(time.DateOnly), *r.Seed)
	}
	if name != want {
		t.Errorf("%s is a report that is to be called %s", name, want)
	}
	if len(r.Violations) > 0 {
		t.Errorf("%s has violations: %v", name, r.Violations)
	}
	return r.Build.Commit
}

// Every page of docs is reached from the index by links.
func TestEveryPageIsLinked(t *testing.T) {
	pages := tree(t, ".md")
	reached := map[string]bool{}
	var follow func(path string)
	follow = func(path string) {
		if reached[path] {
			return
		}
		reached[path] = true
		for _, m := range regexp.MustCompile(`\]\(([^)#:]+)`).FindAllStringSubmatch(prose(pages[path]), -1) {
			file := filepath.Join(filepath.Dir(path), m[1])
			if info, err := os.Stat(file); err == nil && info.IsDir() {
				for page := range pages { // a link to a folder leads to all that is in it
					if filepath.Dir(page) == file {
						follow(page)
					}
				}
			} else {
				follow(file)
			}
		}
	}
	follow("docs/README.md")
	for path := range pages {
		if strings.HasPrefix(path, "docs/") && !reached[path] {
			t.Errorf("no link leads from docs/README.md to %s", path)
		}
	}
}

// prose returns a page without its blocks of code and its pieces of code.
func prose(page string) string {
	var b strings.Builder
	code := false
	for line := range strings.Lines(page) {
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			code = !code
		} else if !code {
			b.WriteString(line)
		}
	}
	return regexp.MustCompile("`[^`\n]*`").ReplaceAllString(b.String(), "")
}

// anchors returns what forges call the headings of a page.
func anchors(page string) []string {
	var all []string
	code := false
	for line := range strings.Lines(page) {
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			code = !code
		}
		m := regexp.MustCompile(`^#+ +(.*)$`).FindStringSubmatch(strings.TrimRight(line, "\n"))
		if m == nil || code {
			continue
		}
		text := regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`).ReplaceAllString(m[1], "$1")
		all = append(all, strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case unicode.IsLetter(r), unicode.IsDigit(r), r == '-', r == '_':
				return unicode.ToLower(r)
			}
			return -1
		}, text))
	}
	return all
}

// The commands that documents show are those of docs/reference/cli.md, which a test in
// cmd/onejob compares with the program, and so are their flags.
func TestCommandsInDocumentsExist(t *testing.T) {
	reference, err := os.ReadFile("docs/reference/cli.md")
	if err != nil {
		t.Fatal(err)
	}
	flags := map[string][]string{} // by command, such as "tasks list"
	command := ""
	for line := range strings.Lines(string(reference)) {
		if name, ok := strings.CutPrefix(line, "## onejob "); ok {
			command = strings.TrimSpace(name)
			flags[command] = []string{"-h", "--help"}
		}
		if m := regexp.MustCompile("^\\| `(?:(-.), )?(--[a-z-]+)").FindStringSubmatch(line); m != nil {
			flags[command] = append(flags[command], m[1:]...)
		}
	}
	if len(flags) < 20 {
		t.Fatalf("found only %d commands in docs/reference/cli.md", len(flags))
	}
	shown := 0
	for path, text := range tree(t, ".md") {
		if path == filepath.Join("docs", "reference", "cli.md") {
			continue
		}
		for _, line := range commandLines(text) {
			words := strings.Fields(line)
			if strings.HasPrefix(words[0], "-") {
				continue // onejob --version
			}
			name := words[0]
			if name == "completion" {
				continue
			}
			rest := words[1:]
			for len(rest) > 0 && flags[name+" "+rest[0]] != nil {
				name, rest = name+" "+rest[0], rest[1:]
			}
			if flags[name] == nil {
				t.Errorf("%s: onejob %s: there is no command %q", path, line, name)
				continue
			}
			shown++
			for _, subcommand := range slices.Sorted(maps.Keys(flags)) {
				if parent, _, ok := strings.Cut(subcommand, " "); ok && parent == name && name != "migrate" && len(rest) > 0 && regexp.MustCompile(`^[a-z]+$`).MatchString(rest[0]) {
					t.Errorf("%s: onejob %s: %s has no %q", path, line, name, rest[0])
					break
				}
			}
			for _, word := range rest {
				if word == "--" || word == "|" || word == "&&" || word == "||" {
					break // what follows is not ours
				}
				flag, _, _ := strings.Cut(strings.TrimRight(word, ",;.)'\""), "=")
				if regexp.MustCompile(`^--?[a-z]`).MatchString(flag) && !slices.Contains(flags[name], flag) {
					t.Errorf("%s: onejob %s: %s has no flag %s", path, line, name, flag)
				}
			}
		}
	}
	if shown < 50 {
		t.Errorf("found only %d commands in documents", shown)
	}
}

// commandLines returns what follows "onejob " in pieces and blocks of code, where it
// begins a command.
func commandLines(page string) []string {
	var lines []string
	code := false
	begins := regexp.MustCompile(`(?:^|[|;&($] ?|docker compose exec onejob )(?:[A-Z_]+=\S+ )*(?:\./|bin/|/usr/local/bin/)?onejob(?:-new)? ([a-z-][^#|]*)`)
	add := func(text string) {
		if m := begins.FindStringSubmatch(text); m != nil {
			lines = append(lines, strings.TrimSpace(m[1]))
		}
	}
	for line := range strings.Lines(page) {
		trimmed := strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(trimmed, "```"):
			code = !code
		case code || strings.HasPrefix(line, "    "):
			add(strings.TrimPrefix(regexp.MustCompile(`^\S+ \* \* \* \* +`).ReplaceAllString(trimmed, ""), "$ "))
		default:
			for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(line, -1) {
				add(m[1])
			}
		}
	}
	return lines
}

// The page of settings has every key of the example with its default. The example in
// turn has every setting that there is.
func TestConfigPageHasEverySetting(t *testing.T) {
	page, err := os.ReadFile("docs/reference/config.md")
	if err != nil {
		t.Fatal(err)
	}
	example, err := os.ReadFile("config.example.yaml")
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string]string{} // the default by the setting
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z_.]+)` \\| ([^|]*) \\|").FindAllStringSubmatch(string(page), -1) {
		if _, twice := rows[m[1]]; twice {
			t.Errorf("docs/reference/config.md has the setting %s twice", m[1])
		}
		rows[m[1]] = m[2]
	}
	section, kind := "", ""
	settings := map[string]bool{}
	for line := range strings.Lines(string(example)) {
		m := regexp.MustCompile(`^( *)([a-z_]+):(.*)`).FindStringSubmatch(line)
		if m == nil {
			continue
		}
		key, value := m[2], strings.TrimSpace(strings.SplitN(m[3], " #", 2)[0])
		switch {
		case len(m[1]) == 0:
			if section = key; value == "" {
				continue // the settings follow below it
			}
		case len(m[1]) == 2 && section == "kinds":
			kind = key
			continue
		case len(m[1]) == 2:
			key = section + "." + key
		case len(m[1]) == 4 && section == "kinds":
			key = section + "." + kind + "." + key
		default:
			continue
		}
		settings[key] = true
		preset, ok := rows[key]
		if !ok {
			t.Errorf("docs/reference/config.md does not have the setting %s", key)
			continue
		}
		value = strings.Trim(value, `"`)
		if !slices.Contains([]string{"", "[]", "{}", "0s"}, value) && !strings.Contains(preset, "`"+value+"`") {
			t.Errorf("docs/reference/config.md: the default of %s is %s, and not %s", key, preset, value)
		}
	}
	if len(settings) < 40 {
		t.Errorf("found only %d settings in config.example.yaml", len(settings))
	}
	for key := range rows {
		if strings.Contains(key, ".") && !settings[key] {
			t.Errorf("docs/reference/config.md has the setting %s, which config.example.yaml does not have", key)
		}
	}
}
