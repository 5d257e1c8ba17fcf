// Package rabbitmq implements lock.Semaphores on RabbitMQ: limits that outlive
// those who are inside, made of nothing but queues.
//
// # The queues
//
// The algorithm is the persistent semaphore of amqp-locks. A semaphore named N
// under the prefix P is these queues, in which no message ever stays:
//
//	P/N/1-A, P/N/2-A, …       its slots: durable, there until an administrator removes them
//	P/N/1-B, P/N/2-B, …       their holders: exclusive, gone with the holder's connection
//	P/N/1-D, P/N/2-D, …       delay queues: each keeps a slot taken for 10 s after its holder died
//	P/N/admin                 the administration mutex: exclusive too
//	P/N/bell                  wake-up queue: told when a slot is given back; there while somebody waits
//	P/N/reach-0, -1, -2, -4…  the highest says: nobody has a slot above this number
//	P/.session/<id>           a connection that may hold slots
//	P/.mail/<id>              where somebody who asks the holders waits for answers
//
// The limit is the number of A queues before the first gap. A client that declares
// B[L], and still finds A[L] then, has slot L. Others may take part with clients of
// their own, if they call the queues so. Whether a queue exists is found out by
// publishing to it, see probeChannel.
//
// Four things are additions:
//
//   - The reach. A limit that falls from 5 to 2 leaves holders of 3, 4 and 5 inside, and
//     the original lets two more in, on slots 1 and 2. Here nobody enters while as many are
//     inside as the limit says, so holders above the limit must be counted, and the reach
//     says how far to look. It also makes a semaphore with no slots differ from none. A
//     semaphore without a reach, made by another client, is searched a little beyond its
//     last slot instead.
//   - Messages. A holder reads what is sent to its B queue. That is how Inspect learns who
//     holds a slot, and how Destroy takes it away; see message.go.
//   - The wake-up queue, so that waiters need not look all the time; see message.go.
//   - The delay queues, which cover a dying command; see below.
//
// # What is promised
//
// Of a semaphore with n slots at most n are held, as far as RabbitMQ is believed
// about which queues there are. A lease ends, with its context, before the broker
// gives the slot to another because it has not heard from us: the holder has RPCs
// of its own answered on the connection that owns its B queues, every few seconds,
// and counts from before it sent the last one that was answered, on the boot-time
// clock. The broker counts the heartbeat from the last byte it received, twice, so
// it is slower. Any end of the connection is the end of its leases at once; it is
// never recovered, as that would declare the B queues again behind our back.
//
// The end of a lease is not yet the end of the command that ran under it: the guard
// of a dead or frozen process may need the rest of the lease, at most 8 s by default,
// and 0.5 s to kill. The delay queue covers both. So nobody enters beside a dying
// command, whether its onejob was killed, the connection was closed, the B queue was
// deleted, or the broker was killed and started again. A handler in Go that ignores
// its context is not killed; it is covered for the same 10 s.
//
// # What is not
//
// This is a limit, to spare what is scarce. It is no mutual exclusion, and must
// not guard a task: there is no fencing token, and these let too many in:
//
//   - A partitioned cluster, in some cases, for as long as the partition lasts; see
//     Clusters.
//   - A process that is frozen together with its guard, or a machine that is
//     suspended, for longer than the broker waits for heartbeats and the delay queue
//     for its consumer, 30 s by default: for the moment after it wakes up.
//   - An operator who deletes both the B and the delay queue of a slot, or the delay
//     queue of a holder that is dead: until the holder's command is killed. A delay
//     queue that is deleted while its holder lives is declared again.
//   - A policy of the broker that lets delay queues expire earlier.
//   - Holders with other clients, or with a version of this package that has no delay
//     queues: their slots are free as soon as their connection is gone.
//
// # Clusters
//
// All clients of a semaphore should reach the same node. The queues here are classic
// queues, and each lives on one node: A queues and reaches on the node to which the
// administrator was connected, B and delay queues on that of the holder (unless a policy or
// queue_leader_locator moves others than B queues, which makes clusters worse). So a cluster
// makes limits no more available than one node does. If the node of the A queues is
// down, Take says that there is no such semaphore, and Create fails: "home node ... of
// durable queue ... is down". The slot of a holder whose node is down stays taken until
// the node is back or is removed from the cluster: the delay queue is durable, and the
// other nodes let nobody declare it.
//
// In a partition, with cluster_partition_handling ignore or autoheal, each side sees
// only the queues of its own nodes. A holder has its requests answered by its own side
// for as long as that takes, and hears nothing of it. On the other side its slot looks free,
// but cannot be taken, for the same reason. That is all that keeps the limit then: a
// limit that falls meanwhile, holders with other clients, and two sides that both make a
// limit anew, let too many in. With ignore the nodes go on disagreeing about which
// queues there are when the partition is over, until they are restarted; a slot may
// stay taken that nobody holds. pause_minority stops the nodes of the smaller side, and
// with them the holders there; two nodes stop both.
//
// Other clients are only counted. They may enter above a limit that has just
// fallen, as the original does, and do not let go because a semaphore is
// destroyed.
//
// There is no queue of those who wait, and no fairness: a client that asks at the
// right moment gets in. Taking a slot costs some four probes for each slot that there
// is, and making or removing one some milliseconds, so this is for limits of some
// hundreds: with ten thousand, to take takes seconds and to destroy minutes. A
// policy of the broker that lets queues expire ends semaphores; leave the prefix
// out of it.
//
// # Traps
//
// Each of these has caught somebody, and is why the code is as it is.
//
//   - Exclusive means: per connection. Declaring a B queue that one's own
//     connection has already succeeds, so a session keeps a table of its slots.
//   - Losing a race for B is 405 RESOURCE_LOCKED, which closes the channel. The
//     connection, and all B queues with it, live on; the next request gets a new
//     channel. Closing a channel does not release anything, whatever is written.
//   - A broker with an alarm (disk, memory) stops reading from connections that
//     publish, heartbeats and all. So the connection that holds never publishes:
//     probes go out on another one.
//   - A broker that waits for its metadata store answers passive declarations and sends
//     heartbeats, and finishes nothing that makes or deletes a queue. So leases are
//     renewed on a channel on which nothing else is asked.
//   - Quorum queues cannot be exclusive (406), and a virtual host's default may be
//     quorum: the type is always spelled out.
//   - Transient queues that are not exclusive are refused by RabbitMQ 4.3 with
//     541, which closes the connection: A queues are durable.
//   - Adding slots means to declare each in between, in ascending order; removing
//     them, to delete each in descending order and wait for delete-ok.
package rabbitmq
