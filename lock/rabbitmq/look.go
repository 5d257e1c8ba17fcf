package rabbitmq

import (
	"context"
	"slices"

	amqp "github.com/rabbitmq/amqp091-go"
)

// overshoot is how far beyond the last slot to look for what should not be there:
// A queues beyond a gap, which somebody deleted by hand, and holders of a
// semaphore that has no reach.
const overshoot = 64

// A view is how a semaphore's queues stand, or stood a moment ago: it takes some
// round trips, and others do not wait.
type view struct {
	slots int   // the limit: A queues before the first gap
	reach int   // no slot above is held by anybody; -1 if it was made by another client
	top   int   // how far taken was looked for
	taken []int // slots with a B queue, ascending, those above the limit too
}

// there reports whether there is a semaphore at all.
func (v view) there() bool { return v.slots > 0 || v.reach >= 0 }

// free returns the slots up to the limit that nobody has.
func (v view) free() []int {
	var free []int
	for slot := 1; slot <= v.slots; slot++ {
		if _, taken := slices.BinarySearch(v.taken, slot); !taken {
			free = append(free, slot)
		}
	}
	return free
}

// room returns how many may enter: none while holders above a limit that fell
// keep others out.
func (v view) room() int { return max(0, v.slots-len(v.taken)) }

// highest returns the highest slot that somebody has, or 0.
func (v view) highest() int {
	if len(v.taken) == 0 {
		return 0
	}
	return v.taken[len(v.taken)-1]
}

// look views a semaphore.
func look(ctx context.Context, o observer, n names) (view, error) {
	v, err := count(ctx, o, n)
	if err != nil || !v.there() {
		return v, err
	}
	v.top = max(v.slots, v.reach)
	if v.slots > v.reach {
		v.top = v.slots + overshoot // it is not we who look after it
	}
	err = v.seek(ctx, o, n)
	return v, err
}

// seek finds out who is inside, up to the top.
func (v *view) seek(ctx context.Context, o observer, n names) error {
	found, err := o.exist(ctx, n.bs(1, v.top))
	for i := range found {
		if found[i] {
			v.taken = append(v.taken, i+1)
		}
	}
	return err
}

// count determines the maximum: it goes up the A queues until one is missing. On
// the way it learns the reach.
func count(ctx context.Context, o observer, n names) (view, error) {
	v := view{reach: -1}
	found, err := o.exist(ctx, append(n.reaches(), n.as(1, 32)...))
	if err != nil {
		return v, err
	}
	for i, reach := range reaches {
		if found[i] {
			v.reach = reach
		}
	}
	found = found[len(reaches):]
	for {
		gap := slices.Index(found, false)
		if gap >= 0 {
			v.slots += gap
			return v, nil
		}
		v.slots += len(found)
		if found, err = o.exist(ctx, n.as(v.slots+1, v.slots+window)); err != nil {
			return v, err
		}
	}
}

// settled reports whether those who have declared these B queues, having seen v
// before, are inside: their slots must still exist, and no more may be held than
// the limit says, themselves included. Nor may the reach have been moved up
// meanwhile, as there might be holders who were not counted.
//
// B queues are looked at first and the limit afterwards, so no fall that was
// complete before is missed. Of any who are inside together, the one who declared
// last has looked after the declarations of all others and counted them all, so
// they are never more than the limit it saw.
func settled(ctx context.Context, o observer, n names, v view, mine []int) (bool, error) {
	ask := n.bs(1, v.top)
	for _, slot := range mine {
		ask = append(ask, n.a(slot))
	}
	ask = append(ask, n.a(v.slots))
	limits := len(ask)
	for _, reach := range reaches {
		if reach > v.reach {
			ask = append(ask, n.reach(reach))
		}
	}
	found, err := o.exist(ctx, ask)
	if err != nil {
		return false, err
	}
	inside := 0
	for _, taken := range found[:v.top] {
		if taken {
			inside++
		}
	}
	stand := !slices.Contains(found[v.top:limits], false)
	raised := slices.Contains(found[limits:], true)
	return inside <= v.slots && stand && !raised, nil
}

// recognise returns lock.ErrForeign if what has the name of the first slot is
// somebody's queue for another purpose. A semaphore that has a reach is ours.
func recognise(l *line, n names, v view) error {
	if v.slots == 0 || v.reach >= 0 {
		return nil
	}
	var queue amqp.Queue
	err := l.do(func(ch *amqp.Channel) (err error) {
		queue, err = ch.QueueDeclarePassive(n.a(1), true, false, false, false, nil)
		return err
	})
	switch {
	case is(err, amqp.ResourceLocked) || err == nil && queue.Consumers > 0:
		return foreign(n.a(1))
	case is(err, amqp.NotFound):
		return nil // it went just now
	}
	return explain("look at queue "+n.a(1), err)
}

// reaches returns the names of all that a reach may be.
func (n names) reaches() []string {
	var list []string
	for _, reach := range reaches {
		list = append(list, n.reach(reach))
	}
	return list
}
