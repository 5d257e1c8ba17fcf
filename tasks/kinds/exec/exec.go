// Package exec is the kind of tasks that run commands. Its usual import name is
// execkind.
package exec

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"golang.org/x/sys/unix"

	"onejob/boottime"
	"onejob/internal/guard"
	"onejob/internal/payload"
	"onejob/tasks"
)

const (
	// DefaultGrace is the time between SIGTERM and SIGKILL.
	DefaultGrace = 5 * time.Second

	minMemory Size = 1 << 20
	maxPIDs        = 1 << 22 // PID_MAX_LIMIT of Linux on 64 bits

	defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

// Kind runs the commands of its configuration as processes.
// A payload chooses one by name:
//
//	{"command": "backup", "args": ["nightly"], "data": {"any": "JSON"}}
//
// Other fields are refused: a misspelt "args" would run the command without its
// arguments. What else the command is to know goes into data.
//
// Anyone who can write rows can choose among the commands, and add arguments to
// those that allow it, but cannot run anything else: no shell is involved.
//
// The command reads the whole payload from stdin. What it writes to stdout and
// stderr is kept as the attempt's output, except for lines such as
//
//	::progress 40%
//	::progress 400/1000 rows copied
//	::progress waits for the mirror
//
// which say how far it is, see [tasks.Attempt.Report]. Exit code 0 is success; every other
// is a [*tasks.ExitError]. Its environment is what is configured and
//
//	PATH              if it is not configured: /usr/local/sbin and so on
//	ONEJOB_TASK_ID    the task's id
//	ONEJOB_ATTEMPT    which attempt this is, from 1
//	ONEJOB_FENCE      rises with every claim of the lock key; give it to
//	                  whatever can refuse a lower one
//	ONEJOB_LOCK_KEY   what no other task is working on meanwhile
//	ONEJOB_REPLICA    the replica that runs it
//	ONEJOB_DEADLINE   when the timeout ends, by this machine's wall clock, such
//	                  as 2006-01-02T15:04:05.123456789Z; empty without a timeout
//	TRACEPARENT       the trace that the attempt belongs to (W3C Trace Context),
//	                  if there is one
//	ONEJOB_GUARD      a mark by which leftovers are found; leave it alone
//
// When the attempt must end, and when the lease runs out, the command and all
// that it started get SIGTERM and, after the grace, SIGKILL; that comes at most
// 500 ms after the end of the lease, whatever the grace is. This holds if the
// replica is killed or frozen, too.
// When the command exits, what it left running is killed: nothing may work on
// after the lock is gone. Where cgroup v2 can be written, the kernel does it and
// nothing escapes; package guard says what can without it.
type Kind struct {
	commands map[string]Command
	users    map[string]*guard.Credential // who runs them; nil is this user
}

// Config is what a [Kind] may do.
type Config struct {
	Commands map[string]Command `yaml:"commands"` // by the names that payloads choose
}

// Command is a program that payloads may choose.
type Command struct {
	Path             string            `yaml:"path"`       // absolute; never given to a shell
	Args             []string          `yaml:"args"`       // come before those of the payload
	AllowArgs        bool              `yaml:"allow_args"` // whether a payload may have any
	Env              map[string]string `yaml:"env"`        // nothing else is inherited
	Dir              string            `yaml:"dir"`        // absolute; the replica's own if empty
	Timeout          time.Duration     `yaml:"timeout"`    // of an attempt, besides the task's; zero means none
	Grace            time.Duration     `yaml:"grace"`      // zero means DefaultGrace
	NoRetryExitCodes []int             `yaml:"no_retry_exit_codes"`
	OutputLimit      int               `yaml:"output_limit"` // bytes, at most tasks.MaxKept; zero means the attempt's own

	// Who runs it: a name or a number; the daemon's own user if both are empty.
	// The supplementary groups are those of the user, as New finds them. Only root
	// can run a command as somebody else.
	User  Name `yaml:"user"`
	Group Name `yaml:"group"` // the user's own if empty

	// NoNewPrivs keeps setuid programs and file capabilities, such as sudo and
	// ping, from giving the command rights that it does not have.
	NoNewPrivs bool `yaml:"no_new_privs"`

	// Limits of the command and all that it starts; zero means none. They need
	// cgroup v2, see EnableLimits.
	MemoryMax Size    `yaml:"memory_max"` // without swap; when it is exceeded, all are killed
	PIDsMax   int     `yaml:"pids_max"`   // processes and threads
	CPUMax    float64 `yaml:"cpu_max"`    // cores
}

var envName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// New returns a Kind, or an error that names everything that is wrong with the
// commands, as seen by this user on this machine.
func New(c Config) (*Kind, error) {
	k := &Kind{commands: maps.Clone(c.Commands), users: map[string]*guard.Credential{}}
	var all []error
	for _, name := range slices.Sorted(maps.Keys(k.commands)) {
		if name == "" {
			all = append(all, errors.New("a command has an empty name"))
		}
		if strings.ContainsFunc(name, unicode.IsControl) {
			all = append(all, fmt.Errorf("command %q: a name may hold no control characters", name))
		}
		command := k.commands[name]
		for _, err := range command.problems() {
			all = append(all, fmt.Errorf("command %q: %w", name, err))
		}
		who, err := command.credential()
		if err != nil {
			all = append(all, fmt.Errorf("command %q: %w", name, err))
		}
		k.users[name] = who
		if command.Grace == 0 {
			command.Grace = DefaultGrace
			k.commands[name] = command
		}
	}
	if len(all) > 0 {
		return nil, errors.Join(all...)
	}
	return k, nil
}

func (c Command) problems() []error {
	var all []error
	add := func(format string, args ...any) { all = append(all, fmt.Errorf(format, args...)) }

	if c.Path == "" {
		add("path is missing")
	} else if !filepath.IsAbs(c.Path) {
		add("path %q is not absolute", c.Path)
	} else if info, err := os.Stat(c.Path); err != nil {
		add("path: %w", err)
	} else if !info.Mode().IsRegular() {
		add("path %q is not a file", c.Path)
	} else if err := unix.Access(c.Path, unix.X_OK); err != nil {
		add("path %q is not executable by this user: %w", c.Path, err)
	}
	if c.Dir != "" {
		if !filepath.IsAbs(c.Dir) {
			add("dir %q is not absolute", c.Dir)
		} else if info, err := os.Stat(c.Dir); err != nil {
			add("dir: %w", err)
		} else if !info.IsDir() {
			add("dir %q is not a directory", c.Dir)
		}
	}
	for _, arg := range c.Args {
		if strings.Contains(arg, "\x00") {
			add("args: %q contains a NUL byte", arg)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(c.Env)) {
		if !envName.MatchString(name) {
			add("env: %q is no name for a variable; use letters, digits and _", name)
		} else if strings.HasPrefix(name, "ONEJOB_") {
			add("env: %s: names that begin with ONEJOB_ are set by onejob", name)
		}
		if strings.Contains(c.Env[name], "\x00") {
			add("env: the value of %s contains a NUL byte", name)
		}
	}
	if c.Timeout < 0 {
		add("timeout %s is negative", c.Timeout)
	}
	if c.Grace < 0 {
		add("grace %s is negative", c.Grace)
	}
	if c.MemoryMax < 0 || c.MemoryMax > 0 && c.MemoryMax < minMemory {
		add("memory_max %s is below %s, in which no command can run", c.MemoryMax, minMemory)
	}
	if c.PIDsMax < 0 {
		add("pids_max %d is negative", c.PIDsMax)
	}
	if c.PIDsMax > maxPIDs {
		add("pids_max %d is above %d, the most that Linux has; leave it out for no limit", c.PIDsMax, maxPIDs)
	}
	if c.CPUMax < 0 || c.CPUMax > 0 && c.CPUMax < 0.01 || c.CPUMax > 10000 || math.IsNaN(c.CPUMax) {
		add("cpu_max %v is not between 0.01 and 10000 cores", c.CPUMax)
	}
	if c.OutputLimit < 0 {
		add("output_limit %d is negative", c.OutputLimit)
	}
	if c.OutputLimit > tasks.MaxKept {
		add("output_limit %d is above %d (16 MiB), the most that is kept of an attempt", c.OutputLimit, tasks.MaxKept)
	}
	for _, code := range c.NoRetryExitCodes {
		if code < 1 || code > 255 {
			add("no_retry_exit_codes: %d is not between 1 and 255", code)
		}
	}
	return all
}

// Prepare refuses payloads that choose no command, arguments that it does not
// allow, and unknown fields. A command that is not configured here is a
// [tasks.ErrUnknown].
func (k *Kind) Prepare(payload json.RawMessage) (tasks.Handler, error) {
	chosen, err := k.parse(payload)
	if err != nil {
		return nil, err
	}
	return chosen.run, nil
}

// invocation is a command as a payload has chosen it.
type invocation struct {
	name string
	Command
	user *guard.Credential
	args []string // of the payload
}

func (k *Kind) parse(raw json.RawMessage) (invocation, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(raw, &fields); err != nil || fields == nil {
		return invocation{}, errors.New(`payload: not an object such as {"command": "backup"}`)
	}
	if err := payload.CheckFields(raw, "command", "args", "data"); err != nil {
		return invocation{}, err
	}
	value, ok := fields["command"]
	if !ok {
		return invocation{}, fmt.Errorf("payload: it names no command; %s", k.known())
	}
	var chosen *string
	if err := json.Unmarshal(value, &chosen); err != nil || chosen == nil {
		return invocation{}, fmt.Errorf("payload: command is %.100s instead of a string; %s", value, k.known())
	}
	var given []*string
	if value, ok := fields["args"]; ok {
		if err := json.Unmarshal(value, &given); err != nil {
			return invocation{}, errors.New("payload: args is not an array of strings")
		}
	}
	var args []string
	for i, arg := range given {
		if arg == nil {
			return invocation{}, fmt.Errorf("payload: args[%d] is null instead of a string", i)
		}
		if strings.Contains(*arg, "\x00") {
			return invocation{}, fmt.Errorf("payload: args[%d] contains a NUL character, which no process can be given", i)
		}
		args = append(args, *arg)
	}
	if *chosen == "" {
		return invocation{}, fmt.Errorf("payload: command is empty; %s", k.known())
	}
	// Last, after all that every replica would refuse: what only this one lacks.
	command, ok := k.commands[*chosen]
	if !ok {
		return invocation{}, &tasks.UnknownError{Name: *chosen, Err: fmt.Errorf("payload: there is no command %.100q; %s", *chosen, k.known())}
	}
	if len(args) > 0 && !command.AllowArgs {
		return invocation{}, fmt.Errorf("payload: command %q takes no args; its allow_args is not set", *chosen)
	}
	return invocation{*chosen, command, k.users[*chosen], args}, nil
}

// Names returns the names of the commands.
func (k *Kind) Names() (field string, names []string) {
	return "command", slices.Sorted(maps.Keys(k.commands))
}

func (k *Kind) known() string {
	if len(k.commands) == 0 {
		return "none are configured"
	}
	return "configured are: " + strings.Join(slices.Sorted(maps.Keys(k.commands)), ", ")
}

// run runs the command and returns when neither it nor anything that it started is
// left. If ctx has ended, the error wraps its cause, unless the command had succeeded
// before.
func (c invocation) run(ctx context.Context, a *tasks.Attempt) (tasks.Result, error) {
	if c.Timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, c.Timeout, tasks.ErrTimeout)
		defer cancel()
	}
	if ctx.Err() != nil {
		return tasks.Result{}, fmt.Errorf("command %q was not started: %w", c.name, context.Cause(ctx))
	}
	a.Output.Limit(c.OutputLimit)
	lease, output := a.Deadline(), &progressFilter{to: a.Output, report: a.Report}
	p, err := guard.Start(guard.Spec{
		Path:     c.Path,
		Args:     slices.Concat(c.Args, c.args),
		Env:      c.environment(ctx, a),
		Dir:      c.Dir,
		Stdin:    a.Payload,
		Output:   output,
		Grace:    c.Grace,
		Deadline: lease,

		User:       c.user,
		NoNewPrivs: c.NoNewPrivs,
		Limits:     c.limits(),
	})
	if errors.Is(err, guard.ErrExpired) {
		return tasks.Result{}, withCause(ctx, fmt.Errorf("command %q was not started: %w", c.name, tasks.ErrLeaseEnded))
	} else if errors.Is(err, guard.ErrExhausted) { // which is no fault of the task's
		return tasks.Result{}, tasks.Requeue(0, withCause(ctx, fmt.Errorf("command %q was not started: %w", c.name, err)))
	} else if err != nil {
		return tasks.Result{}, withCause(ctx, fmt.Errorf("command %q: %w", c.name, err))
	}
	accompany(ctx, p, lease, a.Deadline)
	exit, err := p.Wait()
	_ = output.Close() // a.Output has no errors
	a.Stopped = p.Ended()
	if err != nil {
		return tasks.Result{}, withCause(ctx, fmt.Errorf("command %q: %w", c.name, err))
	}
	if exit.Reason == guard.Exited && exit.Code == 0 {
		return tasks.Result{Value: json.RawMessage(`{"exit_code":0}`)}, nil
	}
	return tasks.Result{}, withCause(ctx, c.failure(c.name, exit, a.Output.LastLine()))
}

