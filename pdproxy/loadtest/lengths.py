"""The module says how many tokens a prompt and an answer have. The lengths are distributions, as one names them on a
command line, or those of a trace."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdproxy.loadtest.errors import WorkloadError


class Lengths(Protocol):
    def draw(self, dice: random.Random) -> int:
        """Returns a number of tokens, at least 1."""


class Sizes(Protocol):
    """Sizes draws the lengths of a prompt and its answer together, because in a trace they are not independent."""

    def draw(self, dice: random.Random) -> tuple[int, int]: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    num_tokens: int

    def __post_init__(self) -> None:
        _check(self.num_tokens >= 1, f"{self}: a length is at least 1")

    def draw(self, dice: random.Random) -> int:
        return self.num_tokens

    def __str__(self) -> str:
        return f"fixed:{self.num_tokens}"


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform draws lengths from `least` to `most`, both ends included, each as likely as any other."""

    least: int
    most: int

    def __post_init__(self) -> None:
        _check(1 <= self.least <= self.most, f"{self}: lengths are at least 1, and the first is the smaller one")

    def draw(self, dice: random.Random) -> int:
        return dice.randint(self.least, self.most)

    def __str__(self) -> str:
        return f"uniform:{self.least},{self.most}"


@dataclass(frozen=True, slots=True)
class LogNormal:
    """LogNormal draws lengths most of which are near the median, and a few of which are very long. `sigma` is that of
    the logarithm. A length beyond `most` is drawn again, so that there is no heap at the limit."""

    median: float
    sigma: float
    most: int = 1 << 20

    def __post_init__(self) -> None:
        _check(self.median >= 1 and self.sigma >= 0, f"{self}: the median is at least 1, sigma at least 0")
        _check(self.most >= self.median, f"{self}: the limit must not be below the median")

    def draw(self, dice: random.Random) -> int:
        while (length := round(dice.lognormvariate(math.log(self.median), self.sigma))) > self.most:
            pass
        return max(1, length)

    def __str__(self) -> str:
        return f"lognormal:{self.median:g},{self.sigma:g},{self.most}"


@dataclass(frozen=True, slots=True)
class Mixed:
    """Mixed draws one length, `usual`, but for a `share` of the draws, which have the `other`."""

    usual: int
    other: int
    share: float

    def __post_init__(self) -> None:
        _check(self.usual >= 1 and self.other >= 1, f"{self}: a length is at least 1")
        _check(0.0 <= self.share <= 1.0, f"{self}: the share of the other length is from 0 to 1")

    def draw(self, dice: random.Random) -> int:
        return self.other if dice.random() < self.share else self.usual

    def __str__(self) -> str:
        return f"mixed:{self.usual},{self.other},{self.share:g}"


@dataclass(frozen=True, slots=True)
class Independent:
    """Independent draws prompt and answer each from its own distribution. It implements `Sizes`."""

    prompt: Lengths
    answer: Lengths

    def draw(self, dice: random.Random) -> tuple[int, int]:
        return self.prompt.draw(dice), self.answer.draw(dice)

    def __str__(self) -> str:
        return f"{self.prompt} → {self.answer}"


@dataclass(frozen=True, slots=True)
class Drawn:
    """Drawn draws one of the given pairs, each as likely as any other. It implements `Sizes`."""

    pairs: Sequence[tuple[int, int]]

    def __post_init__(self) -> None:
        _check(bool(self.pairs), "there are no lengths to draw from")

    def draw(self, dice: random.Random) -> tuple[int, int]:
        return dice.choice(self.pairs)

    def __str__(self) -> str:
        return f"one of {len(self.pairs)}"


def parse_lengths(text: str) -> Lengths:
    """Returns the distribution that ``512``, ``fixed:512``, ``uniform:16,900``, ``lognormal:MEDIAN,SIGMA[,MOST]`` or
    ``mixed:USUAL,OTHER,SHARE`` names. Raises `WorkloadError`."""
    name, colon, numbers = text.strip().partition(":")
    make = _MAKERS.get(name if colon else "fixed")
    try:
        values = [float(number) for number in (numbers if colon else name).split(",")]
        if make is None:
            raise ValueError
        return make(*values)
    except (ValueError, OverflowError, TypeError):
        raise WorkloadError(
            f"{text!r} is no distribution of lengths: give 512, uniform:16,900, lognormal:512,0.8[,4096] or "
            "mixed:100,100000,0.02"
        ) from None


def _fixed(num_tokens: float) -> Lengths:
    return Fixed(int(num_tokens))


def _uniform(least: float, most: float) -> Lengths:
    return Uniform(int(least), int(most))


def _lognormal(median: float, sigma: float, most: float = 1 << 20) -> Lengths:
    return LogNormal(median, sigma, int(most))


def _mixed(usual: float, other: float, share: float) -> Lengths:
    return Mixed(int(usual), int(other), share)


def _check(is_right: bool, complaint: str) -> None:
    if not is_right:
        raise WorkloadError(complaint)


_MAKERS: dict[str, Callable[..., Lengths]] = {
    "fixed": _fixed,
    "uniform": _uniform,
    "lognormal": _lognormal,
    "mixed": _mixed,
}
