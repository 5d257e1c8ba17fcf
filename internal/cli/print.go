package cli

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf16"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"onejob/internal/plaintext"
	"onejob/internal/snapshot"
	"onejob/internal/watch"
	"onejob/store"
)

// choice is the value of a flag that takes one of a few words.
type choice struct {
	value string
	of    []string
}

func (v *choice) String() string { return v.value }
func (v *choice) Type() string   { return "string" }

func (v *choice) Set(s string) error {
	if !slices.Contains(v.of, s) {
		return fmt.Errorf("must be one of %s", strings.Join(v.of, ", "))
	}
	v.value = s
	return nil
}

// choiceFlag adds a flag that takes one of the words of, which a shell completes.
func choiceFlag(c *cobra.Command, name, short, preset, usage string, of ...string) *string {
	v := &choice{preset, of}
	c.Flags().VarP(v, name, short, usage)
	complete(c, name, cobra.FixedCompletions(of, cobra.ShellCompDirectiveNoFileComp))
	return &v.value
}

// outputFlag adds -o to a command.
func outputFlag(c *cobra.Command) *string {
	return choiceFlag(c, "output", "o", "text", "text or json", "text", formatJSON)
}

const formatJSON = "json"

// printJSON writes v indented, see [snapshot.Indent].
func printJSON(w io.Writer, v any) error { return writeJSON(w, v, snapshot.Indent) }

// lineJSON writes v on one line.
func lineJSON(w io.Writer, v any) error {
	return writeJSON(w, v, func(line []byte) []byte { return line })
}

// writeJSON writes v as a layout makes it of one line. Characters that could control a
// terminal are escaped, which does not change what the JSON means.
func writeJSON(w io.Writer, v any, layout func(line []byte) []byte) error {
	var b bytes.Buffer
	if err := json.NewEncoder(&b).Encode(v); err != nil {
		return err
	}
	_, err := io.WriteString(w, printableJSON(string(layout(b.Bytes()))))
	return err
}

// printableJSON escapes what plaintext.Printable does, as JSON has it. Outside of strings, JSON
// has no such character but the line break.
func printableJSON(s string) string {
	var b strings.Builder
	for _, r := range s {
		switch {
		case unicode.IsGraphic(r) || r == '\n':
			b.WriteRune(r)
		case r < 0x10000:
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			high, low := utf16.EncodeRune(r)
			fmt.Fprintf(&b, `\u%04x\u%04x`, high, low)
		}
	}
	return b.String()
}

// printf is fmt.Fprintf with printable strings.
func printf(w io.Writer, format string, args ...any) {
	for i, arg := range args {
		switch v := arg.(type) {
		case string:
			args[i] = plaintext.Printable(v)
		case error:
			args[i] = plaintext.Printable(v.Error())
		}
	}
	fmt.Fprintf(w, format, args...)
}

// note prints a line on stderr that is neither the output of a command nor its error.
func note(c *cobra.Command, format string, args ...any) {
	printf(c.ErrOrStderr(), strings.ReplaceAll(c.Root().Name(), "%", "%%")+": "+format+"\n", args...)
}

// output is the stdout of a command. It keeps the first error, so that a command whose output is lost
// does not succeed.
type output struct {
	io.Writer
	err error
}

func (o *output) Write(p []byte) (int, error) {
	n, err := o.Writer.Write(p)
	if o.err == nil {
		o.err = err
	}
	return n, err
}

// stdoutOf returns the stdout of a command as it is, whose errors count only where they are looked at:
// for a terminal, and for logs.
func stdoutOf(c *cobra.Command) io.Writer {
	if o, ok := c.OutOrStdout().(*output); ok {
		return o.Writer
	}
	return c.OutOrStdout()
}

// A table aligns the columns of its rows. Its cells are made printable.
type table struct{ rows [][]string }

// row adds a row of cells.
func (t *table) row(cells ...any) {
	row := make([]string, len(cells))
	for i, cell := range cells {
		row[i] = plaintext.Printable(fmt.Sprint(cell))
	}
	t.rows = append(t.rows, row)
}

// line adds a name and its value, if there is one.
func (t *table) line(name string, value any) {
	if fmt.Sprint(value) != "" {
		t.row(name, value)
	}
}