// accompany tells p where the lease ends, and to stop when ctx ends, until p
// is done.
func accompany(ctx context.Context, p *guard.Process, lease boottime.Instant, deadline func() boottime.Instant) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	ended := ctx.Done()
	for {
		select {
		case <-p.Done():
			return
		case <-ended:
			p.Stop()
			ended = nil
		case <-tick.C:
			if now := deadline(); now != lease {
				lease = now
				p.Extend(lease)
			}
		}
	}
}

// failure describes an exit that is no success. lastLine, of the command's output,
// mostly says why.
func (c Command) failure(name string, exit guard.Exit, lastLine string) error {
	message := fmt.Sprintf("command %q exited with code %d", name, exit.Code)
	if exit.Signal != 0 {
		message = fmt.Sprintf("command %q was ended by signal %d", name, int(exit.Signal))
		if known := unix.SignalName(exit.Signal); known != "" { // real-time signals have no names
			message += " (" + known + ")"
		}
	}
	if exit.OutOfMemory && exit.Reason == guard.Exited {
		message += "; killed: out of memory"
		if c.MemoryMax > 0 {
			message += fmt.Sprintf(" (memory_max %s)", c.MemoryMax)
		}
	}
	if lastLine != "" {
		message += ": " + lastLine
	}
	err := error(tasks.NewExitError(exit.Code, message))
	switch exit.Reason {
	case guard.Stopped:
		return fmt.Errorf("stopped: %w", err)
	case guard.LeaseEnded:
		return fmt.Errorf("%w: %w", tasks.ErrLeaseEnded, err)
	}
	if slices.Contains(c.NoRetryExitCodes, exit.Code) {
		return tasks.Permanent(err)
	}
	return err
}

