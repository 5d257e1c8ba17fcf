package servers

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

func TestRabbitMQIsStoppedAndStarted(t *testing.T) {
	t.Parallel()
	r, err := StartRabbitMQ(t.Context(), RabbitMQConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	declare := func(passive bool) {
		t.Helper()
		conn, err := amqp.Dial(r.URL(""))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		ch, err := conn.Channel()
		if err != nil {
			t.Fatal(err)
		}
		if passive {
			_, err = ch.QueueDeclarePassive("kept", true, false, false, false, nil)
		} else {
			_, err = ch.QueueDeclare("kept", true, false, false, false, nil)
		}
		if err != nil {
			t.Error(err)
		}
	}
	declare(false)
	for name, end := range map[string]func() error{
		"stop": r.Stop,
		"kill": func() error { r.Kill(); return nil },
	} {
		if err := end(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if conn, err := net.DialTimeout("tcp", r.Addr(), time.Second); err == nil {
			conn.Close()
			t.Errorf("after %s the port still answers", name)
		}
		checkHeld(t, r.held.numbers...)
		if err := r.Start(t.Context()); err != nil {
			t.Fatalf("start after %s: %v", name, err)
		}
		declare(true)
		for range 2 { // with an evaluator that it starts, and with the same
			if got, err := r.Eval(t.Context(), `X = 20, {x, X + 1, <<"y">>}.`); err != nil || got != `{x,21,<<"y">>}` {
				t.Errorf("eval after %s: %q, %v", name, got, err)
			}
		}
		if _, err := r.Eval(t.Context(), "exit(why)."); err == nil || !strings.Contains(err.Error(), "exit: why") {
			t.Errorf("eval of an exit: %v", err)
		}
	}
	names, err := r.Ctl(t.Context(), "-q", "list_queues", "name")
	if err != nil {
		t.Error(err)
	}
	if !strings.Contains(names, "kept") {
		t.Errorf("rabbitmqctl lists %q", names)
	}

	broker, mapper, ports := r.process.cmd.Process.Pid, r.mapper.cmd.Process.Pid, r.held.numbers
	if err := r.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	checkGone(t, r.folder.path, broker)
	checkGone(t, r.folder.path, mapper)
	checkReleased(t, ports...)
}

func TestRabbitMQThatCannotStart(t *testing.T) {
	t.Parallel()
	_, err := StartRabbitMQ(t.Context(), RabbitMQConfig{Extra: "no_such_setting = 1"})
	if err == nil {
		t.Fatal("it started")
	}
	if exit, ok := errors.AsType[*exitError](err); !ok || !strings.Contains(exit.log, "no_such_setting") {
		t.Errorf("the error does not say what is wrong: %v", err)
	}
}

// rabbitParentFlag makes the test binary start a broker, print its processes and
// wait to be killed.
const rabbitParentFlag = "ONEJOB_TEST_RABBITMQ_PARENT"

func init() {
	if os.Getenv(rabbitParentFlag) == "" {
		return
	}
	r, err := StartRabbitMQ(context.Background(), RabbitMQConfig{})
	if err != nil {
		println(err.Error())
		os.Exit(1)
	}
	os.Stdout.WriteString(strings.Join([]string{
		strconv.Itoa(r.process.cmd.Process.Pid), strconv.Itoa(r.mapper.cmd.Process.Pid), "\n",
	}, " "))
	select {}
}

func TestRabbitMQDiesWithItsParent(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), rabbitParentFlag+"=1")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	text := make([]byte, 100)
	n, err := out.Read(text)
	if err != nil {
		t.Fatal(err)
	}
	cmd.Process.Kill()
	_ = cmd.Wait()
	for _, field := range strings.Fields(string(text[:n])) {
		pid, err := strconv.Atoi(field)
		if err != nil {
			t.Fatalf("the parent printed %q", text[:n])
		}
		awaitState(pid, 'Z')
		if state := stateOf(pid); state != 0 && state != 'Z' {
			t.Errorf("process %d is in state %c", pid, state)
		}
	}
}
