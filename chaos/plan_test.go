package main

import (
	"errors"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestTheSameSeedMakesTheSamePlan(t *testing.T) {
	a, b := plan(7, kinds, time.Hour), plan(7, kinds, time.Hour)
	if !reflect.DeepEqual(a, b) {
		t.Error("two plans of one seed differ")
	}
	if reflect.DeepEqual(a, plan(8, kinds, time.Hour)) {
		t.Error("plans of two seeds are the same")
	}
}

func TestAPlanHasEverythingInIt(t *testing.T) {
	steps := plan(1, kinds, time.Hour)
	for _, k := range kinds {
		of := func(alone bool) bool {
			return slices.ContainsFunc(steps, func(s step) bool { return s.Kind == k && s.Alone == alone })
		}
		if !of(false) {
			t.Errorf("%s is not among %d steps", k.name, len(steps))
		}
	}
	for _, s := range steps {
		if s.For < s.Kind.least || s.For > s.Kind.most {
			t.Errorf("%s for %v, which is not between %v and %v", s.Kind.name, s.For, s.Kind.least, s.Kind.most)
		}
	}
	if plan(1, nil, time.Hour) != nil {
		t.Error("a plan without kinds has steps")
	}
}

// Of as many faults as there are kinds, each is another one.
func TestADeckHasEachKindFirst(t *testing.T) {
	cards := &deck{rand: rand.New(rand.NewPCG(1, 1)), kinds: kinds}
	draw := func() *kind {
		defer cards.take()
		return cards.top()
	}
	weights := 0
	for range 2 {
		drawn := map[*kind]int{}
		for i := range kinds {
			drawn[draw()]++
			if len(drawn) != i+1 {
				t.Fatalf("%d kinds after %d faults", len(drawn), i+1)
			}
		}
		weights = 0
		for _, k := range kinds {
			weights += k.weight
		}
		for range weights - len(kinds) {
			drawn[draw()]++
		}
		for _, k := range kinds {
			if drawn[k] != k.weight {
				t.Errorf("%s was drawn %d times, and weighs %d", k.name, drawn[k], k.weight)
			}
		}
	}
}

// A kind that is dealt comes: none is seldom because its cards were put aside.
func TestNoCardIsLost(t *testing.T) {
	weights := 0
	for _, k := range kinds {
		weights += k.weight
	}
	for seed := range uint64(50) {
		count := map[*kind]int{}
		steps := plan(seed, kinds, 2*time.Hour)
		for _, s := range steps {
			count[s.Kind]++
		}
		decks := (len(steps) - count[killed]) / weights
		for _, k := range kinds {
			if count[k] < decks*k.weight {
				t.Errorf("seed %d: %s comes %d times, in %d decks with %d of it each", seed, k.name, count[k], decks, k.weight)
			}
		}
	}
}

// A storm must end, whatever kinds it is made of.
func TestPlansOfOneKindEnd(t *testing.T) {
	for _, k := range kinds {
		if n := len(plan(3, []*kind{k}, 10*time.Minute)); n < 10 || n > 1000 {
			t.Errorf("%s: %d steps in ten minutes", k.name, n)
		}
	}
}

func TestChooseKinds(t *testing.T) {
	everything := settings{RabbitMQ: true, Standby: async, Old: "HEAD"}
	chosen, err := chooseKinds(strings.Split("kill, freeze", ","), settings{})
	if err != nil || len(chosen) != 2 || chosen[0].name != "kill" || chosen[1].name != "freeze" {
		t.Errorf("chosen were %v, %v", chosen, err)
	}
	if all, err := chooseKinds([]string{"all"}, everything); err != nil || len(all) != len(kinds)-1 {
		t.Errorf("all are %d, %v", len(all), err)
	}
	if some, err := chooseKinds([]string{"all"}, settings{}); err != nil || len(some) != len(kinds)-len(rabbitmqFaults)-len(standbyFaults)-1 { // and upgrade
		t.Errorf("without RabbitMQ and a standby all are %d, %v", len(some), err)
	}
	if fewer, err := chooseKinds([]string{"all"}, settings{Unable: map[need]error{partitions: errors.New("no root")}}); err != nil || len(fewer) != len(kinds)-len(rabbitmqFaults)-len(standbyFaults)-2 {
		t.Errorf("without iptables all are %d, %v", len(fewer), err)
	}
	if _, err := chooseKinds([]string{"slot-destroy"}, everything); err == nil { // there are no such slots
		t.Error("slot-destroy can be had with limits in RabbitMQ")
	}
	for name, s := range map[string]settings{
		"rabbitmq-kill":     {Standby: async},
		"postgres-failover": {RabbitMQ: true},
		"postgres-restore":  {Standby: synchronous},
		"upgrade":           {RabbitMQ: true},
	} {
		if _, err := chooseKinds([]string{name}, s); err == nil {
			t.Errorf("%s can be had with %+v", name, s)
		}
		if chosen, err := chooseKinds([]string{name}, everything); err != nil || len(chosen) != 1 {
			t.Errorf("%s: %v, %v", name, chosen, err)
		}
	}
	if none, err := chooseKinds([]string{"none"}, settings{}); err != nil || len(none) != 0 {
		t.Errorf("none are %d, %v", len(none), err)
	}
	if _, err := chooseKinds([]string{"frieze"}, settings{}); err == nil || !strings.Contains(err.Error(), "freeze") {
		t.Errorf("an unknown name: %v", err)
	}
}
