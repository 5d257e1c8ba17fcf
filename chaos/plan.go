package main

import (
	"math/rand/v2"
	"slices"
	"time"
)

// step is one fault of a plan.
type step struct {
	After time.Duration // since the last one began
	Kind  *kind
	For   time.Duration // how long it goes on
	Pick  uint64        // chooses what it hits, among what is there then
	Alone bool          // it waits until the others are over, and nothing begins until it is
}

const (
	// calm is how long a fault that is to be alone waits after the others, until
	// they are forgotten.
	calm = 10 * time.Second

	// aftermath is how long nothing begins after it.
	aftermath = 12 * time.Second
)

// plan returns the faults of a run: storms of some that overlap, and between
// them one alone. It is made of the seed and nothing else, so that the same seed
// breaks the same things in the same order; what they meet is up to the machine.
func plan(seed uint64, kinds []*kind, total time.Duration) []step {
	if len(kinds) == 0 {
		return nil
	}
	r := rand.New(rand.NewPCG(seed, 1))
	cards := &deck{rand: r, kinds: kinds}
	// Short ones are more frequent than long ones.
	between := func(least, most time.Duration) time.Duration {
		f := r.Float64()
		return least + time.Duration(f*f*float64(most-least))
	}
	var steps []step
	for at := time.Duration(0); at < total; {
		began, last := at, at // last is when the storm's last fault is over
		for at < began+15*time.Second || at < last {
			s := step{After: between(500*time.Millisecond, 8*time.Second), Kind: cards.top(), Pick: r.Uint64()}
			s.For = between(s.Kind.least, s.Kind.most)
			at += s.After
			if at > began+25*time.Second { // what comes now only fills the time until then
				if last-at < s.Kind.least {
					break
				}
				s.For = min(s.For, last-at)
			}
			last = max(last, at+s.For)
			steps = append(steps, s)
			cards.take()
		}
		at = max(at, last)
		s := step{Kind: killed, Pick: r.Uint64(), Alone: true}
		if !slices.Contains(kinds, killed) || r.IntN(2) == 0 {
			s.Kind = cards.top()
			cards.take()
		}
		s.For = between(s.Kind.least, s.Kind.most)
		steps = append(steps, s)
		at += calm + s.For + aftermath
	}
	return steps
}

// A deck is shuffled cards: first one of each kind, then the rest, in which each kind is as
// often as its weight says. An empty deck is filled again. So every kind has its turn, and a
// short run does not do the same few for ever.
type deck struct {
	rand  *rand.Rand
	kinds []*kind
	left  []*kind
}

// top returns the kind of the next card, which stays there until it is taken.
func (d *deck) top() *kind {
	if len(d.left) == 0 {
		var more []*kind
		for _, k := range d.kinds {
			more = append(more, slices.Repeat([]*kind{k}, k.weight-1)...)
		}
		d.left = append(d.shuffled(slices.Clone(d.kinds)), d.shuffled(more)...)
	}
	return d.left[0]
}

func (d *deck) take() { d.left = d.left[1:] }

func (d *deck) shuffled(cards []*kind) []*kind {
	d.rand.Shuffle(len(cards), func(i, j int) { cards[i], cards[j] = cards[j], cards[i] })
	return cards
}