// A column of a list of rows.
type column[T any] struct {
	name string
	cell func(T) any

	// cut says that cells may be cut where a terminal is too narrow.
	cut bool
}

// whole is a column that is never cut, and short one that may be.
func whole[T any](name string, cell func(T) any) column[T] { return column[T]{name, cell, false} }
func short[T any](name string, cell func(T) any) column[T] { return column[T]{name, cell, true} }

// printRows writes a list as a table or, for -o json, as an array. A table that goes
// to a terminal fits into it.
func printRows[T any](c *cobra.Command, output string, rows []T, columns ...column[T]) error {
	if output == formatJSON {
		return printJSON(c.OutOrStdout(), notNil(rows))
	}
	return printBlock(c, blockOf("", rows, nil, columns...))
}

// blockOf returns a list as a table under a title. row, which may be nil, says of a row
// what its cells do not.
func blockOf[T any](title string, rows []T, row func(T) watch.Row, columns ...column[T]) watch.Block {
	b := watch.Block{Title: title}
	for _, col := range columns {
		b.Columns = append(b.Columns, watch.Column{Name: col.name, Cut: col.cut})
	}
	for _, r := range rows {
		var line watch.Row
		if row != nil {
			line = row(r)
		}
		for _, col := range columns {
			line.Cells = append(line.Cells, fmt.Sprint(col.cell(r)))
		}
		b.Rows = append(b.Rows, line)
	}
	return b
}

// printBlock writes a table without its title.
func printBlock(c *cobra.Command, b watch.Block) error {
	return writeLines(c.OutOrStdout(), b.Lines(terminalWidth(stdoutOf(c))))
}

func writeLines(w io.Writer, lines []string) error {
	for _, line := range lines {
		if _, err := fmt.Fprintln(w, line); err != nil {
			return err
		}
	}
	return nil
}

// terminalWidth returns how many columns the terminal has that w is, or 0 if w is
// none.
func terminalWidth(w io.Writer) int {
	f, ok := w.(*os.File)
	if !ok {
		return 0
	}
	width, _, err := term.GetSize(int(f.Fd()))
	if err != nil {
		return 0
	}
	return width
}

// printLines writes a table of names and values, which is never cut.
func (t *table) printLines(w io.Writer) error {
	return writeLines(w, plaintext.Columns(t.rows, nil, 0))
}

// notNil returns a list that is an array in JSON also if it is empty.
func notNil[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

// when shows a time in this machine's zone.
func when(t *time.Time) string {
	if t == nil {
		return ""
	}
	return t.Local().Format("2006-01-02 15:04:05.000 -07:00")
}

// whenStored is when for a time that may be infinite.
func whenStored(t *store.Time) string { return stored(t, when) }

// inZone shows a time in a zone, or in UTC if this machine does not know the zone.
func inZone(t *time.Time, zone string) string {
	if t == nil {
		return ""
	}
	return t.In(location(zone)).Format("2006-01-02 15:04:05 -07:00")
}

// inZoneStored is inZone for a time that may be infinite.
func inZoneStored(t *store.Time, zone string) string {
	return stored(t, func(at *time.Time) string { return inZone(at, zone) })
}

// stored shows a time that may be infinite.
func stored(t *store.Time, show func(*time.Time) string) string {
	switch {
	case t == nil:
		return ""
	case t.Infinite != pgtype.Finite:
		return t.String()
	}
	return show(&t.At)
}

func location(zone string) *time.Location {
	loc, err := time.LoadLocation(zone)
	if err != nil {
		return time.UTC
	}
	return loc
}

// between shows the time from one moment to another in two digits or three, such as
// 250ms, 4.2s, 3m12s, 5h10m or 12d. It returns "" if one of them is infinite.
func between(from, to store.Time) string {
	d, ok := to.Sub(from)
	if !ok {
		return ""
	}
	switch d = max(d, 0); {
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	case d < time.Hour:
		return d.Round(time.Second).String()
	case d < 48*time.Hour:
		return strings.TrimSuffix(d.Round(time.Minute).String(), "0s")
	}
	return fmt.Sprintf("%dd", d/(24*time.Hour))
}

// or returns what s points to, or "".
func or(s *string) string { return *cmp.Or(s, new(string)) }
