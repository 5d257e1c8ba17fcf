package cli

import (
	"cmp"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// release and commit are set with -ldflags, where the version cannot be known from
// the Go module or the checkout: see the Makefile and the Dockerfile.
var release, commit string

// versionInfo is what "onejob version" shows.
type versionInfo struct {
	Version  string `json:"version"`
	Commit   string `json:"commit,omitempty"`
	Time     string `json:"commit_time,omitempty"` // of the commit
	Modified bool   `json:"modified"`              // the checkout had changes that were not committed
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

// built returns how this binary was built.
func built() versionInfo {
	v := versionInfo{Version: release, Commit: commit, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return v
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			v.Commit = cmp.Or(v.Commit, s.Value)
		case "vcs.time":
			v.Time = s.Value
		case "vcs.modified":
			v.Modified = s.Value == "true"
		}
	}
	if v.Version == "" && info.Main.Version != "(devel)" {
		v.Version = info.Main.Version
	}
	v.Version = cmp.Or(v.Version, v.Commit[:min(12, len(v.Commit))], "unknown")
	return v
}

// version is how replicas call what they run.
func version() string { return built().Version }

func versionCommand() *cobra.Command {
	c := &cobra.Command{Use: "version", Short: "Print the version, the commit and the version of Go", Args: cobra.NoArgs}
	output := outputFlag(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		v := built()
		if *output == formatJSON {
			return printJSON(c.OutOrStdout(), v)
		}
		at := v.Commit
		if v.Time != "" {
			at += " of " + v.Time
		}
		if v.Modified {
			at += ", with uncommitted changes"
		}
		var t table
		t.line("onejob", v.Version)
		t.line("commit", at)
		t.line("go", v.Go+" "+v.Platform)
		return t.printLines(c.OutOrStdout())
	}
	return c
}
