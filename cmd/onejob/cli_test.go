package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"
	"github.com/jackc/pgx/v5"
	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sys/unix"

	"onejob/internal/testenv"
)

// TestMain lets the test binary be the command onejob, by whose name the
// scripts run it, and so the guards that it starts.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "onejob" {
		main()
	}
	flag.Parse()
	if signal.Ignored(syscall.SIGHUP) { // as below nohup: what the scripts start would ignore it, too
		signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	}
	// The scripts wait for servers and clocks most of the time.
	if err := flag.Set("test.parallel", "8"); err != nil {
		panic(err)
	}
	testenv.Main(m)
}

// TestScripts runs the stories in testdata. Each has a database and a part of
// Consul's keys of its own, and finds them in its environment. Besides
// testscript's own commands there are those of scriptCommands.
func TestScripts(t *testing.T) {
	bin := t.TempDir()
	install(t, filepath.Join(bin, "onejob"))
	testscript.Run(t, testscript.Params{
		Dir: "testdata",
		Setup: func(env *testscript.Env) error {
			t := env.T().(testing.TB)
			db, kv := testenv.Postgres(t), testenv.Consul(t)
			cache, err := os.UserCacheDir() // where onejob dev finds Consul
			if err != nil {
				return err
			}
			env.Setenv("XDG_CACHE_HOME", cache)
			env.Setenv("PATH", bin+":"+os.Getenv("PATH"))
			env.Setenv("GORACE", "atexit_sleep_ms=0 "+os.Getenv("GORACE"))
			env.Setenv("ONEJOB_POSTGRES_DSN", db.DSN)
			env.Setenv("CONSUL_HTTP_ADDR", kv.Addr)
			env.Setenv("ONEJOB_CONSUL_PREFIX", kv.Prefix)
			env.Setenv("ONEJOB_HTTP_LISTEN", "127.0.0.1:0")
			env.Values["consul"] = kv
			env.Values["tls"] = func(service string) map[string]string { return encrypted(t, service) }
			env.Values["acl"] = func() map[string]string { return tokens(t, kv.Prefix) }
			env.Values["pooler"] = func() string { return testenv.Pooler(t, db, 2) }
			return nil
		},
		Cmds:                scriptCommands,
		RequireExplicitExec: true,
	})
}

// Without /proc a replica does not find its own program, and says what is missing.
func TestServeWithoutProc(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("only root may unmount /proc")
	}
	// The race detector does not start without /proc.
	c := exec.Command("unshare", "--mount", "sh", "-c", `umount --lazy /proc && exec "$0" serve`, testenv.Binary(t))
	out, err := c.CombinedOutput()
	if c.ProcessState.ExitCode() != 2 || !strings.Contains(string(out), "onejob: /proc is not mounted") {
		t.Errorf("%v: %s", err, out)
	}
}

// install puts this binary at path. A symbolic link would not do: the program
// must find its own name when it starts itself again.
func install(t *testing.T, path string) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if os.Link(self, path) == nil {
		return
	}
	from, err := os.Open(self)
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	to, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	defer to.Close()
	if _, err := io.Copy(to, from); err != nil {
		t.Fatal(err)
	}
}

