"""The module holds kinds of values that options have. Code outside the options uses the same names."""

from __future__ import annotations

from typing import Literal

RoutingPolicy = Literal[
    "round_robin", "least_slots", "least_queued_tokens", "power_of_two", "session_affinity", "prefix_affinity"
]
