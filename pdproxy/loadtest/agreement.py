"""The module tells whether requests that asked the same got the same answer. At temperature 0 an answer depends on its
question alone. So an answer that differs is wrong, and no reference is needed to see it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from pdproxy.loadtest.record import Record, Run

SAME_QUESTIONS = (
    *("sizes", "num_questions", "prefix_groups", "prefix_tokens", "turns", "message"),
    *("max_prompt_tokens", "max_answer_tokens", "endpoint", "rows", "scale"),
)
"""The settings of a workload which decide what its questions are. Rates and times are not among them."""
SAME_TRAFFIC = (
    *SAME_QUESTIONS,
    *("arrivals", "burstiness", "clients", "think_s", "speed", "ramp_s", "from_rate", "turn_think_s"),
    *("stream_share", "abort_share", "abort_phases", "warmup_s"),
)
"""The settings in which two runs at the same rate must agree to be comparable."""


class Differing(NamedTuple):
    """Differing counts the whole answers whose question was asked more than once, and those of them that differ."""

    num_differing: int
    """Counts the answers that say something else than most answers to the same question."""
    num_compared: int

    def __bool__(self) -> bool:
        """Tells whether there was anything to compare."""
        return self.num_compared > 0


def differing(records: Iterable[Record]) -> Differing:
    """Compares the answers to each question that have the same number of tokens asked for, and returns the counts."""
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
    """Returns the names of the settings in which the traffic of the two runs differs."""
    a, b = one.head.settings, other.head.settings
    return [name for name in SAME_TRAFFIC if a.get(name) != b.get(name)]


def asks_alike(one: Run, other: Run) -> bool:
    """Tells whether questions of the same number are the same in both runs."""
    a, b = one.head, other.head
    same = all(a.settings.get(name) == b.settings.get(name) for name in (*SAME_QUESTIONS, "edition"))
    return same and (a.seed, a.model) == (b.seed, b.model)
