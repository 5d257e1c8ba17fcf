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
//	P/N/admin                 the administration mutex: exclusive too
//	P/N/bell                  rung when a slot is given back; there while somebody waits
//	P/N/reach-0, -1, -2, -4…  the highest says: nobody has a slot above this number
//	P/.session/<id>           a connection that may hold slots
//	P/.mail/<id>              where somebody who asks the holders waits for answers
//
// The limit is the number of A queues before the first gap. Who declares B[L] and
// still finds A[L] then has slot L. Others may take part with clients of their
// own, if they call the queues so. Whether a queue exists is found out by
// publishing to it, see prober.
//
// Three things are additions. The reach: a limit that falls from 5 to 2 leaves
// holders of 3, 4 and 5 inside, and the original lets two more in, on slots 1 and
// 2. Here nobody enters while as many are inside as the limit says, so holders
// above the limit must be counted, and the reach says how far to look. It also
// makes a semaphore with no slots differ from none. A semaphore without a reach,
// made by another client, is searched a little beyond its last slot instead.
//
// And letters: a holder reads what is sent to its B queue. That is how Inspect
// learns who holds a slot, and how Destroy takes it away; see letter.
//
// And the bell, so that who waits need not look all the time; see bell.go.
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
// # What is not
//
// This is a limit, to spare what is scarce. It is no mutual exclusion, and must
// not guard a task: there is no fencing token, and these let too many in for a
// moment, by at most the time for which a lease is believed (8 s by default):
//
//   - The broker ends a connection, and the holder does not learn of it: a
//     machine dies, or an operator or a proxy closes a connection, while the
//     network is down. A broker that restarts is covered for those who use this
//     package: a new connection takes no slots before that time has passed.
//   - Two parts of a cluster do not see each other. RabbitMQ 3 and 4 resolve that
//     in ways of their own; some versions with Khepri have deleted the exclusive
//     queues of the other part, others have kept them until its nodes returned,
//     which lets too few in.
//   - A frozen process, which cannot look at its clock.
//
// Clients of other makes are only counted. They may enter above a limit that has
// just fallen, as the original does, and do not let go because a semaphore is
// destroyed.
//
// There is no queue of those who wait, and no fairness: who comes at the right
// moment enters. Taking a slot costs some three probes for each slot that there
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
//     connection has already succeeds, so a term keeps a table of its slots.
//   - Losing a race for B is 405 RESOURCE_LOCKED, which closes the channel. The
//     connection, and all B queues with it, live on; the next request gets a new
//     channel. Closing a channel does not release anything, whatever is written.
//   - A broker with an alarm (disk, memory) stops reading from connections that
//     publish, heartbeats and all. So the connection that holds never publishes:
//     probes go out on another one.
//   - Quorum queues cannot be exclusive (406), and a virtual host's default may be
//     quorum: the type is always spelled out.
//   - Transient queues that are not exclusive are refused by RabbitMQ 4.3 with
//     541, which closes the connection: A queues are durable.
//   - Adding slots means to declare each in between, in ascending order; removing
//     them, to delete each in descending order and wait for delete-ok.
package rabbitmq
