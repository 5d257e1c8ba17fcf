package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/spf13/cobra"

	"onejob/store"
)

// outputFlag adds -o to a command that lists something.
func outputFlag(c *cobra.Command) func() (asJSON bool, err error) {
	o := c.Flags().StringP("output", "o", "text", "text or json")
	return func() (bool, error) {
		switch *o {
		case "text", "json":
			return *o == "json", nil
		}
		return false, usage(fmt.Errorf("--output: %q is neither text nor json", *o))
	}
}

func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// printable returns s as it can be written to a terminal. Whoever may insert a
// row, and every command that a task runs, chooses text that an operator looks
// at. Escapes could rewrite the screen or fill the clipboard, line breaks could
// forge a row of a table, and marks of direction could reorder what is read. So
// everything but letters, marks, digits, punctuation, symbols and spaces is
// written as Go would write it in quotes, such as \x1b or \u202e.
func printable(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case unicode.IsGraphic(r):
			b.WriteString(s[i : i+n])
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\t':
			b.WriteString(`\t`)
		case r == '\r':
			b.WriteString(`\r`)
		case r < 0x80:
			fmt.Fprintf(&b, `\x%02x`, r)
		case r < 0x10000:
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			fmt.Fprintf(&b, `\U%08x`, r)
		}
		i += n
	}
	return b.String()
}

// printableLines is printable for text of several lines, such as a command's
// output: line breaks stay, and a tab becomes four spaces.
func printableLines(s string) string {
	s = strings.ReplaceAll(strings.ReplaceAll(s, "\r\n", "\n"), "\t", "    ")
	lines := strings.Split(s, "\n")
	for i, line := range lines {
		lines[i] = printable(line)
	}
	return strings.Join(lines, "\n")
}

// printf is fmt.Fprintf with printable strings.
func printf(w io.Writer, format string, args ...any) {
	for i, arg := range args {
		switch v := arg.(type) {
		case string:
			args[i] = printable(v)
		case error:
			args[i] = printable(v.Error())
		}
	}
	fmt.Fprintf(w, format, args...)
}

// A table aligns columns. Its cells are made printable.
type table struct{ w *tabwriter.Writer }

func newTable(w io.Writer) table { return table{tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)} }

// row adds a row of cells.
func (t table) row(cells ...any) {
	for i, cell := range cells {
		if i > 0 {
			fmt.Fprint(t.w, "\t")
		}
		fmt.Fprint(t.w, printable(fmt.Sprint(cell)))
	}
	fmt.Fprintln(t.w)
}

// line adds a name and its value, if there is one.
func (t table) line(name string, value any) {
	if fmt.Sprint(value) != "" {
		t.row(name, value)
	}
}

func (t table) flush() error { return t.w.Flush() }

// when shows a time by this machine's zone.
func when(t *time.Time) string {
	if t == nil {
		return ""
	}
	return t.Local().Format("2006-01-02 15:04:05.000")
}

// whenStored is when for a time that may be infinite.
func whenStored(t *store.Time) string {
	switch {
	case t == nil:
		return ""
	case t.Infinite != pgtype.Finite:
		return t.String()
	}
	return when(&t.At)
}

// inZone shows a time by the clock on the wall of a zone, in UTC if there is no
// such zone here.
func inZone(t *time.Time, zone string) string {
	if t == nil {
		return ""
	}
	return t.In(location(zone)).Format("2006-01-02 15:04:05 -07:00")
}

// inZoneStored is inZone for a time that may be infinite.
func inZoneStored(t *store.Time, zone string) string {
	switch {
	case t == nil:
		return ""
	case t.Infinite != pgtype.Finite:
		return t.String()
	}
	return inZone(&t.At, zone)
}

// firstLine returns the beginning of s, for a table.
func firstLine(s string, n int) string {
	s, _, more := strings.Cut(s, "\n")
	if r := []rune(s); len(r) > n {
		s, more = string(r[:n]), true
	}
	if more {
		s += " ..."
	}
	return s
}
