package harness

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"onejob/chaos/observer"
)

// Observer is the process of an observer. Its Where says where it listens.
type Observer struct {
	*Process
	observer.MarkClient
	Where observer.Where

	home io.Closer
	seen string // the file that it writes in the end
}

// StartObserver starts this program as an observer: with the argument part, and the file for what it has
// seen, in dir.
func StartObserver(part, dir string) (*Observer, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	o := &Observer{seen: filepath.Join(dir, "observer.json")}
	cmd := exec.Command(self, part, o.seen)
	in, home, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer in.Close()
	out, told, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, home.Close())
	}
	defer out.Close()
	cmd.Stdin, cmd.Stdout = in, told
	o.home = home
	o.Process, err = Start(cmd, filepath.Join(dir, "observer.log"))
	_ = told.Close()
	if err == nil {
		err = json.NewDecoder(out).Decode(&o.Where)
	}
	if err != nil {
		o.Close()
		return nil, err
	}
	o.URL = o.Where.Target
	return o, nil
}

// Stop ends it and returns what it has seen.
func (o *Observer) Stop() (observer.Seen, error) {
	_ = o.home.Close()
	select {
	case <-o.Exited:
	case <-time.After(time.Minute):
		return observer.Seen{}, errors.New("the observer does not end")
	}
	return observer.Load(o.seen)
}

// Close ends it at once, if it has not ended. A nil Observer has.
func (o *Observer) Close() {
	if o != nil {
		_ = o.home.Close()
		o.Kill()
	}
}
