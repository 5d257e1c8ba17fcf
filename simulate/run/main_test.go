package main

import (
	"bufio"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

func TestMain(m *testing.M) {
	if os.Getenv("SIMULATE_TEMPORARY") == "" {
		os.Exit(m.Run())
	}
	folder, _, err := temporary()
	if err != nil {
		panic(err)
	}
	_, _ = os.Stdout.WriteString(folder + "\n")
	select {}
}

func TestNothingIsLeftOfARunThatIsEnded(t *testing.T) {
	for _, sig := range []os.Signal{syscall.SIGINT, syscall.SIGTERM} {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "SIMULATE_TEMPORARY=1", "TMPDIR="+t.TempDir())
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		folder, err := bufio.NewReader(out).ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		folder = strings.TrimSpace(folder)
		if _, err := os.Stat(folder); err != nil {
			t.Errorf("before %v: %v", sig, err)
		}
		if err := cmd.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
		if _, err := os.Stat(folder); !os.IsNotExist(err) {
			t.Errorf("after %v %s is there: %v", sig, folder, err)
		}
	}
}
