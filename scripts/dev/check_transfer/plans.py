"""The worlds that are searched. Those of the quick run are searched to their ends, or to the depth that they name."""

from __future__ import annotations

from scripts.dev.check_transfer.world import DISTURBING, Plan

ONCE = DISTURBING - {"replace"}
"""The disturbances except "replace". A replaced connection leaves two that speak, which makes worlds an order of
magnitude larger: it has worlds of its own."""

SMALL = (
    Plan(name="one attempt", faults=ONCE, num_steps_of_time=1),
    Plan(name="one attempt, two faults", faults=ONCE, num_faults=2, num_steps_of_time=0),
    Plan(
        name="one attempt, replaced", faults=frozenset({"replace", "lose"}), num_faults=2, num_steps_of_time=0, depth=11
    ),
    Plan(name="two attempts", attempts=(0, 1), faults=ONCE - {"cut", "double"}, num_steps_of_time=0),
    Plan(name="two attempts and time", attempts=(0, 1), num_faults=0, num_steps_of_time=1, depth=12),
    Plan(name="two writes", pages_each=2, num_pages=2, faults=frozenset({"break", "kill", "cut"}), num_steps_of_time=0),
    Plan(name="a shared chunk", attempts=(0, 1), num_pages=2, is_keyed=True, num_faults=0, num_steps_of_time=0),
    Plan(name="one writer of two ranks", num_ranks=2, faults=ONCE, num_steps_of_time=0),
    Plan(name="two by two ranks", num_sender_ranks=2, num_ranks=2, faults=frozenset({"kill"}), num_steps_of_time=0),
    Plan(
        name="two by two ranks, in opposite orders",
        attempts=(0, 0),
        num_sender_ranks=2,
        num_ranks=2,
        num_faults=0,
        num_steps_of_time=0,
    ),
)
DEEP = (
    Plan(name="one attempt, much time", num_faults=0, num_steps_of_time=8, depth=14),
    Plan(name="one attempt, replaced to the end", faults=frozenset({"replace"}), num_steps_of_time=0),
    Plan(name="one attempt, two faults of any kind", num_faults=2, num_steps_of_time=1, depth=9),
    Plan(name="one sender of two attempts", attempts=(0, 0), faults=ONCE, num_steps_of_time=0),
    Plan(
        name="two attempts, cut or doubled", attempts=(0, 1), faults=frozenset({"cut", "double"}), num_steps_of_time=0
    ),
    Plan(name="two attempts, twice", attempts=(0, 1), num_faults=2, num_steps_of_time=2, depth=7),
    Plan(name="three attempts", attempts=(0, 1, 0), num_faults=1, num_steps_of_time=1, depth=9),
    Plan(name="two by two ranks, once", num_sender_ranks=2, num_ranks=2, faults=ONCE, num_steps_of_time=0),
    Plan(name="a shared chunk, once", attempts=(0, 1), num_pages=2, is_keyed=True, faults=ONCE, num_steps_of_time=0),
)
WALKS = (
    Plan(name="three attempts", attempts=(0, 1, 0), num_faults=5, num_steps_of_time=12),
    Plan(
        name="three attempts of two by two ranks",
        attempts=(0, 1, 0),
        num_sender_ranks=2,
        num_ranks=2,
        num_faults=5,
        num_steps_of_time=12,
    ),
)
