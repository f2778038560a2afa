"""The module chooses the pairs of prefillers and decoders that a check tries. It does no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

One = TypeVar("One")


def choose_pairs(
    prefillers: Sequence[One], decoders: Sequence[One], fits: Callable[[One, One], bool], most: int
) -> list[tuple[One, One]]:
    """Returns all pairs that fit, where these are at most `most`. Else it returns as few of them as it takes so that
    every instance which fits any other is in one, and these may be more than `most`."""
    found = []
    for pair in _all(prefillers, decoders, fits):
        found.append(pair)
        if len(found) > most:
            return _each_once(prefillers, decoders, fits)
    return found


def _all(
    prefillers: Sequence[One], decoders: Sequence[One], fits: Callable[[One, One], bool]
) -> Iterator[tuple[One, One]]:
    return ((one, other) for one in prefillers for other in decoders if fits(one, other))


def _each_once(
    prefillers: Sequence[One], decoders: Sequence[One], fits: Callable[[One, One], bool]
) -> list[tuple[One, One]]:
    """Goes through the larger side, and then through those of the other side that nobody was paired with."""
    pairs: list[tuple[One, One]] = []
    num_of = dict.fromkeys(range(len(decoders)), 0)
    for place, prefiller in enumerate(prefillers):
        for step in range(len(decoders)):
            index = (place + step) % len(decoders)
            if fits(prefiller, decoders[index]):
                pairs.append((prefiller, decoders[index]))
                num_of[index] += 1
                break
    for index in (index for index, number in num_of.items() if not number):
        for step in range(len(prefillers)):
            prefiller = prefillers[(index + step) % len(prefillers)]
            if fits(prefiller, decoders[index]):
                pairs.append((prefiller, decoders[index]))
                break
    return pairs
