package main

import (
	"math"
	"slices"
)

// percentile returns the smallest value that at least p percent of the values
// do not exceed (the nearest rank). There must be values.
func percentile(values []float64, p float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	rank := int(math.Ceil(p / 100 * float64(len(sorted))))
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// median returns the middle value, or the mean of the two in the middle. There
// must be values.
func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	half := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[half]
	}
	return (sorted[half-1] + sorted[half]) / 2
}

// A spread is what several rounds say about one number.
type spread struct {
	Median float64   `json:"median"`
	Min    float64   `json:"min"`
	Max    float64   `json:"max"`
	Rounds []float64 `json:"rounds"`
}

// spreadOf sums up the values of all rounds, in the order of the rounds.
func spreadOf(rounds []float64) spread {
	if len(rounds) == 0 {
		return spread{}
	}
	return spread{median(rounds), slices.Min(rounds), slices.Max(rounds), rounds}
}

// ratios divides round by round: what was measured within one round shared the
// machine's mood. It ends with the shorter list. A round whose denominator was too small to
// be measured gives none.
func ratios(numerators, denominators []float64) []float64 {
	var out []float64
	for i := range min(len(numerators), len(denominators)) {
		if denominators[i] > 0 {
			out = append(out, numerators[i]/denominators[i])
		}
	}
	return out
}

// rotated returns the list begun at another place, a further one each round, so
// that nobody is always first. Each but the first follows the same other.
func rotated[T any](list []T, round int) []T {
	at := round % max(1, len(list))
	return slices.Concat(list[at:], list[:at])
}
