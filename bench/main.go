// Command bench measures onejob against its peers and against its own bars. It
// starts a Postgres and a Consul of its own, with their defaults and their data
// on a disk, and every subject in processes of its own. See README.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/bench/floor"
	"onejob/bench/heldrow"
	"onejob/bench/naive"
	"onejob/bench/riverjobs"
)

const usage = `Usage:
  bench [flags]          measure everything; writes results/latest.json
  bench steady [flags]   keep one replica busy for long; writes results/steady.json
  bench beside [flags]   pick-up in a table of millions, beside people who look and who retry; writes results/beside.json
  bench pressure [flags] put onejob and River under pressure; writes results/pressure.json and pictures
  bench profile [flags]  profile a busy replica; see what Postgres and Consul count of their work
  bench naive [flags]    work on tasks as the post about exclusive workers does
  bench river|floor|held-row|stamp [flags]   the other subjects; the first two commands start them

bench COMMAND -h lists the flags.
`

// gcPercent is how far the heap of each subject may grow before it is collected: as "onejob serve"
// sets it for itself.
const gcPercent = 400

func main() {
	debug.SetGCPercent(gcPercent)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	command, arguments := "", os.Args[1:]
	if len(arguments) > 0 && arguments[0] != "" && arguments[0][0] != '-' {
		command, arguments = arguments[0], arguments[1:]
	}
	commands := map[string]func(context.Context, *flag.FlagSet, []string) error{
		"": benchCommand, "steady": steadyCommand, "beside": besideCommand, "profile": profileCommand, "pressure": pressureCommand,
		"naive": naiveCommand, "river": riverCommand, "floor": baselineCommand, "held-row": heldRowCommand, "stamp": startTimesCommand,
	}
	run, ok := commands[command]
	if !ok {
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	}
	flags := flag.NewFlagSet("bench "+command, flag.ExitOnError)
	if err := run(ctx, flags, arguments); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func benchCommand(ctx context.Context, flags *flag.FlagSet, arguments []string) error {
	var p plan
	p.flags(flags)
	quick := flags.Bool("quick", false, "two rounds of few tasks, to see whether it works; the figures mean little")
	_ = flags.Parse(arguments)
	if *quick {
		p.makeQuick()
	}
	return runBench(ctx, p)
}

func steadyCommand(ctx context.Context, flags *flag.FlagSet, arguments []string) error {
	var s steadyPlan
	s.flags(flags)
	_ = flags.Parse(arguments)
	return runSteady(ctx, s)
}

func besideCommand(ctx context.Context, flags *flag.FlagSet, arguments []string) error {
	var p besidePlan
	p.flags(flags)
	_ = flags.Parse(arguments)
	return runBeside(ctx, p)
}

func pressureCommand(ctx context.Context, flags *flag.FlagSet, arguments []string) error {
	var p pressurePlan
	p.flags(flags)
	_ = flags.Parse(arguments)
	return runPressure(ctx, p)
}

func profileCommand(ctx context.Context, flags *flag.FlagSet, arguments []string) error {
	var p profilePlan
	p.flags(flags)
	_ = flags.Parse(arguments)
	return runProfile(ctx, p)
}

func naiveCommand(ctx context.Context, flags *flag.FlagSet, arguments []string) error {
	var c naive.Config
	flags.StringVar(&c.DSN, "dsn", "", "address of Postgres")
	flags.StringVar(&c.Consul, "consul", "127.0.0.1:8500", "address of Consul")
	flags.StringVar(&c.Prefix, "prefix", "service/naive", "prefix of the keys in Consul")
	flags.IntVar(&c.Workers, "workers", naiveWorkers, "tasks at once")
	flags.DurationVar(&c.Work, "work", 0, "how long a task takes")
	_ = flags.Parse(arguments)
	return naive.Run(ctx, c)
}

func riverCommand(ctx context.Context, flags *flag.FlagSet, arguments []string) error {
	var c riverjobs.Config
	flags.StringVar(&c.DSN, "dsn", "", "address of Postgres")
	flags.BoolVar(&c.Default, "default", false, "River's default settings instead of those of its own benchmark")
	lock := flags.String("lock", "", "around each job: advisory for one of Postgres, consul for one of Consul's Go client")
	consul := flags.String("consul", "127.0.0.1:8500", "address of Consul")
	_ = flags.Parse(arguments)
	switch *lock {
	case "":
	case "advisory":
		advisory, stop, err := riverjobs.Advisory(ctx, c.DSN)
		if err != nil {
			return err
		}
		defer stop()
		c.Lock = advisory
	case "consul":
		config := api.DefaultConfig()
		config.Address = *consul
		config.Transport.MaxIdleConnsPerHost = 2 * riverjobs.ConsulWorkers // or each request would connect anew
		client, err := api.NewClient(config)
		if err != nil {
			return err
		}
		c.Lock, c.Workers = riverjobs.ConsulLock(client), riverjobs.ConsulWorkers
	default:
		return fmt.Errorf("there is no lock %q", *lock)
	}
	return riverjobs.Run(ctx, c)
}

func heldRowCommand(ctx context.Context, flags *flag.FlagSet, arguments []string) error {
	var c heldrow.Config
	flags.StringVar(&c.DSN, "dsn", "", "address of Postgres")
	flags.IntVar(&c.Loops, "loops", heldRowLoops, "tasks at once, each on a connection of its own")
	_ = flags.Parse(arguments)
	return heldrow.Run(ctx, c)
}

func baselineCommand(ctx context.Context, flags *flag.FlagSet, arguments []string) error {
	var c floor.Config
	flags.StringVar(&c.DSN, "dsn", "", "address of Postgres")
	flags.IntVar(&c.Loops, "loops", baselineLoops, "how many claim side by side")
	flags.IntVar(&c.Batch, "batch", baselineBatch, "rows in a claim")
	_ = flags.Parse(arguments)
	return floor.Run(ctx, c)
}

func startTimesCommand(ctx context.Context, flags *flag.FlagSet, arguments []string) error {
	var c startTimesConfig
	flags.StringVar(&c.subject, "subject", "onejob", "onejob, river or river-default")
	flags.StringVar(&c.dsn, "dsn", "", "address of Postgres")
	flags.StringVar(&c.consul, "consul", "127.0.0.1:8500", "address of Consul")
	flags.StringVar(&c.replica, "replica", "handler", "name of the replica of onejob")
	flags.StringVar(&c.out, "out", "starts", "file for a line for each start: when the task was sent, and how many ms later it started")
	flags.IntVar(&c.replicas, "replicas", 1, "replicas of onejob")
	flags.IntVar(&c.slots, "slots", 0, "tasks at once, in each replica; 0: 2,000")
	flags.DurationVar(&c.work, "work", 0, "how long a task takes")
	profile := flags.String("profile", "", "file for a CPU profile")
	_ = flags.Parse(arguments)
	stop, err := profiling(*profile)
	if err != nil {
		return err
	}
	return errors.Join(runStartTimes(ctx, c), stop())
}

// say tells how far things are.
func say(format string, a ...any) {
	fmt.Fprintf(os.Stderr, time.Now().Format("15:04:05 ")+format+"\n", a...)
}
