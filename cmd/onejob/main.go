// Command onejob works on the tasks of a Postgres table, each of which is
// worked on by exactly one of the replicas that run side by side.
package main

import "onejob"

func main() { onejob.Main() }
