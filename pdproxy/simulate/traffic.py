"""The module says what is asked, and when: it takes the load test's own arrivals and lengths, seeded, so that every
policy and every size is asked the same."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat

from pdproxy.config.options import Process
from pdproxy.loadtest.arrivals import Pace, arrivals
from pdproxy.loadtest.lengths import Drawn, Sizes
from pdproxy.loadtest.traces import TraceRow

NUM_SAMPLED = 20_000
"""The number of questions that are drawn to know their mean lengths."""


@dataclass(slots=True)
class Question:
    """Question is one request to be made. `group` names a prefix of `num_shared` tokens that it has in common with
    others."""

    index: int
    due_s: float
    num_prompt_tokens: int
    num_answer_tokens: int
    group: int | None = None
    num_shared: int = 0


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Traffic is an open loop of `rate` requests per second, or, where there are `clients`, a closed one: each of them
    asks, waits for the end of the answer, and thinks for `think_s` seconds. With `rows` of a trace, it is an open loop
    that asks what they say, over and over, at this rate.

    `burstiness` is that of gamma arrivals. `num_groups` above 0 is a number of prefixes: each prompt begins with one of
    them, which is `shared_share` of it. `then` has the sizes of the second half of the requests, where the load turns.
    """

    sizes: Sizes
    rate: float = 1.0
    process: Process = "poisson"
    burstiness: float = 1.0
    clients: int = 0
    think_s: float = 0.0
    num_groups: int = 0
    shared_share: float = 0.5
    rows: Sequence[TraceRow] = ()
    then: Sizes | None = None

    @cached_property
    def means(self) -> tuple[float, float]:
        """Returns the mean numbers of tokens of prompts and of answers, as sampled."""
        dice = random.Random("means")
        drawn = [self.sizes.draw(dice) for _ in range(NUM_SAMPLED)]
        return sum(prompt for prompt, _ in drawn) / NUM_SAMPLED, sum(answer for _, answer in drawn) / NUM_SAMPLED

    @property
    def kind(self) -> str:
        """Returns the kind of traffic in a word."""
        return "closed" if self.clients else "trace" if self.rows else self.process

    def questions(self, num: int, seed: int) -> Iterator[Question]:
        """Yields `num` questions, in the order in which they are due. In a closed loop they are due at 0."""
        asked = self._from_trace() if self.rows else self._drawn(seed, num)
        groups = random.Random(f"{seed} groups")
        for index, (due_s, prompt, answer) in zip(range(num), asked, strict=False):
            if self.num_groups:
                group, num_shared = groups.randrange(self.num_groups), int(prompt * self.shared_share)
                yield Question(index, due_s, prompt, answer, group, num_shared)
            else:
                yield Question(index, due_s, prompt, answer)

    def _drawn(self, seed: int, num: int) -> Iterator[tuple[float, int, int]]:
        dice = random.Random(f"{seed} lengths")
        for index, due_s in enumerate(self._times(seed)):
            sizes = self.sizes if self.then is None or index < num // 2 else self.then
            prompt, answer = sizes.draw(dice)
            yield due_s, prompt, answer

    def _times(self, seed: int) -> Iterator[float]:
        if self.clients:
            return repeat(0.0)
        return arrivals(
            self.process, Pace(rate=self.rate), random.Random(f"{seed} arrivals"), burstiness=self.burstiness
        )

    def _from_trace(self) -> Iterator[tuple[float, int, int]]:
        """Yields the questions as unevenly as the trace has them, and so fast that they come to `rate`."""
        rows = self.rows
        lasts_s = span_of(rows)
        factor = len(rows) / (self.rate * lasts_s)
        begins_s = 0.0
        while True:
            for row in rows:
                yield (begins_s + row.at_s) * factor, row.prompt_tokens, row.answer_tokens
            begins_s += lasts_s


def span_of(rows: Sequence[TraceRow]) -> float:
    """Returns the seconds from a trace's beginning to where it could begin anew: the mean gap lies behind its last
    row."""
    lasts_s = rows[-1].at_s
    return lasts_s * len(rows) / (len(rows) - 1) if len(rows) > 1 and lasts_s > 0.0 else 1.0


def sizes_of(rows: Sequence[TraceRow]) -> Sizes:
    return Drawn([(row.prompt_tokens, row.answer_tokens) for row in rows])
