package main

import (
	"context"
	"fmt"
	"time"

	"onejob/internal/retry"
	"onejob/store"
)

// Faults of a primary and a standby. Each leaves both in order, in other places perhaps.
var standbyFaults = []*kind{
	{name: "postgres-failover", what: "the primary dies and the standby takes its place; the old one comes back", weight: 3, least: 0, most: 10 * time.Second, standby: true, run: forgetting(failOver)},
	{name: "split-brain", what: "the standby is promoted while the primary lives on, and replicas reach the one, the other, or both", weight: 2, least: 5 * time.Second, most: 30 * time.Second, standby: true, run: forgetting(splitBrain)},
	{name: "postgres-restore", what: "Postgres is restored from a backup of some seconds ago", weight: 2, least: 5 * time.Second, most: 40 * time.Second, standby: true, forgets: true, run: forgetting(restorePostgres)},
}

// failOver lets the standby lag before. Where commits wait for it, they do so for longer than replicas
// wait for answers: then Postgres ends the waits, and shows what the standby has not got. The primary
// is killed, or nothing of it is heard any more.
func failOver(ctx context.Context, h *fault) error {
	d := h.c.postgres
	lags, silent, returns := h.rand.IntN(2) == 0, h.rand.IntN(2) == 0, !d.waits && h.rand.IntN(2) == 0
	lag := time.Duration(500+h.rand.IntN(4000)) * time.Millisecond
	if d.waits {
		lag += store.DefaultTimeout
	}
	if lags {
		h.about += ", the standby lags"
	}
	if silent {
		h.about += ", black-holed first"
	}
	if returns {
		h.about += ", it comes back as a primary"
	}
	if err := h.begins("the primary"); err != nil {
		return err
	}
	whole := context.WithoutCancel(ctx)
	if lags {
		if err := d.other().Detach(whole); err != nil {
			return fmt.Errorf("detach the standby: %w", err)
		}
		retry.Pause(ctx, lag)
	}
	ways := &held{}
	defer ways.release()
	if silent {
		for _, r := range h.c.replicas {
			ways.hold(r.postgres[d.primaryIndex()])
		}
		retry.Pause(ctx, time.Duration(h.rand.IntN(3000))*time.Millisecond)
	}
	d.primary().Kill()
	retry.Pause(ctx, time.Duration(h.rand.IntN(3000))*time.Millisecond)
	if err := d.promote(whole); err != nil {
		return err
	}
	h.lasts(ctx)
	if returns {
		if err := d.other().Start(whole); err != nil {
			return err
		}
	}
	ways.release()
	if returns {
		retry.Pause(ctx, 5*time.Second)
	}
	return d.rebuild(whole)
}

// splitBrain promotes the standby beside the primary. Each replica reaches both, or only
// the one or the other.
func splitBrain(ctx context.Context, h *fault) error {
	d := h.c.postgres
	if err := h.begins("the primary"); err != nil {
		return err
	}
	before := d.primaryIndex()
	ways := &held{}
	defer ways.release()
	for _, r := range h.c.replicas {
		switch h.rand.IntN(3) {
		case 0:
			ways.hold(r.postgres[before])
		case 1:
			ways.hold(r.postgres[1-before])
		}
	}
	whole := context.WithoutCancel(ctx)
	if err := d.promote(whole); err != nil {
		return err
	}
	h.lasts(ctx)
	ways.release()
	return d.rebuild(whole)
}

func restorePostgres(ctx context.Context, h *fault) error {
	d := h.c.postgres
	if err := h.begins("the primary"); err != nil {
		return err
	}
	whole := context.WithoutCancel(ctx)
	restore, err := d.primary().Backup(whole)
	if err != nil {
		return err
	}
	h.lasts(ctx)
	if err := restore(whole); err != nil {
		return fmt.Errorf("restore the backup: %w", err)
	}
	return d.rebuild(whole)
}
