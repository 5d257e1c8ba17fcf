package main

import (
	"context"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/internal/testenv"
)

// TestMain lets this binary be the observer, which the harness starts it as.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == partObserver {
		main()
	}
	if len(os.Args) > 1 && os.Args[1] == partTask { // of leaveCommand
		time.Sleep(time.Minute)
		return
	}
	testenv.Main(m)
}

// A replica that uses more and more of something is found; one that only swings
// is not, nor one that was restarted, whose beginnings are too many.
func TestGrowthIsFound(t *testing.T) {
	const long = 30 * time.Minute
	looksOf := func(use func(i int) uses, pid func(i int) int) (looks []look) {
		for i := range 360 {
			looks = append(looks, look{time.Unix(0, 0).Add(time.Duration(i) * 5 * time.Second), pid(i), use(i)})
		}
		return looks
	}
	same := func(int) int { return 7 }
	for name, use := range map[string]func(i int) uses{
		"rss_mb":      func(i int) uses { return uses{30 + float64(i)/10} },
		"threads":     func(i int) uses { return uses{30, 9 + float64(i)/20} },
		"files":       func(i int) uses { return uses{30, 9, 20 + float64(i)/10} },
		"children":    func(i int) uses { return uses{30, 9, 20, float64(i) / 20} },
		"connections": func(i int) uses { return uses{30, 9, 20, 0, 2 + float64(i)/40} },
	} {
		r := &replica{place: place{name: "leaky"}}
		l := &leaks{c: &cluster{replicas: []*replica{r}}, looks: map[string][]look{r.name: looksOf(use, same)}}
		if all, judged, found := l.checkAll(long); len(all) != 1 || judged != 1 || len(found) != 1 || !strings.HasPrefix(found[0], "leaky: "+name) {
			t.Errorf("%s: found %v in %v", name, found, all)
		}
		l.looks = map[string][]look{supervisorOf(r): looksOf(use, same)}
		if all, judged, found := l.checkAll(long); len(all) != 1 || judged != 1 || len(found) != 1 || !strings.HasPrefix(found[0], "the supervisor of leaky: "+name) {
			t.Errorf("%s, of its supervisor: found %v in %v", name, found, all)
		}
		l.looks = map[string][]look{r.name: looksOf(use, func(i int) int { return i / 300 })}
		if all, judged, found := l.checkAll(long); len(all)+judged+len(found) != 0 {
			t.Errorf("%s, restarted: found %v in %v", name, found, all)
		}
	}
	r := &replica{place: place{name: "tight"}}
	swings := func(i int) uses { return uses{30 + float64(i%20), 9 + float64(i%7), 20, float64(i % 5), 8} }
	l := &leaks{c: &cluster{replicas: []*replica{r}}, looks: map[string][]look{r.name: looksOf(swings, same)}}
	if all, judged, found := l.checkAll(long); len(all) != 1 || judged != 1 || len(found) != 0 {
		t.Errorf("found %v in %v", found, all)
	}
	if all, judged, _ := l.checkAll(longEnough - time.Second); len(all) != 1 || judged != 0 {
		t.Errorf("a short run judges %d of %v", judged, all)
	}
}

// What the kernel tells of this process changes with what it uses.
func TestUsesOf(t *testing.T) {
	before, err := usesOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	held := slices.Repeat([]byte{1}, 64<<20) // pages are there once they are written to
	in, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	child := exec.Command("cat")
	child.Stdin = in
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	after, err := usesOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if after[0] < before[0]+60 || after[1] < 1 || after[2] < before[2]+2 || after[3] != before[3]+1 {
		t.Errorf("before %v, after %d MB, a pipe and a process more %v", before, len(held)>>20, after)
	}
	out.Close()
	if err := child.Wait(); err != nil {
		t.Fatal(err)
	}
}

// leaveCommand starts what is a command of a task, by its program and arguments.
func leaveCommand(t *testing.T, c *cluster) error {
	cmd := exec.Command(c.self, partTask)
	if err := cmd.Start(); err != nil {
		return err
	}
	t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
	testenv.Eventually(t, time.Minute, "the command runs its own program", func() bool { return len(c.commands()) > 0 })
	return nil
}

// Everything that may be left over is found, on real servers.
func TestWhatIsLeftOverIsFound(t *testing.T) {
	dir, err := makeDir()
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	c, err := startCluster(t.Context(), dir, settings{}, true, t.Logf)
	defer c.close()
	if err != nil {
		t.Fatal(err)
	}
	l, err := startLeaks(t.Context(), c, false)
	if err != nil {
		t.Fatal(err)
	}
	client := c.consul.Servers[0].Client()
	put := func(key string) {
		t.Helper()
		if _, err := client.KV().Put(&api.KVPair{Key: consulPrefix + key}, nil); err != nil {
			t.Fatal(err)
		}
	}
	put("/limits/narrow/.lock") // it stays when nobody is inside
	if err := l.leftOver(t.Context()); err != nil {
		t.Errorf("nothing was left: %v", err)
	}
	tx, err := c.operator.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	for _, left := range []struct {
		what  string
		leave func() error
	}{
		{"1 keys in Consul, service/onejob/tasks/7", func() error { put("/tasks/7"); return nil }},
		{"1 keys in Consul, service/onejob/limits/narrow/a-session", func() error { put("/limits/narrow/a-session"); return nil }},
		{"1 keys in Consul, service/onejob/overflow/3", func() error { put("/overflow/3"); return nil }},
		{"1 commands of tasks are there", func() error { return leaveCommand(t, c) }},
		{"1 sessions in Consul, 0 before", func() error {
			_, _, err := client.Session().CreateNoChecks(&api.SessionEntry{}, nil)
			return err
		}},
		{"0 transactions and 1 advisory locks", func() error {
			_, err := tx.Exec(t.Context(), `SELECT pg_advisory_xact_lock(1)`)
			return err
		}},
		{"1 transactions and 1 advisory locks", func() error {
			_, err := tx.Exec(t.Context(), `SELECT set_config('application_name', 'daemon-1', false), pg_sleep(2.1)`)
			return err
		}},
	} {
		if err := left.leave(); err != nil {
			t.Fatal(err)
		}
		if err := l.leftOver(t.Context()); err == nil || !strings.Contains(err.Error(), left.what) {
			t.Errorf("found %v, not %s", err, left.what)
		}
	}
}
