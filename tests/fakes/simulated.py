"""Simulations for tests: round numbers, so that every time can be worked out by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pdproxy.config.settings import Settings
from pdproxy.loadtest.lengths import Fixed, Independent
from pdproxy.loadtest.traces import TraceRow
from pdproxy.simulate.plan import Plan
from pdproxy.simulate.speed import Speed
from pdproxy.simulate.traffic import Traffic, sizes_of, span_of

ROUND = Speed(
    prefill_s=0.5,
    prefill_token_s=0.01,
    prefill_batch_tokens=1,
    transfer_s=0.25,
    kv_token_bytes=100,
    link_bytes_per_s=10_000.0,
    step_s=0.1,
    step_sequence_s=0.0,
    max_batch=8,
    pd_buffer_pages=10,
    chunk_size=100,
)
"""A prompt of 100 tokens: 1.5 s to read, 0.25 s and 1 s on the link, one page. A tenth of a second per token."""


@dataclass(frozen=True, slots=True)
class Exponential:
    """Implements `loadtest.lengths.Lengths`."""

    mean: float

    def draw(self, dice: random.Random) -> int:
        return max(1, round(dice.expovariate(1.0 / self.mean)))


def fixed(prompt: int = 100, answer: int = 11) -> Independent:
    return Independent(Fixed(prompt), Fixed(answer))


def make_plan(
    *,
    prefillers: int = 1,
    decoders: int = 1,
    num_requests: int = 1,
    seed: int = 1,
    traffic: Traffic | None = None,
    speed: Speed = ROUND,
    settings: dict[str, Any] | None = None,
    **more: Any,
) -> Plan:
    return Plan(
        prefillers=prefillers,
        decoders=decoders,
        num_requests=num_requests,
        seed=seed,
        traffic=traffic or Traffic(sizes=fixed(), process="constant"),
        speed=speed,
        settings=Settings(**(settings or {})),
        **more,
    )


def at(*rows: tuple[float, int, int]) -> Traffic:
    """Requests at these seconds, of so many tokens of prompt and answer; the first at 0."""
    made: Sequence[TraceRow] = [TraceRow(*row) for row in rows]
    return Traffic(sizes=sizes_of(made), rows=made, rate=len(made) / span_of(made))
