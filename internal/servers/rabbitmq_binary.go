package servers

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// findRabbitMQ returns the path of rabbitmq-server: what ONEJOB_RABBITMQ_BIN
// says, else PATH's, else the one in Debian's folder. What Debian has in PATH
// leads to a wrapper that insists on the system's own account, and is passed
// over. scripts/rabbitmq.sh looks in the same places.
func findRabbitMQ() (string, error) {
	if path := os.Getenv("ONEJOB_RABBITMQ_BIN"); path != "" {
		if !hasRabbitMQCtl(path) {
			return "", fmt.Errorf("ONEJOB_RABBITMQ_BIN: %s cannot be run, or has no rabbitmqctl beside it", path)
		}
		return path, nil
	}
	if path, err := exec.LookPath("rabbitmq-server"); err == nil {
		path, err = filepath.EvalSymlinks(path)
		if err == nil && filepath.Base(path) == "rabbitmq-server" && hasRabbitMQCtl(path) {
			return path, nil
		}
	}
	if path := "/usr/lib/rabbitmq/bin/rabbitmq-server"; hasRabbitMQCtl(path) {
		return path, nil
	}
	return "", errors.New("found no RabbitMQ on this machine: run scripts/rabbitmq.sh, install your distribution's rabbitmq-server, or set ONEJOB_RABBITMQ_BIN to the path of one that has rabbitmqctl beside it")
}

func hasRabbitMQCtl(server string) bool {
	for _, path := range []string{server, rabbitMQCtl(server)} {
		if _, err := exec.LookPath(path); err != nil {
			return false
		}
	}
	return true
}

func rabbitMQCtl(server string) string { return filepath.Join(filepath.Dir(server), "rabbitmqctl") }

// findEpmd returns the path of Erlang's port mapper, which lies in PATH on Debian
// and among Erlang's own files elsewhere.
func findEpmd() (string, error) {
	if path, err := exec.LookPath("epmd"); err == nil {
		return path, nil
	}
	for _, pattern := range []string{"/usr/lib/erlang/erts-*/bin/epmd", "/usr/local/lib/erlang/erts-*/bin/epmd", "/usr/lib64/erlang/erts-*/bin/epmd"} {
		if paths, _ := filepath.Glob(pattern); len(paths) > 0 {
			return paths[len(paths)-1], nil
		}
	}
	return "", errors.New("found RabbitMQ but not Erlang's epmd: add the folder that holds it to PATH")
}
