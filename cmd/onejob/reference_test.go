package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"onejob/internal/cli"
)

var update = flag.Bool("update", false, "write docs/reference/cli.md instead of comparing it")

// The reference of the command line is what the commands say of themselves.
func TestCLIReference(t *testing.T) {
	t.Setenv("ONEJOB_CONFIG", "") // the default of a flag
	const path = "../../docs/reference/cli.md"
	page := cliReference(cli.NewRoot(cli.Program{}))
	if *update {
		if err := os.WriteFile(path, []byte(page), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	have, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(have) != page {
		t.Errorf("%s differs from what the commands say; write it anew with: go test ./cmd/onejob -run TestCLIReference -update", path)
	}
}

const cliIntroduction = `# Command line

<!-- Generated from the program: go test ./cmd/onejob -run TestCLIReference -update -->

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | failure; the error on stderr says what to do |
| 2 | usage or configuration error; nothing was started |
| 75 | [onejob lock](#onejob-lock): not available; [onejob tasks wait](#onejob-tasks-wait): not ended in time |
| 124, 125, 143 | only [onejob lock](#onejob-lock) |

- Settings come from a YAML file (` + "`--config`, or `ONEJOB_CONFIG`) and from environment variables, which override it: [config.md](config.md)" + `.
- ` + "`-o json`" + ` prints JSON on stdout. Notes and errors go to stderr.
- A text flag that is given as ` + "`\"\"` is a usage error, so that a variable that is unset widens no filter and drops no lock key. `--config`, `enqueue --traceparent` and `migrate roles --prefix`" + ` may be empty.
- Output replaces control characters by ` + "`\\x1b`" + ` and the like, so data from rows cannot control the terminal.
- Lists fit the width of a terminal: long cells are cut. In a pipe nothing is cut but targets of tasks, after some 4,000 characters, and cells wider than 200 are not aligned. Times have their offset from UTC.
- Every command has ` + "`-h, --help`. `onejob completion bash`" + ` prints a completion script, also for zsh, fish and powershell: it completes commands, flags, and names of schedules, limits, queues and kinds. ` + "`make install`" + ` installs it, and manual pages.

`

// cliReference returns a page about root and all commands below it but hidden ones.
func cliReference(root *cobra.Command) string {
	var b, list strings.Builder
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		if c.Hidden || c.Name() == "help" || c.Name() == "completion" {
			return
		}
		if c.HasParent() {
			fmt.Fprintf(&list, "| [%s](#%s) | %s |\n", c.CommandPath(), strings.ReplaceAll(c.CommandPath(), " ", "-"), plainMarkdown(c.Short))
			describe(&b, c)
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(root)
	return cliIntroduction + "| command | |\n|---|---|\n" + list.String() + b.String()
}

func describe(b *strings.Builder, c *cobra.Command) {
	fmt.Fprintf(b, "\n## %s\n\n    %s\n", c.CommandPath(), c.UseLine())
	text := c.Long
	if text == "" {
		text = c.Short + "."
	}
	for _, block := range strings.Split(text, "\n\n") {
		if strings.Contains("\n"+block, "\n  ") { // a list or an example
			block = "```text\n" + block + "\n```"
		} else {
			block = plainMarkdown(block)
		}
		fmt.Fprintf(b, "\n%s\n", block)
	}
	if c.Example != "" {
		fmt.Fprintf(b, "\nExamples:\n\n```sh\n%s\n```\n", strings.ReplaceAll("\n"+c.Example, "\n  ", "\n")[1:])
	}
	rows := 0
	c.Flags().VisitAll(func(f *pflag.Flag) {
		if f.Name == "help" || f.Hidden {
			return
		}
		if rows++; rows == 1 {
			fmt.Fprint(b, "\n| flag | default | meaning |\n|---|---|---|\n")
		}
		value, usage := pflag.UnquoteUsage(f)
		name := "--" + f.Name
		if f.Shorthand != "" {
			name = "-" + f.Shorthand + ", " + name
		}
		if value != "" {
			name += " " + value
		}
		preset := f.DefValue
		if preset == "false" || preset == "0" || preset == "0s" {
			preset = ""
		}
		if preset != "" {
			preset = "`" + preset + "`"
		}
		fmt.Fprintf(b, "| `%s` | %s | %s |\n", name, preset, strings.ReplaceAll(plainMarkdown(usage), "|", `\|`))
	})
}

// plainMarkdown keeps what is in angle brackets from being an HTML element.
func plainMarkdown(s string) string { return strings.ReplaceAll(s, "<", `\<`) }
