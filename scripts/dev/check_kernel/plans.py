"""The worlds that are searched."""

from __future__ import annotations

from scripts.dev.check_kernel.world import Ask, Plan

BOTH_WAYS = ("errand", "lease")

SMALL = (Plan("one pair", (Ask(1), Ask(3)), num_owners=1, num_peers=1, num_faults=2, ways=BOTH_WAYS, shrinks=True),)

DEEP: tuple[Plan, ...] = ()
