package worker

import (
	"context"
	"errors"
	"sync"
	"time"

	"go.uber.org/zap"

	"onejob/tasks"
)

// A replica reports each name that rows ask for and that it does not know once.
// Every role with INSERT can choose names, so their number and their length are
// bounded: an hour after maxReported names the list begins anew.
const (
	maxReported   = 256
	reportedAgain = time.Hour
	maxName       = 200 // bytes of a name that count
)

// reported remembers which names were reported. The zero value is ready.
type reported struct {
	mu    sync.Mutex
	names map[string]bool
	full  time.Time // since when there is no room for more
}

// first reports whether name is to be reported now, and whether it is to be
// reported now that there are more than are reported.
func (r *reported) first(name string) (logOutcome, tellMore bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.full.IsZero() && time.Since(r.full) > reportedAgain {
		r.names, r.full = nil, time.Time{}
	}
	switch {
	case r.names[name]:
		return false, false
	case len(r.names) < maxReported:
		if r.names == nil {
			r.names = map[string]bool{}
		}
		r.names[name] = true
		return true, false
	case r.full.IsZero():
		r.full = time.Now()
		return false, true
	}
	return false, false
}

// forget lets name be reported again.
func (r *reported) forget(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.names, name)
}

// reportUnknown reports kinds that wait for a replica that knows them.
func (w *Worker) reportUnknown(ctx context.Context) {
	known := w.serving.Load().kinds.Names()
	kinds, err := w.cfg.Store.UnknownKinds(ctx, known)
	w.lookups.saw("kinds_unknown", err)
	if err != nil {
		return
	}
	for _, k := range kinds {
		switch logOutcome, more := w.unknownKinds.first(k); {
		case logOutcome:
			w.cfg.Log.Warn("kind_unknown", zap.String("kind", k), zap.Strings("known", known))
		case more:
			w.cfg.Log.Warn("kinds_unknown", zap.Int("reported", maxReported), zap.Int("unknown", len(kinds)))
		}
	}
}

// errNotBegun wraps an [tasks.ErrUnknown] of a payload whose handler was not
// called.
type errNotBegun struct{ error }

func (e errNotBegun) Unwrap() error { return e.error }
func (e errNotBegun) NotBegun()     {}

// notBegun is an error after which nothing of the attempt was done: the task is requeued, and has no
// attempt in the history. That of the kind sql has this method too.
type notBegun interface{ NotBegun() }

// reportUnknownName logs what a task names and this replica lacks.
func (w *Worker) reportUnknownName(t *tasks.Task, err error) {
	var name string
	if unknown, ok := errors.AsType[*tasks.UnknownError](err); ok {
		name = unknown.Name[:min(len(unknown.Name), maxName)]
	}
	switch logOutcome, more := w.unknownNames.first(t.Kind + "\x00" + name); {
	case logOutcome:
		w.cfg.Log.Warn("name_unknown", fields(t, zap.String("name", name), zap.Error(err))...)
	case more:
		w.cfg.Log.Warn("names_unknown", zap.Int("reported", maxReported))
	}
}
