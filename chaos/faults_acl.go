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
	{name: "token-rotated", what: "the token in the file of a replica is replaced, and an old one deleted", weight: 2, least: time.Second, most: 5 * time.Second, run: rotateToken},
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
	return h.c.authorize(context.WithoutCancel(ctx), r)
}

func revokeToken(ctx context.Context, h *fault) error {
	r := h.replica()
	if err := h.begins(r.name); err != nil {
		return err
	}
	if err := h.c.revoke(ctx, r); err == nil {
		h.lasts(ctx)
	}
	return h.c.authorize(context.WithoutCancel(ctx), r)
}

// rotateToken harms nobody, if the replica reads the file again.
func rotateToken(ctx context.Context, h *fault) error {
	r := h.replica()
	if err := h.begins(r.name); err != nil {
		return err
	}
	if err := h.c.rotate(ctx, r); err == nil {
		h.lasts(ctx)
	}
	return nil
}
