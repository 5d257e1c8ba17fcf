package consul

import (
	"context"
	"errors"
	"fmt"

	"github.com/hashicorp/consul/api"

	"onejob/lock"
)

// Database implements lock.Locker.
func (l *Locker) Database(ctx context.Context) (record []byte, version uint64, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	pair, err := l.read(ctx, l.databaseKey())
	if err != nil || pair == nil {
		return nil, 0, l.explain(err)
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
		return 0, fmt.Errorf("write key %s: %w", l.databaseKey(), l.explain(err))
	}
	if index := written.next(l.databaseKey()); index != 0 {
		return index, nil
	}
	return 0, errors.New("write key " + l.databaseKey() + ": Consul does not say how it is now")
}
