//go:build mutants

package mutant

var name string // of the one that is switched off; the linker sets it

var (
	Fence       = name == "fence"
	SelfFencing = name == "selffencing"
	Guard       = name == "guard"
	Witness     = name == "witness"
	Index       = name == "index"
	Names       = name == "names"
	List        = name == "list"
	Identity    = name == "identity"
	Burial      = name == "burial"
	Statement   = name == "statement"
	Fences      = name == "fences"
	Record      = name == "record"
	Silence     = name == "silence"
	Begun       = name == "begun"
	Stalls      = name == "stalls"
	Claims      = name == "claims"
	Others      = name == "others"
	Stopped     = name == "stopped"
	FoundDead   = name == "verdict"
	Early       = name == "early"
	LockGate    = name == "lock-gate"
	Pause       = name == "pause"
	Delay       = name == "delay"
	SetBack     = name == "setback"
	Successor   = name == "successor"
	Edits       = name == "edits"
	Cgroup      = name == "cgroup"
	Schedules   = name == "schedules"
	RunAt       = name == "runat"
	Retries     = name == "retries"
	Lost        = name == "lost"
	Cancels     = name == "cancels"
	Timeouts    = name == "timeouts"
	Late        = name == "late"
	Returns     = name == "returns"
	Doubling    = name == "doubling"
)
