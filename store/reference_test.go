package store_test

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"onejob/store"
)

// docs/operate/security.md names the functions that run with their owner's rights and the
// columns that an enqueuer may set, and no others.
func TestSecurityReference(t *testing.T) {
	t.Parallel()
	raw, err := os.ReadFile("../docs/operate/security.md")
	if err != nil {
		t.Fatal(err)
	}
	b := newBareBench(t)
	names := func(from, to string) []string {
		_, rest, found := strings.Cut(string(raw), from)
		text, _, ended := strings.Cut(rest, to)
		if !found || !ended {
			t.Errorf("the page has no text from %q to %q", from, to)
		}
		var names []string
		for _, m := range regexp.MustCompile("`(?:onejob\\.)?([a-z_]+)`").FindAllStringSubmatch(text, -1) {
			names = append(names, m[1])
		}
		slices.Sort(names)
		return names
	}
	const definers = `SELECT proname FROM pg_proc WHERE pronamespace = 'onejob'::regnamespace AND prosecdef AND (prorettype = 'trigger'::regtype) = $1 ORDER BY proname COLLATE "C"`
	for _, part := range []struct {
		what      string
		page, has []string
	}{
		{"functions", names("(`SECURITY DEFINER`)", "\n- "), b.sql(definers, false)},
		{"triggers", slices.DeleteFunc(names("So do four triggers", "\n- "), func(s string) bool { return s == "former_schedules" }), b.sql(definers, true)},
	} {
		if !slices.Equal(part.page, part.has) {
			t.Errorf("the page says that these %s run with their owner's rights: %v; it is %v", part.what, part.page, part.has)
		}
	}
	_, input, _ := strings.Cut(store.RolesSQL(store.Roles{Enqueuer: "e", Observer: "o", Operator: "p", Worker: "w"}), "GRANT INSERT (")
	input, _, _ = strings.Cut(input, ")")
	may := strings.Split(input, ", ")
	slices.Sort(may)
	if page := names("An enqueuer may set", "\n"); !slices.Equal(page, may) {
		t.Errorf("the page says that an enqueuer may set %v; it is %v", page, may)
	}
}

// docs/reference/sql.md has the columns with their types, the functions and the
// constraints that a migrated database has, and no others.
func TestSQLReference(t *testing.T) {
	t.Parallel()
	raw, err := os.ReadFile("../docs/reference/sql.md")
	if err != nil {
		t.Fatal(err)
	}
	page := string(raw)
	b := newBareBench(t)
	quoted := regexp.MustCompile("`([^`]+)`")

	section := func(heading string) string {
		_, rest, ok := strings.Cut(page, "\n## "+heading+"\n")
		if !ok {
			t.Errorf("the page has no section %s", heading)
		}
		text, _, _ := strings.Cut(rest, "\n## ")
		return text
	}
	// compare says which are in the database alone, or on the page alone.
	compare := func(what string, database, written []string) {
		t.Helper()
		for _, s := range database {
			if !slices.Contains(written, s) {
				t.Errorf("%s: %s is not on the page", what, s)
			}
		}
		for _, s := range written {
			if !slices.Contains(database, s) {
				t.Errorf("%s: %s is on the page and not in the database", what, s)
			}
		}
	}

	internal := map[string][]string{}
	for line := range strings.Lines(section("Internal tables")) {
		if cells := strings.Split(line, "|"); len(cells) == 5 && strings.Contains(cells[1], "`onejob.") {
			for _, m := range quoted.FindAllStringSubmatch(cells[2], -1) {
				table := quoted.FindStringSubmatch(cells[1])[1]
				internal[table] = append(internal[table], m[1])
			}
		}
	}
	for _, table := range b.sql(`SELECT 'onejob.' || table_name FROM information_schema.tables WHERE table_schema = 'onejob' ORDER BY 1`) {
		columns := b.sql(`SELECT attname || ' ' || replace(replace(replace(format_type(atttypid, atttypmod), 'timestamp with time zone', 'timestamptz'), 'boolean', 'bool'), 'integer', 'int')
  FROM pg_attribute WHERE attrelid = $1::text::regclass AND attnum > 0 AND NOT attisdropped`, table)
		var written []string
		if names := internal[table]; names != nil {
			for i, c := range columns {
				columns[i], _, _ = strings.Cut(c, " ")
			}
			written = names
		} else {
			for line := range strings.Lines(section(table)) {
				cells := strings.Split(line, "|")
				if len(cells) < 5 {
					continue // a table of something else
				}
				if name := quoted.FindStringSubmatch(cells[1]); name != nil && !strings.HasPrefix(line, "| `succeeded`") {
					if kind := strings.TrimSpace(cells[2]); regexp.MustCompile(`^[a-z]+(\[\])?$`).MatchString(kind) {
						written = append(written, name[1]+" "+kind)
					}
				}
			}
		}
		compare(table, columns, written)
	}

	var functions []string
	for _, m := range regexp.MustCompile("`(?:onejob\\.)?([a-z_]+)(?:\\(.*\\))?`").FindAllStringSubmatch(section("Functions"), -1) {
		if !slices.Contains([]string{"kind", "unique_key", "false"}, m[1]) {
			functions = append(functions, m[1])
		}
	}
	compare("functions", b.sql(`SELECT DISTINCT proname::text FROM pg_proc WHERE pronamespace = 'onejob'::regnamespace`), functions)
	for _, m := range regexp.MustCompile("`onejob\\.enqueue\\((.*)\\)`").FindAllStringSubmatch(section("Functions"), -1) {
		compare("arguments of enqueue", b.sql(`SELECT unnest(proargnames) FROM pg_proc WHERE oid = 'onejob.enqueue'::regproc`), strings.Split(m[1], ", "))
	}

	// A trigger that refuses a row is a constraint to those who insert.
	for table, column := range map[string]int{"tasks": 2, "schedules": 3} {
		var written []string
		for line := range strings.Lines(section("Constraints")) {
			if cells := strings.Split(line, "|"); len(cells) > 3 && strings.TrimSpace(cells[column]) == "yes" {
				for _, m := range quoted.FindAllStringSubmatch(cells[1], -1) {
					written = append(written, m[1])
				}
			}
		}
		compare("constraints of "+table, b.sql(`
SELECT conname::text FROM pg_constraint WHERE conrelid = ('onejob.' || $1)::regclass AND contype = 'c'
 UNION
SELECT tgname FROM pg_trigger WHERE tgrelid = ('onejob.' || $1)::regclass AND tgfoid IN ('onejob.refuse'::regproc, 'onejob.refuse_long_payload'::regproc)
 UNION
SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
 WHERE i.indrelid = ('onejob.' || $1)::regclass AND i.indisunique AND i.indpred IS NOT NULL`, table), written)
	}
}
