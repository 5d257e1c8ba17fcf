package worker

import (
	"context"
	"errors"
	"sync"
	"time"

	"go.uber.org/zap"
)

// lookups are the questions that a replica asks Postgres again and again, besides claims. They say
// nothing of a database that is unavailable: claim_failed does. One that fails for long while claims
// succeed, as a right or an index is missing for example, is logged: what it is for does not happen.
type lookups struct {
	log *zap.Logger

	mu      sync.Mutex
	claims  bool // fail
	failing map[string]failing
}

type failing struct {
	since time.Time
	told  bool
}

// lookupPatience is for how long a lookup must fail before that is logged.
const lookupPatience = 30 * time.Second

// claimed notes whether the last claim has failed.
func (l *lookups) claimed(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.claims = err != nil
}

// saw notes how a lookup went, and logs once that it fails, and that it does no more.
func (l *lookups) saw(what string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f, fails := l.failing[what]
	now := time.Now()
	switch {
	case errors.Is(err, context.Canceled):
	case err == nil:
		if delete(l.failing, what); f.told {
			l.log.Info("lookup_recovered", zap.String("lookup", what))
		}
	case !fails, l.claims && !f.told:
		if l.failing == nil {
			l.failing = map[string]failing{}
		}
		l.failing[what] = failing{since: now}
	case !f.told && now.Sub(f.since) >= lookupPatience:
		l.failing[what] = failing{f.since, true}
		l.log.Warn("lookup_failed", zap.String("lookup", what), zap.Error(err))
	}
}
