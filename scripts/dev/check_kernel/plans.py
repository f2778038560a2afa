"""The worlds that are searched: the small ones always, the deep ones on demand."""

from __future__ import annotations

from scripts.dev.check_kernel.world import ENGINES, FINISHES, LEGS, PLACES, REQUESTS, Ask, Plan

BOTH_WAYS = ("errand", "lease")
IN_LINE = REQUESTS | FINISHES
SHORT, LONG, URGENT = Ask(1), Ask(3), Ask(2, priority=1)

SMALL = (
    Plan("one pair, faults", (Ask(2),), num_owners=1, num_peers=1),
    Plan(
        "two pairs, faults",
        (Ask(2),),
        num_faults=1,
        faults=PLACES - {"trip"},
        events=REQUESTS | (LEGS - {"echo"}) | ENGINES,
    ),
    Plan("one pair, two accounts", (Ask(2, 2),), num_owners=1, num_peers=1, peer_capacity=3, num_faults=1),
    Plan(
        "one pair, sizes",
        (Ask(1), Ask(3)),
        num_owners=1,
        num_peers=1,
        num_faults=0,
        ways=BOTH_WAYS,
        shrinks=True,
    ),
    Plan("line", (LONG, SHORT, URGENT, Ask(1, priority=1)), 1, 1, 4, num_faults=0, events=IN_LINE),
    Plan("line, two owners", (LONG, SHORT, URGENT), 2, 1, 4, num_faults=0, events=IN_LINE),
    Plan("line, retries", (LONG, Ask(1, priority=1), Ask(2, is_retry=True)), 1, 1, 4, num_faults=0, events=IN_LINE),
    Plan(
        "line, two accounts",
        (Ask(1, 3), Ask(3, 1), Ask(2, 2), Ask(1, 0)),
        num_requests=4,
        peer_capacity=3,
        num_faults=0,
        events=IN_LINE,
    ),
    Plan(
        "line, places open and close",
        (LONG, SHORT),
        num_requests=3,
        num_faults=2,
        faults=frozenset({"drain", "trip"}),
        events=IN_LINE,
    ),
    Plan(
        "line, avoiding and tied",
        (Ask(2), Ask(2, avoids=(0,)), Ask(3, home=1)),
        num_requests=3,
        num_faults=1,
        faults=frozenset({"drain", "trip"}),
        events=IN_LINE,
    ),
)

DEEP = (
    Plan("deep: two pairs, two faults", (Ask(2),)),
    Plan("deep: two pairs, two accounts", (Ask(2, 2), Ask(1, 3)), peer_capacity=3, num_faults=1),
    Plan("deep: three requests", (Ask(1), Ask(2)), num_owners=1, num_peers=1, num_requests=3, num_faults=1),
    Plan(
        "deep: engines report what is in use",
        (Ask(2),),
        num_owners=1,
        num_peers=1,
        num_faults=2,
        ways=BOTH_WAYS,
        is_reporting=True,
    ),
    Plan(
        "deep: line",
        (LONG, Ask(2), SHORT, URGENT, Ask(1, 2)),
        num_requests=4,
        peer_capacity=3,
        faults=frozenset({"drain", "trip"}),
        events=IN_LINE,
    ),
)