var scriptCommands = map[string]func(ts *testscript.TestScript, neg bool, args []string){
	// exits CODE PROGRAM ARG... runs a program, which must exit with this code.
	"exits": func(ts *testscript.TestScript, _ bool, args []string) {
		code := 0
		err := ts.Exec(args[1], args[2:]...)
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			code = exit.ExitCode()
		} else {
			ts.Check(err)
		}
		if strconv.Itoa(code) != args[0] {
			ts.Fatalf("it exited with %d, not %s", code, args[0])
		}
	},

	// tty COLUMNS COMMAND [INPUT] runs a shell command whose output goes to a terminal. With
	// an input, that is typed there, and errors go there too.
	"tty": func(ts *testscript.TestScript, _ bool, args []string) {
		columns, err := strconv.ParseUint(args[0], 10, 16)
		ts.Check(err)
		terminal, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
		ts.Check(err)
		defer terminal.Close()
		fd := int(terminal.Fd())
		ts.Check(unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0))
		n, err := unix.IoctlGetUint32(fd, unix.TIOCGPTN)
		ts.Check(err)
		ts.Check(unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: uint16(columns)}))
		path := fmt.Sprintf("/dev/pts/%d", n)
		keep, err := os.OpenFile(path, os.O_RDWR|syscall.O_NOCTTY, 0) // reading ends when nobody has it open
		ts.Check(err)
		shown := make(chan []byte, 1)
		go func() {
			all, _ := io.ReadAll(terminal) // ends with an I/O error
			shown <- all
		}()
		command := args[1] + " >" + path
		if len(args) > 2 {
			command += " <" + path + " 2>&1"
			_, err = terminal.WriteString(args[2] + "\n")
			ts.Check(err)
		}
		err = ts.Exec("sh", "-c", command)
		keep.Close()
		output := <-shown
		ts.Check(err)
		fmt.Fprint(ts.Stdout(), strings.ReplaceAll(string(output), "\r\n", "\n"))
	},

	// pooler puts a transaction pooler in front of the script's database.
	"pooler": func(ts *testscript.TestScript, _ bool, _ []string) {
		ts.Setenv("DIRECT_DSN", ts.Getenv("ONEJOB_POSTGRES_DSN"))
		ts.Setenv("ONEJOB_POSTGRES_DSN", ts.Value("pooler").(func() string)())
	},

	// tls SERVICE starts a server of the script's own that speaks TLS, and sets its
	// address (ADDRESS, and for Postgres ONEJOB_POSTGRES_DSN) and the files of its
	// clients: CA, CERT and KEY.
	"tls": func(ts *testscript.TestScript, _ bool, args []string) {
		for name, value := range ts.Value("tls").(func(string) map[string]string)(args[0]) {
			ts.Setenv(name, value)
		}
	},

	// acl starts a Consul of the script's own that denies what no token allows, and sets
	// CONSUL_HTTP_ADDR; ALL, the token with the rules of the documents; and NO_KEY,
	// NO_SESSION and NO_SERVICE, which lack one rule each.
	"acl": func(ts *testscript.TestScript, _ bool, _ []string) {
		for name, value := range ts.Value("acl").(func() map[string]string)() {
			ts.Setenv(name, value)
		}
	},

	// sql STATEMENT prints what a statement returns.
	"sql": func(ts *testscript.TestScript, _ bool, args []string) {
		answer, err := query(ts, args[0])
		ts.Check(err)
		fmt.Fprint(ts.Stdout(), answer)
	},

	// await-sql REGEXP STATEMENT waits until a statement returns something like it.
	"await-sql": func(ts *testscript.TestScript, _ bool, args []string) {
		want := regexp.MustCompile("(?m)" + args[0])
		var answer string
		var err error
		await(ts, func() bool {
			answer, err = query(ts, args[1])
			return err == nil && want.MatchString(answer)
		}, func() string { return fmt.Sprintf("%s returns %q, %v", args[1], answer, err) })
	},

	// await-exec REGEXP COMMAND... runs a command until it prints something like it.
	"await-exec": func(ts *testscript.TestScript, _ bool, args []string) {
		want := regexp.MustCompile("(?m)" + args[0])
		var output string
		var err error
		await(ts, func() bool {
			err = ts.Exec(args[1], args[2:]...)
			output = ts.ReadFile("stdout")
			return err == nil && want.MatchString(output)
		}, func() string { return fmt.Sprintf("%s prints %q, %v", strings.Join(args[1:], " "), output, err) })
	},

	// await-grep REGEXP FILE waits until something like it stands in a file,
	// which may not be there yet.
	"await-grep": func(ts *testscript.TestScript, _ bool, args []string) {
		want := regexp.MustCompile("(?m)" + args[0])
		var content []byte
		await(ts, func() bool {
			content, _ = os.ReadFile(ts.MkAbs(args[1]))
			return want.Match(content)
		}, func() string { return fmt.Sprintf("%s holds\n%s", args[1], content) })
	},

	// await-gone FILE... waits until the processes are gone whose numbers stand
	// in the files.
	"await-gone": func(ts *testscript.TestScript, _ bool, args []string) {
		for _, file := range args {
			for _, field := range strings.Fields(ts.ReadFile(file)) {
				pid, err := strconv.Atoi(field)
				ts.Check(err)
				await(ts, func() bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) },
					func() string { return fmt.Sprintf("process %d is still there", pid) })
			}
		}
	},

	// await-lock KEY waits until somebody holds a lock.
	"await-lock": func(ts *testscript.TestScript, _ bool, args []string) {
		await(ts, func() bool { return holder(ts, args[0]) != nil }, func() string { return "nobody holds " + args[0] })
	},

	// await-sessions N waits until so many sessions show themselves.
	"await-sessions": func(ts *testscript.TestScript, _ bool, args []string) {
		kv := consulOf(ts)
		var keys []string
		await(ts, func() bool {
			var err error
			keys, _, err = kv.Client.KV().Keys(kv.Prefix+"/replicas/", "", nil)
			ts.Check(err)
			return strconv.Itoa(len(keys)) == args[0]
		}, func() string { return fmt.Sprintf("there are %d sessions", len(keys)) })
	},

	// get URL prints the status and the body of an answer; ! get URL wants that
	// nobody answers.
	"get": func(ts *testscript.TestScript, neg bool, args []string) {
		client := http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
		resp, err := client.Get(args[0])
		if neg {
			if err == nil {
				resp.Body.Close()
				ts.Fatalf("somebody answers at %s", args[0])
			}
			if !errors.Is(err, syscall.ECONNREFUSED) {
				ts.Fatalf("%v, where nobody should listen", err)
			}
			return
		}
		ts.Check(err)
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		ts.Check(err)
		fmt.Fprintf(ts.Stdout(), "%d\n%s", resp.StatusCode, body)
	},

	// await-metric REGEXP waits until a line at /metrics of ADDRESS is like it.
	"await-metric": func(ts *testscript.TestScript, _ bool, args []string) {
		want := regexp.MustCompile("(?m)^" + args[0] + "$")
		client := http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
		var body []byte
		var err error
		await(ts, func() bool {
			var resp *http.Response
			if resp, err = client.Get("http://" + ts.Getenv("ADDRESS") + "/metrics"); err != nil {
				return false
			}
			defer resp.Body.Close()
			body, err = io.ReadAll(resp.Body)
			return want.Match(body)
		}, func() string { return fmt.Sprintf("/metrics shows %v\n%s", err, body) })
	},

	// load-env FILE sets the variables that a shell would by sourcing a file.
	"load-env": func(ts *testscript.TestScript, _ bool, args []string) {
		for _, m := range regexp.MustCompile(`(?m)^export (\w+)='(.*)'$`).FindAllStringSubmatch(ts.ReadFile(args[0]), -1) {
			ts.Setenv(m[1], m[2])
		}
	},

	// lead NAME VALUE leads as a program would that knows nothing of onejob;
	// resign NAME ends that.
	"lead": func(ts *testscript.TestScript, _ bool, args []string) {
		kv := consulOf(ts)
		session, _, err := kv.Client.Session().Create(&api.SessionEntry{Name: args[0]}, nil)
		ts.Check(err)
		ts.Defer(func() { _, _ = kv.Client.Session().Destroy(session, nil) })
		ok, _, err := kv.Client.KV().Acquire(&api.KVPair{Key: kv.Prefix + "/leader", Value: []byte(args[1]), Session: session}, nil)
		ts.Check(err)
		if !ok {
			ts.Fatalf("somebody else leads")
		}
		ts.Setenv("LEADER_"+args[0], session)
	},
	"resign": func(ts *testscript.TestScript, _ bool, args []string) {
		kv := consulOf(ts)
		_, _, err := kv.Client.KV().Release(&api.KVPair{Key: kv.Prefix + "/leader", Session: ts.Getenv("LEADER_" + args[0])}, nil)
		ts.Check(err)
	},

	// put-key KEY VALUE writes a key below the prefix, and delete-key KEY deletes it, as
	// a person might.
	"put-key": func(ts *testscript.TestScript, _ bool, args []string) {
		kv := consulOf(ts)
		_, err := kv.Client.KV().Put(&api.KVPair{Key: kv.Prefix + "/" + args[0], Value: []byte(args[1])}, nil)
		ts.Check(err)
	},
	"delete-key": func(ts *testscript.TestScript, _ bool, args []string) {
		kv := consulOf(ts)
		_, err := kv.Client.KV().Delete(kv.Prefix+"/"+args[0], nil)
		ts.Check(err)
	},

	// end-session KEY ends the session that holds a lock; KEY may be the ID of a task
	// without a lock_key.
	"end-session": func(ts *testscript.TestScript, _ bool, args []string) {
		pair := holder(ts, args[0])
		if pair == nil {
			ts.Fatalf("nobody holds %s", args[0])
		}
		_, err := consulOf(ts).Client.Session().Destroy(pair.Session, nil)
		ts.Check(err)
	},
}

