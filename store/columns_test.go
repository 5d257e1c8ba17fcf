package store_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

// Somebody may add columns to the table of tasks. Whatever their names are, no statement of the store takes one
// for what it has named so itself.
func TestColumnsOfTheUsers(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		for _, m := range regexp.MustCompile(`\bAS ([a-z_]+)\b`).FindAllSubmatch(text, -1) {
			names = append(names, string(m[1]))
		}
	}
	names = append(names, b.sql(`SELECT DISTINCT unnest(proargnames) FROM pg_proc WHERE pronamespace = 'onejob'::regnamespace AND proargnames IS NOT NULL`)...)
	for _, body := range b.sql(`SELECT regexp_replace(substring(prosrc FROM 'DECLARE(.*?)\mBEGIN\M'), '\s+', ' ', 'g') FROM pg_proc WHERE pronamespace = 'onejob'::regnamespace AND prosrc ~ '\mDECLARE\M'`) {
		for _, m := range regexp.MustCompile(`(?:^|;|--[^;]*) ([a-z_]+) `).FindAllStringSubmatch(body, -1) {
			names = append(names, m[1])
		}
	}
	slices.Sort(names)
	names = slices.Compact(names)
	for _, f := range b.sql(`SELECT p.oid::regprocedure::text FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang WHERE p.pronamespace = 'onejob'::regnamespace AND l.lanname = 'plpgsql' AND p.prosrc !~ '#variable_conflict'`) {
		t.Errorf("%s does not say whether a column or a variable is meant (#variable_conflict)", f)
	}
	if len(names) < 20 {
		t.Fatalf("only %d names were found", len(names))
	}
	for _, name := range names {
		b.sql(`ALTER TABLE onejob.tasks ADD COLUMN IF NOT EXISTS ` + pgx.Identifier{name}.Sanitize() + ` text`)
	}
	runEveryMethod(t, b)
	b.sql(`INSERT INTO onejob.schedules (name, cron, kind) VALUES ('s', '@hourly', 'noop') ON CONFLICT DO NOTHING`)
	for _, sql := range callsOfFunctions {
		if _, err := b.try(sql); err != nil {
			t.Errorf("%s: %v", sql, err)
		}
	}
}
