"""What is asked, and when: seeded, so that every policy and every size is asked the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, count, repeat
from math import exp
from typing import Literal

from pdproxy.simulate.errors import SimulationError

ArrivalKind = Literal["poisson", "gamma", "constant"]
ARRIVALS: tuple[ArrivalKind, ...] = ("poisson", "gamma", "constant")


@dataclass(frozen=True, slots=True)
class Question:
    """One request to be made. `group` names a prefix of `num_shared` tokens that it has in common with others."""

    index: int
    due_s: float
    num_prompt_tokens: int
    num_answer_tokens: int
    group: int | None = None
    num_shared: int = 0


# ── how long ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens, at least one: as `text` says, ``KIND:NUMBER[:NUMBER]``."""

    text: str
    mean: float
    draw: Callable[[random.Random], int]


def _fixed(tokens: float) -> Lengths:
    return Lengths("", tokens, lambda rng: int(tokens))


def _uniform(least: float, most: float) -> Lengths:
    if most < least:
        raise ValueError("the second number is the larger one")
    return Lengths("", (least + most) / 2, lambda rng: rng.randint(int(least), int(most)))


def _exponential(mean: float) -> Lengths:
    return Lengths("", mean, lambda rng: max(1, round(rng.expovariate(1.0 / mean))))


def _lognormal(median: float, sigma: float) -> Lengths:
    """`sigma` of the logarithm."""
    return Lengths("", median * exp(sigma**2 / 2), lambda rng: max(1, round(median * exp(rng.gauss(0.0, sigma)))))


_KINDS: dict[str, tuple[int, Callable[..., Lengths]]] = {
    "fixed": (1, _fixed),
    "uniform": (2, _uniform),
    "exponential": (1, _exponential),
    "lognormal": (2, _lognormal),
}


def read_lengths(text: str, option: str) -> Lengths:
    """``512``, ``fixed:512``, ``uniform:100:2000``, ``exponential:500`` (mean), ``lognormal:900:0.8`` (median, sigma of
    the logarithm). Raises `SimulationError` naming the option."""
    kind, *numbers = text.split(":") if ":" in text else ("fixed", text)
    num_numbers, make = _KINDS.get(kind, (0, _fixed))
    try:
        values = [float(number) for number in numbers]
        if len(values) != num_numbers or not all(0.0 < value < 1e9 for value in values) or values[0] < 1.0:
            raise ValueError("there is no such distribution")
        lengths = make(*values)
    except ValueError as error:
        raise SimulationError(
            f"{option}: {text!r}: {error}; there are a number, fixed:N, uniform:N:M, exponential:MEAN and "
            "lognormal:MEDIAN:SIGMA"
        ) from None
    return Lengths(text, lengths.mean, lengths.draw)


# ── all of it ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """An open loop of `rate` requests per second, or, where there are `clients`, a closed one: each of them asks, waits
    for the end of the answer, and thinks.

    `burstiness` of gamma arrivals is the square of the coefficient of variation of the times between them; 1 is Poisson.
    `num_groups` above 0: each prompt begins with one of so many prefixes, which is `shared_share` of it.
    """

    prompt: Lengths
    answer: Lengths
    rate: float = 1.0
    arrivals: ArrivalKind = "poisson"
    burstiness: float = 4.0
    clients: int = 0
    think_s: float = 0.0
    num_groups: int = 0
    shared_share: float = 0.5

    def questions(self, num: int, seed: int) -> Iterator[Question]:
        """So many, in the order in which they are due. In a closed loop they are due at 0."""
        lengths, groups = random.Random(f"{seed} lengths"), random.Random(f"{seed} groups")
        times = self._times(random.Random(f"{seed} arrivals"))
        for index in range(num):
            num_prompt_tokens = self.prompt.draw(lengths)
            question = Question(index, next(times), num_prompt_tokens, self.answer.draw(lengths))
            yield self._grouped(question, groups) if self.num_groups else question

    def _times(self, rng: random.Random) -> Iterator[float]:
        if self.clients:
            return repeat(0.0)
        if self.arrivals == "constant":
            return (index / self.rate for index in count())
        if self.arrivals == "poisson":
            return accumulate(rng.expovariate(self.rate) for _ in repeat(None))
        shape, scale = 1.0 / self.burstiness, self.burstiness / self.rate
        return accumulate(rng.gammavariate(shape, scale) for _ in repeat(None))

    def _grouped(self, question: Question, rng: random.Random) -> Question:
        return Question(
            question.index,
            question.due_s,
            question.num_prompt_tokens,
            question.num_answer_tokens,
            group=rng.randrange(self.num_groups),
            num_shared=int(question.num_prompt_tokens * self.shared_share),
        )
