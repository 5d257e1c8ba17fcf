package consul

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/internal/testenv"
)

// However often the keys of many replicas change, a replica lists them about twice a second: N
// replicas that list N keys N times a second would be too much for Consul.
func TestLooksAtManyReplicas(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	p := newProxy(t, kv.Addr)
	cfg := config(t, kv)
	cfg.Client.Address = p.Addr
	start(t, cfg)
	write := func(i int) {
		t.Helper()
		if _, err := kv.Client.KV().Put(&api.KVPair{Key: fmt.Sprintf("%s/replicas/%d", kv.Prefix, i%100), Value: fmt.Append(nil, i)}, nil); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 100 {
		write(i)
	}
	looks := func() int {
		return p.count(func(s seen) bool { return s.method == "GET" && strings.HasSuffix(s.path, "/replicas/") })
	}
	before, began := looks(), time.Now()
	for i := 0; time.Since(began) < 5*time.Second; i++ {
		write(i)
	}
	took := time.Since(began)
	if n, most := looks()-before, 3+int(took/pauseMost); n < 2 || n > most {
		t.Errorf("%d looks in %v, want at most %d", n, took, most)
	}
}
