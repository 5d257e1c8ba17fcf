package main

import (
	"context"
	"maps"
	"slices"
	"time"
)

// Faults of the tokens with which replicas come to Consul.
var aclFaults = []*kind{
	{name: "acl-narrowed", what: "the token of a replica lacks a right", weight: 2, least: 3 * time.Second, most: 40 * time.Second, run: narrowToken},
	{name: "token-revoked", what: "the token of a replica is deleted, and made again", weight: 2, least: 3 * time.Second, most: 40 * time.Second, run: revokeToken},
}

// narrowToken takes one right away and gives it back. Of two that hit one replica the
// first to end gives all rights back.
func narrowToken(ctx context.Context, h *fault) error {
	r := h.replica()
	variants := narrowRules(r.host.agent.Node())
	names := slices.Sorted(maps.Keys(variants))
	chosen := names[h.rand.IntN(len(names))]
	h.about = ": " + chosen
	if err := h.begins(r.name); err != nil {
		return err
	}
	if err := h.c.setPolicy(ctx, r.name, variants[chosen]); err == nil {
		h.lasts(ctx)
	}
	return h.c.authorize(context.WithoutCancel(ctx), r.name)
}

func revokeToken(ctx context.Context, h *fault) error {
	r := h.replica()
	if err := h.begins(r.name); err != nil {
		return err
	}
	if err := h.c.deleteToken(ctx, r.name); err == nil {
		h.lasts(ctx)
	}
	return h.c.authorize(context.WithoutCancel(ctx), r.name)
}
