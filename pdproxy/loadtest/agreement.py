"""Whether those that asked the same were told the same: at temperature 0 an answer depends on nothing but its question,
so that one which differs is wrong, and no reference is needed to see it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from pdproxy.loadtest.record import Record, Run

SAME_QUESTIONS = (
    *("sizes", "num_questions", "prefix_groups", "prefix_tokens", "turns", "message"),
    *("max_prompt_tokens", "max_answer_tokens", "endpoint", "rows", "scale"),
)
"""Settings of a workload by which its questions are what they are; rates and times are not among them."""
SAME_TRAFFIC = (
    *SAME_QUESTIONS,
    *("arrivals", "burstiness", "clients", "think_s", "speed", "ramp_s", "from_rate", "turn_think_s"),
    *("stream_share", "abort_share", "abort_phases", "warmup_s"),
)
"""Settings without which two runs at the same rate are not two answers to the same question."""


class Differing(NamedTuple):
    """Of whole answers whose question was asked more than once."""

    num_differing: int
    """Those that say otherwise than most."""
    num_compared: int

    def __bool__(self) -> bool:
        """There was anything to compare."""
        return self.num_compared > 0


def differing(records: Iterable[Record]) -> Differing:
    """Answers of as many tokens to the same question are held against each other."""
    told: dict[tuple[int, int, int], Counter[str]] = {}
    for record in records:
        if record.is_ok and record.answer_digest:
            key = (record.question, record.turn, record.answer_tokens_asked)
            told.setdefault(key, Counter())[record.answer_digest] += 1
    several = [digests for digests in told.values() if digests.total() > 1]
    return Differing(
        sum(digests.total() - max(digests.values()) for digests in several),
        sum(digests.total() for digests in several),
    )


def differences(one: Run, other: Run) -> list[str]:
    """What was asked otherwise, by the settings' names."""
    a, b = one.head.settings, other.head.settings
    return [name for name in SAME_TRAFFIC if a.get(name) != b.get(name)]


def asks_alike(one: Run, other: Run) -> bool:
    """Their questions of one number are the same."""
    a, b = one.head, other.head
    same = all(a.settings.get(name) == b.settings.get(name) for name in (*SAME_QUESTIONS, "edition"))
    return same and (a.seed, a.model) == (b.seed, b.model)
