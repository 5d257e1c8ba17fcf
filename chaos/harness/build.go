package harness

import (
	"context"
	"fmt"
	"os/exec"
	"runtime"
	"strings"
)

// Build is what was run, and on what.
type Build struct {
	Commit   string `json:"commit"` // with "changed" after it if the tree was
	Go       string `json:"go"`
	Postgres string `json:"postgres"`
	Consul   string `json:"consul"`
	RabbitMQ string `json:"rabbitmq,omitempty"`
	Patroni  string `json:"patroni,omitempty"`
}

// NewBuild knows the commit of the working tree, as far as git does, and Go's version.
func NewBuild(ctx context.Context) Build { return Build{Commit: commit(ctx), Go: runtime.Version()} }

func (b Build) String() string {
	s := fmt.Sprintf("commit %s, %s, PostgreSQL %s, Consul %s", b.Commit, b.Go, b.Postgres, b.Consul)
	if b.RabbitMQ != "" {
		s += ", RabbitMQ " + b.RabbitMQ
	}
	if b.Patroni != "" {
		s += ", Patroni " + b.Patroni
	}
	return s
}

func commit(ctx context.Context) string {
	head, err := exec.CommandContext(ctx, "git", "rev-parse", "--short=12", "HEAD").Output()
	if err != nil {
		return "unknown"
	}
	changed, err := exec.CommandContext(ctx, "git", "status", "--porcelain", "--untracked-files=no").Output()
	if err != nil || len(changed) > 0 {
		return strings.TrimSpace(string(head)) + " changed"
	}
	return strings.TrimSpace(string(head))
}
