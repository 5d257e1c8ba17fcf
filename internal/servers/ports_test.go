package servers

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"
)

// holderFlag makes the test binary hold a port, print it and wait to be killed.
const holderFlag = "ONEJOB_TEST_HOLDER"

// beHolder is the whole life of the program that is killed.
func beHolder() {
	var held heldPorts
	if err := held.choose(1); err != nil {
		panic(err)
	}
	fmt.Println(held.numbers[0])
	io.Copy(io.Discard, os.Stdin)
	held.release()
}

func TestPortsAreHeld(t *testing.T) {
	t.Parallel()
	var held heldPorts
	if err := held.choose(20); err != nil {
		t.Fatal(err)
	}
	ports := held.numbers
	if slices.Sort(ports); len(slices.Compact(slices.Clone(ports))) != 20 {
		t.Errorf("the ports are %v", ports)
	}
	checkHeld(t, ports...)
	held.release()
	checkReleased(t, ports...)
}

func TestPortsAreHeldUntilTheProcessEnds(t *testing.T) {
	t.Parallel()
	holder := exec.Command(os.Args[0])
	holder.Env = append(os.Environ(), holderFlag+"=1")
	holder.Stderr = os.Stderr
	input, err := holder.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer input.Close()
	output, err := holder.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := holder.Start(); err != nil {
		t.Fatal(err)
	}
	var port int
	_, err = fmt.Fscan(output, &port)
	if err == nil {
		checkHeld(t, port)
	}
	holder.Process.Kill()
	holder.Wait()
	if err != nil {
		t.Fatalf("the holder prints no port: %v", err)
	}
	checkReleased(t, port)
}

// checkHeld sees to it that nobody else can have these ports.
func checkHeld(t *testing.T, ports ...int) {
	t.Helper()
	var held heldPorts
	defer held.release()
	for _, port := range ports {
		if held.take(port, localhost) {
			t.Errorf("port %d was given to somebody else", port)
		}
	}
}

// checkReleased waits until others can have these ports. A process that is forked just now has
// the sockets of this one for a moment.
func checkReleased(t *testing.T, ports ...int) {
	t.Helper()
	var held heldPorts
	defer held.release()
	for _, port := range ports {
		for end := time.Now().Add(3 * time.Minute); !held.take(port, localhost); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				t.Errorf("port %d is still held", port)
				break
			}
		}
	}
}
