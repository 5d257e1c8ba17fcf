package consul

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/internal/retry"
)

const (
	// requestTimeout bounds one request, and all the tries of one transaction.
	requestTimeout = 5 * time.Second

	// watchWait is how long a blocking query waits for a change. It is below the 30 s
	// after which many proxies give up on an answer. A connection that dies without a
	// word is noticed sooner: see keepAlive.
	watchWait = 25 * time.Second

	// pollWait is how often a key is looked at that cannot be watched.
	pollWait = 300 * time.Millisecond

	// maxWaiting is how many queries of a replica wait for a change of a key at a time. Each
	// has a connection, and an agent takes 200 of all replicas behind one address
	// (limits.http_max_conns_per_client); more than that, and it answers no request of theirs.
	// Those beyond look every crowdedWait.
	maxWaiting  = 16
	crowdedWait = 2 * time.Second
)

// A client sends requests to Consul. It knows no session and no lock.
type client struct {
	keyNames
	cfg   *Config
	token tokenFile

	keys       *api.Client // for keys and watches
	heartbeats *api.Client // for what keeps the session alive: nothing else may hold it up

	transports [2]*http.Transport // of both

	waiting chan struct{} // has an entry for each query that waits for a change of a key
}

func newClient(cfg *Config, secure *tls.Config) (*client, error) {
	c := &client{keyNames: keyNames(cfg.Prefix), cfg: cfg, waiting: make(chan struct{}, maxWaiting)}

	// As in the library, a token file overrides a token. Only one of the environment does not:
	// the token was given on purpose.
	clientConfig := *cfg.Client
	if clientConfig.TokenFile == "" && clientConfig.Token == "" {
		clientConfig.TokenFile = os.Getenv(api.HTTPTokenFileEnvName)
	}
	c.token.token = clientConfig.Token
	if clientConfig.TokenFile != "" {
		c.token.path = clientConfig.TokenFile
		if err := c.token.read(); err != nil {
			return nil, fmt.Errorf("consul token file: %w", err)
		}
	}
	if clientConfig.HttpClient != nil {
		return nil, errors.New("consul: a ready-made HttpClient cannot be used; set Client.Transport instead")
	}
	if clientConfig.Transport == nil {
		clientConfig.Transport = api.DefaultConfig().Transport
	}
	for i, to := range []**api.Client{&c.keys, &c.heartbeats} {
		own := clientConfig
		own.Transport = transport(&clientConfig, secure)
		c.transports[i] = own.Transport
		if cfg.RoundTripper != nil {
			own.HttpClient = &http.Client{Transport: cfg.RoundTripper}
		}
		client, err := api.NewClient(&own)
		if err != nil {
			return nil, fmt.Errorf("consul: %w", err)
		}
		own.HttpClient.Transport = rawBodies{own.HttpClient.Transport} // the client's own
		*to = client
	}
	return c, nil
}

func (c *client) explain(err error) error { return c.cfg.explain(err) }

// query returns options for a read that the leader answers, after it has made
// sure that it still is the leader.
func (c *client) query(ctx context.Context) *api.QueryOptions {
	q := &api.QueryOptions{RequireConsistent: true, Token: c.token.current()}
	return q.WithContext(ctx)
}

func (c *client) write(ctx context.Context) *api.WriteOptions {
	w := &api.WriteOptions{Token: c.token.current()}
	return w.WithContext(ctx)
}

// read reads a key whose name has nothing special in it; nil if it does not exist.
func (c *client) read(ctx context.Context, path string) (*api.KVPair, error) {
	pair, _, err := c.keys.KV().Get(path, c.query(ctx))
	if err != nil {
		return nil, fmt.Errorf("look at key %s: %w", path, err)
	}
	return pair, nil
}

// get reads a key, whatever it consists of; nil if it does not exist.
func (c *client) get(ctx context.Context, path string) (*api.KVPair, error) {
	pairs, err := c.readAll(ctx, api.TxnOps{op(api.KVGetOrEmpty, api.KVTxnOp{Key: path})})
	return pairs[path], err
}

// list reads all keys in a folder. It is an error if the token may not see all of them.
func (c *client) list(ctx context.Context, folder string) (api.KVPairs, error) {
	pairs, meta, err := c.keys.KV().List(folder, c.query(ctx))
	if err == nil && meta.ResultsFilteredByACLs {
		err = incomplete("some keys below " + folder)
	}
	if err != nil {
		return nil, fmt.Errorf("list the keys below %s: %w", folder, err)
	}
	return pairs, nil
}

// lookAt asks for a session, nil if it has ended. Consul leaves out of its answers
// what the token may not see, and says so: such an answer tells nothing.
func (c *client) lookAt(ctx context.Context, client *api.Client, session string) (*api.SessionEntry, error) {
	entry, meta, err := client.Session().Info(session, c.query(ctx))
	switch {
	case err != nil:
		return nil, fmt.Errorf("look at session %s: %w", session, err)
	case entry == nil && meta.ResultsFilteredByACLs:
		return nil, fmt.Errorf("look at session %s: %w", session, errBlind)
	}
	return entry, nil
}

// errBlind says that the token may not see a session, whether or not it lives.
var errBlind = errors.New("the token may not see it: it needs session:read for the agents of all replicas")

// watching returns a context for one blocking query, and its options. Consul
// adds up to a sixteenth to the wait; a connection that went dead must not keep
// us longer than that.
func (c *client) watching(ctx context.Context, index uint64) (*api.QueryOptions, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, watchWait+watchWait/16+2*time.Second)
	q := c.query(ctx)
	q.WaitIndex, q.WaitTime = index, watchWait
	return q, cancel
}

