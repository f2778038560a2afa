"""Kinds of values that options have, and that code below and above names alike."""

from __future__ import annotations

from typing import Literal

RoutingPolicy = Literal[
    "round_robin", "least_slots", "least_queued_tokens", "power_of_two", "session_affinity", "prefix_affinity"
]
