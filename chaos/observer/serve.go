package observer

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"time"
)

// Where says where the observer is to be found.
type Where struct {
	Tasks  string `json:"tasks"`   // host and port for Enter
	Target string `json:"far_end"` // URL for http tasks, and for Desk
}

// Serve is the life of the observer's process. It listens on an IP address of this
// machine and prints a Where to stdout, and then takes note until stdin ends. What it
// has seen it writes to the file path.
func Serve(stdin io.Reader, stdout io.Writer, ip, path string) error {
	l := newLedger()
	doors, err := net.Listen("tcp", net.JoinHostPort(ip, "0"))
	if err != nil {
		return err
	}
	far, err := net.Listen("tcp", net.JoinHostPort(ip, "0"))
	if err != nil {
		return err
	}
	server := &http.Server{
		Handler:     l.target(),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
	}
	var all sync.WaitGroup
	all.Go(func() { l.open(doors) })
	all.Go(func() { _ = server.Serve(far) })
	err = json.NewEncoder(stdout).Encode(Where{Tasks: doors.Addr().String(), Target: "http://" + far.Addr().String()})
	if err == nil {
		_, err = io.Copy(io.Discard, stdin)
	}
	seen := l.close() // before the connections go
	_ = doors.Close()
	_ = server.Close()
	all.Wait()
	return errors.Join(err, save(path, seen))
}

func save(path string, seen Seen) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	w := bufio.NewWriter(f)
	return errors.Join(json.NewEncoder(w).Encode(seen), w.Flush(), f.Close())
}

// Load reads what Serve wrote.
func Load(path string) (Seen, error) {
	var seen Seen
	b, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(b, &seen)
	}
	if err != nil {
		return seen, fmt.Errorf("what the observer has seen: %w", err)
	}
	return seen, nil
}

// open lets tasks in until l is closed. Their goroutines end with the process.
func (led *ledger) open(l net.Listener) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer conn.Close()
			_ = led.attend(conn)
		}()
	}
}

// attend listens to one task until its connection ends.
func (l *ledger) attend(conn net.Conn) error {
	var g *guest
	defer func() {
		if g != nil {
			l.end(g, Gone)
		}
	}()
	for read := json.NewDecoder(conn); ; {
		var m message
		if err := read.Decode(&m); err != nil {
			return err
		}
		answer := answerYes
		switch {
		case m.Say == sayBegin && g == nil && m.Claim != nil:
			var err error
			if g, err = l.begin(*m.Claim, conn); errors.Is(err, ErrStale) {
				answer = answerStale
			} else if err != nil {
				return err
			}
		case m.Say == sayBeat && g != nil:
			l.beat(g)
			continue
		case m.Say == sayLease:
			l.lease(m.Fence, m.Deadline)
			continue
		case m.Say == sayEnd && g != nil:
			l.end(g, m.How)
		default:
			return fmt.Errorf("cannot make sense of %+v", m)
		}
		if _, err := fmt.Fprintln(conn, answer); err != nil {
			return err
		}
	}
}

// maxWait is how long a question to the observer may take.
const maxWait = 10 * time.Second