// nextIndex returns from which index to go on watching. An index that went
// backwards means that Consul was rebuilt or restored: begin again.
func nextIndex(before uint64, meta *api.QueryMeta) uint64 {
	if meta.LastIndex < before {
		return 0
	}
	return max(meta.LastIndex, 1) // zero would not wait
}

// watch reads a key, and waits before for a change since index, unless that is zero. It
// also returns from which index to go on watching. A key whose name Consul does not take
// as it is in the path of a request is polled, and so is one beyond maxWaiting.
func (c *client) watch(ctx context.Context, path string, index uint64) (*api.KVPair, uint64, error) {
	if !plain(path) {
		if index != 0 {
			retry.Pause(ctx, pollWait+rand.N(pollWait/4))
		}
		pair, err := c.get(ctx, path)
		return pair, 1, err
	}
	if index != 0 {
		select {
		case c.waiting <- struct{}{}:
			defer func() { <-c.waiting }()
		default:
			retry.Pause(ctx, crowdedWait+rand.N(crowdedWait/4))
			index = 0
		}
	}
	q, cancel := c.watching(ctx, index)
	defer cancel()
	pair, meta, err := c.keys.KV().Get(path, q)
	if err != nil {
		return nil, 0, err
	}
	return pair, nextIndex(index, meta), nil
}

// follow calls seen with a key, nil if it does not exist, at once and after each change,
// until it reports that it has seen enough, or ctx ends. First says that nothing was seen
// before, or that a change may have been missed. Consul's absence is waited through; an
// error other than ctx's own means that waiting will not help.
func (c *client) follow(ctx context.Context, path string, seen func(pair *api.KVPair, first bool) bool) error {
	var index uint64
	for {
		pair, next, err := c.watch(ctx, path, index)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case classify(err) == wrong:
			return c.explain(err)
		case err != nil:
			index = 0
			retry.Pause(ctx, retry.Backoff(3))
		case seen(pair, index == 0):
			return nil
		default:
			index = next
		}
	}
}

// await is Locker.Await, for any key.
func (c *client) await(ctx context.Context, path string) error {
	err := c.follow(ctx, path, func(pair *api.KVPair, first bool) bool {
		if pair != nil && pair.Session != "" {
			return false
		}
		// Free, or in its lock-delay. The jitter keeps those who wait from
		// asking all at once.
		d := 10 * time.Millisecond
		if first { // it has been free for a while, and still we were refused
			d = 200 * time.Millisecond
		}
		retry.Pause(ctx, d+rand.N(40*time.Millisecond))
		return true
	})
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("wait for key %s: %w", path, err)
	}
	return ctx.Err()
}

// txn applies operations, all or none. Unlike the library's own it keeps the
// status code of a refusal.
func (c *client) txn(ctx context.Context, client *api.Client, ops api.TxnOps) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	_, err := client.Raw().Write("/v1/txn", ops, nil, c.write(ctx))
	return err
}

// txnJSON is txn for operations that are JSON already, those of task locks: with the
// library's types and encoding, half of what a task costs this process went into them. It
// returns Consul's answer, unless that is not wanted.
func (c *client) txnJSON(ctx context.Context, ops []byte, wanted bool) (txnResults, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	body := &rawBody{sent: ops, wanted: wanted}
	_, err := c.keys.Raw().Write("/v1/txn", nil, nil, c.write(context.WithValue(ctx, rawBodyKey{}, body)))
	if err == nil && wanted && !bytes.Contains(body.answer, resultsField) {
		err = fmt.Errorf("the answer to a transaction is no list of results: %.80q", body.answer)
	}
	return txnResults{body.answer}, err
}

// readAll returns the keys that exist of those that the operations get, at one
// moment, without a Raft write. Consul leaves out what the token may not see, without
// a word; for a key that is got with KVGetOrEmpty that is found out.
func (c *client) readAll(ctx context.Context, ops api.TxnOps) (map[string]*api.KVPair, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	ok, resp, _, err := c.keys.Txn().Txn(ops, c.query(ctx))
	if err != nil {
		return nil, err
	}
	if !ok {
		var errs []error
		for _, e := range resp.Errors {
			code := http.StatusForbidden // a read has no other reason to fail
			if notOurs(e.What) {
				code = http.StatusConflict
			}
			errs = append(errs, api.StatusError{Code: code, Body: e.What})
		}
		return nil, errors.Join(errs...)
	}
	pairs, seen := map[string]*api.KVPair{}, map[string]bool{}
	for _, r := range resp.Results {
		if r.KV == nil {
			continue
		}
		seen[r.KV.Key] = true
		if r.KV.ModifyIndex > 0 {
			pairs[r.KV.Key] = r.KV
		}
	}
	for _, op := range ops {
		if op.KV.Verb == api.KVGetOrEmpty && !seen[op.KV.Key] {
			return nil, incomplete(op.KV.Key)
		}
	}
	return pairs, nil
}

// tokenFile is a token that an operator may replace while we run. The library
// reads a token file once.
type tokenFile struct {
	path string

	mu     sync.Mutex
	token  string
	looked time.Time
}

// current returns the token, or "" if there is none, which leaves that of the
// environment. While the file cannot be read, or is empty because it is just
// being written, the token that was in it is still good.
func (f *tokenFile) current() string {
	if f.path == "" {
		return f.token
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if time.Since(f.looked) >= time.Second {
		_ = f.read()
	}
	return f.token
}

// read looks at the file. f.mu is held, or nobody else knows f yet.
func (f *tokenFile) read() error {
	f.looked = time.Now()
	b, err := os.ReadFile(f.path)
	if err != nil {
		return err
	}
	if token := strings.TrimSpace(string(b)); token != "" {
		f.token = token
	}
	return nil
}
