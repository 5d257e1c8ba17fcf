package consul

import (
	"context"
	"errors"
	"fmt"

	"github.com/hashicorp/consul/api"

	"onejob/lock"
)

// databaseKey holds the record of the database. It belongs to no session. Every
// transaction that locks a task checks that the record is the one that the task was
// claimed under, so a replica that has missed a change of it locks nothing.
func (l *Locker) databaseKey() string { return l.cfg.Prefix + "/database" }

// Database implements lock.Locker.
func (l *Locker) Database(ctx context.Context) (record []byte, version uint64, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	pair, _, err := l.keys.KV().Get(l.databaseKey(), l.query(ctx))
	switch {
	case err != nil:
		return nil, 0, fmt.Errorf("look at key %s: %w", l.databaseKey(), l.cfg.explain(err))
	case pair == nil:
		return nil, 0, nil
	}
	return pair.Value, pair.ModifyIndex, nil
}

// SetDatabase implements lock.Locker.
func (l *Locker) SetDatabase(ctx context.Context, record []byte, version uint64) (uint64, error) {
	body := append(appendOp([]byte{'['}, api.KVCAS, l.databaseKey(), "", record, version), ']')
	var written txnResults
	err := l.txnJSON(ctx, body, &written)
	switch {
	case classify(err) == conflict:
		return 0, lock.ErrChanged
	case err != nil:
		return 0, fmt.Errorf("write key %s: %w", l.databaseKey(), l.cfg.explain(err))
	}
	if index := written.next(l.databaseKey()); index != 0 {
		return index, nil
	}
	return 0, errors.New("write key " + l.databaseKey() + ": Consul does not say how it is now")
}