func consulOf(ts *testscript.TestScript) *testenv.KV { return ts.Value("consul").(*testenv.KV) }

func holder(ts *testscript.TestScript, key string) *api.KVPair {
	kv := consulOf(ts)
	for _, folder := range []string{"/tasks/", "/running/"} {
		pair, _, err := kv.Client.KV().Get(kv.Prefix+folder+key, nil)
		ts.Check(err)
		if pair != nil && pair.Session != "" {
			return pair
		}
	}
	return nil
}

// query returns the rows of a statement, a line each.
func query(ts *testscript.TestScript, statement string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, ts.Getenv("ONEJOB_POSTGRES_DSN"))
	if err != nil {
		return "", err
	}
	defer conn.Close(ctx)
	rows, err := conn.Query(ctx, statement, pgx.QueryExecModeSimpleProtocol)
	if err != nil {
		return "", err
	}
	lines, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (string, error) {
		values, err := row.Values()
		return fmt.Sprintln(values...), err
	})
	return strings.Join(lines, ""), err
}

// await waits until condition holds. Otherwise tells how things are instead.
func await(ts *testscript.TestScript, condition func() bool, otherwise func() string) {
	const patience = 2 * time.Minute
	for range testenv.Tries(patience) {
		if condition() {
			return
		}
	}
	ts.Fatalf("not within %v: %s", patience, otherwise())
}
