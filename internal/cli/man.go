package cli

import (
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// descendants returns all commands below c.
func descendants(c *cobra.Command) []*cobra.Command {
	var all []*cobra.Command
	for _, sub := range c.Commands() {
		all = append(append(all, sub), descendants(sub)...)
	}
	return all
}

// manText makes Markdown of a help text: what is indented keeps its lines, and angle
// brackets are no HTML.
var manText = strings.NewReplacer("\n  ", "\n      ", "<", `\<`)

// manCommand writes manual pages, for packages and "make install".
func manCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "man DIR",
		Short:  "Write a manual page for each command into a directory",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o755); err != nil {
				return err
			}
			c.Root().DisableAutoGenTag = true // the same pages each time
			for _, c := range append(descendants(c.Root()), c.Root()) {
				c.Long = manText.Replace(c.Long)
			}
			return doc.GenManTree(c.Root(), &doc.GenManHeader{Title: "ONEJOB", Section: "1", Source: "onejob " + version(), Manual: "onejob"}, args[0])
		},
	}
}
