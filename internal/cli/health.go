package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"onejob/internal/plaintext"
	"onejob/internal/web"
	"onejob/lock"
	"onejob/lock/consul"
	"onejob/store"
	"onejob/worker"
)

// health answers /healthz, which says that the process is there, and /readyz,
// which says whether it can work, and what keeps it from that if not. Beside them it
// serves /metrics and the web page.
type health struct {
	store   *store.Store
	metrics http.Handler
	locks   atomic.Pointer[consul.Locker] // nil until it is known
	limits  atomic.Pointer[lock.Semaphores]
	slots   atomic.Pointer[map[string]int] // limits.slots, as last loaded

	replica atomic.Pointer[worker.Worker] // nil until it runs

	mu      sync.Mutex
	checked time.Time // when the answer of /readyz was there, at most readyFor ago
	status  int
	answer  map[string]string
}

const (
	readyFor    = time.Second      // for how long an answer of /readyz is given again
	bodyTimeout = 5 * time.Second  // how long the body of a request may take to arrive
	idleTimeout = 10 * time.Second // how long a connection may be without a request
	maxClients  = 512              // connections at once: they share files and memory with the tasks
)

// listen answers until stop is called, and returns where that is.
func (h *health) listen(cfg Config, log *zap.Logger) (where string, stop func(), err error) {
	address := cfg.HTTP.Listen
	if address == "" {
		return "", func() {}, nil
	}
	l, err := net.Listen("tcp", address)
	if errors.Is(err, syscall.EADDRINUSE) && address == defaultListen {
		log.Info("http_listen_taken", zap.String("address", address))
		l, err = net.Listen("tcp", "127.0.0.1:0")
	}
	if err != nil {
		return "", nil, fmt.Errorf("http.listen: %w; choose another address, or leave it empty for no health checks", err)
	}
	page, err := h.page(cfg, l.Addr())
	if err != nil {
		_ = l.Close()
		return "", nil, err
	}
	mux := http.NewServeMux()
	// Probes come every few seconds, from any number of places: none keeps its connection.
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Connection", "close")
		fmt.Fprintln(w, "ok")
	})
	mux.HandleFunc("GET /readyz", h.ready)
	mux.Handle("GET /metrics", h.metrics)
	mux.Handle("/", page)

	running, end := context.WithCancel(context.Background())
	server := &http.Server{
		Handler:           arriving(mux),
		ReadHeaderTimeout: 5 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    16 << 10,
		BaseContext:       func(net.Listener) context.Context { return running },
		ConnState:         (&clients{most: maxClients}).changed,
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(l)
	}()
	return l.Addr().String(), func() {
		end() // of those who follow the page
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if server.Shutdown(ctx) != nil {
			_ = server.Close()
		}
		<-done
	}, nil
}

// setSlots lets the page know limits.slots, at the start and after a reload.
func (h *health) setSlots(slots map[string]int) { h.slots.Store(&slots) }

// arriving bounds how long the body of a request may take. Without that, a client that
// announces one and does not send it keeps the connection: the server reads it to its end before it answers.
func arriving(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength != 0 {
			_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTimeout))
			w.Header().Set("Connection", "close")
		}
		next.ServeHTTP(w, r)
	})
}

// page returns the web page for a listener at an address.
func (h *health) page(cfg Config, at net.Addr) (http.Handler, error) {
	token, err := cfg.readToken()
	if err != nil {
		return nil, usage(err)
	}
	actTokens, err := cfg.actTokens()
	if err != nil {
		return nil, usage(err)
	}
	limits := func() lock.Semaphores {
		if limits := h.limits.Load(); limits != nil {
			return *limits
		}
		return nil
	}
	h.setSlots(cfg.Limits.Slots)
	tcp, ok := at.(*net.TCPAddr)
	return web.New(web.Config{
		Snapshots:    cfg.snapshots(h.store, h.locks.Load, limits, func() map[string]int { return *h.slots.Load() }),
		Tasks:        h.store,
		Loopback:     ok && tcp.IP.IsLoopback(),
		Token:        token,
		ActTokens:    actTokens,
		Actions:      h.store,
		Limits:       limits,
		Hosts:        cfg.HTTP.Hosts,
		HidePayloads: cfg.HTTP.HidePayloads,
		Replica:      cfg.Replica,
		Version:      version(),
	})
}

func (h *health) ready(w http.ResponseWriter, r *http.Request) {
	status, answer := h.readiness(r.Context())
	w.Header().Set("Connection", "close")
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(answer)
}

// readiness looks at most once in readyFor, however many ask.
func (h *health) readiness(ctx context.Context) (status int, answer map[string]string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.answer == nil || time.Since(h.checked) >= readyFor {
		h.status, h.answer = h.check(context.WithoutCancel(ctx)) // others get the same answer
		h.checked = time.Now()                                   // those who waited for it, too, however long it took
	}
	return h.status, h.answer
}

func (h *health) check(ctx context.Context) (status int, answer map[string]string) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	answer = map[string]string{"session": "live", "postgres": "reachable", "schema": "right"}
	status = http.StatusOK
	if locks := h.locks.Load(); locks == nil || locks.Session() == "" {
		answer["session"], status = "none; is Consul available?", http.StatusServiceUnavailable
	}
	if err := h.store.Ping(ctx); err != nil {
		answer["postgres"], answer["schema"], status = "unreachable", "unknown", http.StatusServiceUnavailable
	} else if replica := h.replica.Load(); replica != nil {
		server, err := replica.Database()
		if answer["postgres"] = server.String(); err != nil {
			answer["postgres"], status = err.Error(), http.StatusServiceUnavailable
		}
	}
	if answer["schema"] == "unknown" {
		return status, answer // nobody can be asked
	}
	v, err := h.store.SchemaVersion(ctx)
	if err == nil && v.Have > v.Want && h.replica.Load() != nil {
		answer["schema"] = fmt.Sprintf("version %d, newer than the %d of this replica, which goes on; upgrade it", v.Have, v.Want)
	} else if err = h.store.CheckSchema(ctx); err != nil {
		answer["schema"], status = err.Error(), http.StatusServiceUnavailable
	}
	return status, answer
}

// healthCommand asks a replica's own /readyz, for health checks in images that
// have nothing else to ask with.
func healthCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "health",
		Short: "Check whether the replica on this machine is ready; exit 0 if it is",
		Args:  cobra.NoArgs,
	}
	path := configFlag(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		cfg, err := loadSettings(*path, os.Environ())
		if err != nil {
			return err
		}
		host, port, err := net.SplitHostPort(cfg.HTTP.Listen)
		if err != nil {
			return usage(errors.New("http.listen is empty: the replica serves no health checks"))
		}
		if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
			host = "127.0.0.1"
		}
		ctx, cancel := context.WithTimeout(c.Context(), 5*time.Second)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+net.JoinHostPort(host, port)+"/readyz", nil)
		if err != nil {
			return err
		}
		client := http.Client{Transport: &http.Transport{}} // through no proxy
		resp, err := client.Do(req)
		if err != nil {
			return fmt.Errorf("no replica answers at http.listen: %w", err)
		}
		defer resp.Body.Close()
		answer, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
		fmt.Fprint(c.OutOrStdout(), plaintext.Lines(string(answer)))
		if resp.StatusCode != http.StatusOK {
			return errors.New("not ready")
		}
		return nil
	}
	return c
}