// withCause puts the cause with which ctx ended, if it did, in front of err.
func withCause(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		return err
	}
	return fmt.Errorf("%w: %w", context.Cause(ctx), err)
}

// environment returns all variables of the command but the guard's.
func (c Command) environment(ctx context.Context, a *tasks.Attempt) []string {
	env := map[string]string{"PATH": defaultPath}
	maps.Copy(env, c.Env)
	maps.Copy(env, map[string]string{
		"ONEJOB_TASK_ID":  strconv.FormatInt(a.ID, 10),
		"ONEJOB_ATTEMPT":  strconv.Itoa(a.Attempt),
		"ONEJOB_FENCE":    strconv.FormatInt(a.Fence, 10),
		"ONEJOB_LOCK_KEY": a.LockKey,
		"ONEJOB_REPLICA":  a.Replica,
		"ONEJOB_DEADLINE": "",
	})
	if a.Traceparent != "" {
		env["TRACEPARENT"] = a.Traceparent
	}
	if end, ok := timeoutEnd(ctx, a); ok {
		env["ONEJOB_DEADLINE"] = end.UTC().Format(time.RFC3339Nano)
	}
	list := make([]string, 0, len(env))
	for _, name := range slices.Sorted(maps.Keys(env)) {
		list = append(list, name+"="+env[name])
	}
	return list
}

// timeoutEnd returns when the first of the timeouts ends: the command's, which
// is in ctx already, and the task's, which may not be.
func timeoutEnd(ctx context.Context, a *tasks.Attempt) (end time.Time, ok bool) {
	end, ok = ctx.Deadline()
	if a.Timeout > 0 {
		if own := time.Now().Add(a.Timeout); !ok || own.Before(end) {
			return own, true
		}
	}
	return end, ok
}
