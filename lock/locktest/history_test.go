package locktest

import (
	"testing"

	"github.com/anishathalye/porcupine"
)

// The histories are of one slot.
func TestHistory(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		note func(h *History)
		want bool
	}{
		"one after the other": {func(h *History) {
			h.Taken(1, 0, 10)
			h.Released(1, 20, 30)
			h.Taken(1, 25, 40)
		}, true},
		"two at once": {func(h *History) {
			h.Taken(1, 0, 10)
			h.Taken(1, 20, 30)
		}, false},
		"full under a holder": {func(h *History) {
			h.Taken(1, 0, 10)
			h.Full(1, 20, 30)
		}, true},
		"full and nobody is inside": {func(h *History) {
			h.Full(1, 20, 30)
		}, false},
		"full by one without an answer": {func(h *History) {
			h.Unanswered(1, 0)
			h.Full(1, 20, 30)
		}, true},
		"full before one without an answer": {func(h *History) {
			h.Full(1, 20, 30)
			h.Unanswered(1, 40)
		}, false},
		"each of two without an answer may be the one inside": {func(h *History) {
			h.Unanswered(1, 0)
			h.Taken(1, 20, 30)
			h.Released(1, 40, 50)
			h.Full(1, 60, 70)
			h.Unanswered(1, 80)
		}, true},
		"one without an answer comes once": {func(h *History) {
			h.Unanswered(1, 0)
			h.Full(1, 20, 30)
			h.Taken(1, 40, 50)
			h.Released(1, 60, 70)
			h.Full(1, 80, 90)
		}, false},
		"one without an answer that never fits": {func(h *History) {
			h.Unanswered(2, 0)
		}, true},
		"one without an answer does not leave for another": {func(h *History) {
			h.Unanswered(1, 0)
			h.Taken(1, 20, 30)
			h.Taken(1, 40, 50)
		}, false},
		"a release of what was not taken": {func(h *History) {
			h.Released(1, 0, 10)
		}, false},
		"more room": {func(h *History) {
			h.Taken(1, 0, 10)
			h.Resized(2, 20, 30)
			h.Taken(1, 25, 40)
			h.Full(1, 50, 60)
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := History{Slots: 1, Exact: true}
			tc.note(&h)
			if got := porcupine.CheckOperations(h.model(), h.calls); got != tc.want {
				t.Errorf("it is right: %v, want %v", got, tc.want)
			}
		})
	}
}
