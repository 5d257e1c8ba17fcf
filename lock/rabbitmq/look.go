package rabbitmq

import (
	"cmp"
	"context"
	"fmt"
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
	taken []int // slots with a B or a delay queue, ascending, those above the limit too
	shut  []int // of these, slots without a B queue: their holders died a moment ago
}

// there reports whether there is a semaphore at all.
func (v view) there() bool { return v.slots > 0 || v.reach >= 0 }

// known reports whether there is nothing to recognise: a semaphore that has a reach is ours.
func (v view) known() bool { return v.slots == 0 || v.reach >= 0 }

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
		v.top = v.slots + overshoot // another client made it, and keeps no reach
	}
	err = v.seek(ctx, o, n)
	return v, err
}

// seek finds out who is inside, up to the top.
func (v *view) seek(ctx context.Context, o observer, n names) error {
	found, err := exist(ctx, o, n.bs(1, v.top))
	if err != nil {
		return err
	}
	if v.shut, err = shut(ctx, o, n, found); err != nil {
		return err
	}
	for i := range found {
		if found[i] || slices.Contains(v.shut, i+1) {
			v.taken = append(v.taken, i+1)
		}
	}
	return nil
}

// shut returns the slots that have a delay queue, of those for which no B queue was
// found. It must be asked after that: a holder declares its delay queue later than
// B, so one who dies meanwhile is seen by the one or by the other.
func shut(ctx context.Context, o observer, n names, held []bool) ([]int, error) {
	var without, shut []int
	for i := range held {
		if !held[i] {
			without = append(without, i+1)
		}
	}
	if len(without) == 0 {
		return nil, nil
	}
	found, err := exist(ctx, o, n.ds(without))
	for i := range found {
		if found[i] {
			shut = append(shut, without[i])
		}
	}
	return shut, err
}

// count determines the maximum: it goes up the A queues until one is missing. On
// the way it learns the reach.
func count(ctx context.Context, o observer, n names) (view, error) {
	v := view{reach: -1}
	found, err := exist(ctx, o, append(n.reaches(), n.as(1, 8)...)) // most limits are low
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
		if found, err = exist(ctx, o, n.as(v.slots+1, v.slots+window)); err != nil {
			return v, err
		}
	}
}

// settled reports whether those who have declared these B queues, having seen v
// before, are inside: their slots must still exist, and no more may be held than
// the limit says, themselves included. Nor may the reach have been moved up
// meanwhile, as there might be holders who were not counted. Nor may one of the
// slots have a delay queue, as somebody may have taken it since v and died. B is
// ours, so nobody else declares one now.
//
// B queues are looked at first and the limit afterwards, so no fall that was
// complete before is missed. Of any who are inside together, the one who declared
// last has looked after the declarations of all others and counted them all, so
// they are never more than the limit it saw.
//
// It returns errElsewhere if it does not see one of their B queues.
func settled(ctx context.Context, o observer, n names, v view, mine []int) (bool, error) {
	held, err := exist(ctx, o, n.bs(1, v.top))
	if err != nil {
		return false, err
	}
	for _, slot := range mine {
		if !held[slot-1] {
			return false, fmt.Errorf("%w: %s", errElsewhere, n.b(slot))
		}
	}
	died, err := shut(ctx, o, n, held)
	if err != nil {
		return false, err
	}
	ask := n.ds(mine)
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
	found, err := exist(ctx, o, ask)
	if err != nil {
		return false, err
	}
	inside := len(died)
	for _, taken := range held {
		if taken {
			inside++
		}
	}
	delayed := slices.Contains(found[:len(mine)], true)
	stand := !slices.Contains(found[len(mine):limits], false)
	raised := slices.Contains(found[limits:], true)
	return inside <= v.slots && !delayed && stand && !raised, nil
}

// recognise does what the function of that name does, and returns soon after the end of ctx.
func (t *session) recognise(ctx context.Context, n names, v view) error {
	if v.known() {
		return nil
	}
	wrong, err := await(ctx, t, func() error { return recognise(t.requests, n, v) }, func(error) {})
	return cmp.Or(err, wrong)
}

// recognise returns lock.ErrForeign if what has the name of the first slot is
// somebody's queue for another purpose.
func recognise(l *line, n names, v view) error {
	if v.known() {
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
