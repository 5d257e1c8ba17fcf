// Package simulate runs replicas in a simulated world: real code of lock/consul and worker, in
// a bubble of testing/synctest, beside a Consul and a store in memory.
//
// A seed makes a plan: how many replicas, which keys, and which faults when. A network between
// each replica and the servers delays, drops, repeats and reorders requests and answers;
// processes are frozen at any request and any look at the clock; virtual machines are paused;
// agents restart, Consul loses its leader and is restored, operators destroy sessions and
// delete keys. The world sees everything at every moment, by one clock, and compares what each
// replica believes with what is true. A plan that breaks a promise is made as small as it can
// be and still break it.
//
//	make simulate                      # 2 minutes, seeds of its own
//	DURATION=10m SEED=1 make simulate  # ten minutes, from seed 1 on
//	go run ./simulate/run -seed 17 -trace
//	go run ./simulate/run -mutants     # broken builds, each of which must be caught
//
// It is built with the tag simulate and a changed Go runtime ([onejob/simulate/overlay]), so
// that a seed gives the same schedule each time. Nothing of the product imports it.
package simulate
