"""The places of heads: which rank holds which, and which prefiller rank writes them to which decoder rank.

Tensor parallelism divides a layer's KV heads over the ranks in order; where there are fewer heads than ranks, each head
is repeated on neighbouring ranks (vLLM and SGLang do the same). Multi-head latent attention has one latent that is
whole on every rank, which is the same as one head. When both sides have different numbers of ranks, a decoder rank gets
each of its heads from exactly one of the prefiller ranks that hold it, spread evenly.
"""

from __future__ import annotations

from dataclasses import dataclass

from transfer.errors import GeometryError


@dataclass(frozen=True, slots=True)
class Rank:
    """A `Rank` is rank `index` of `size`."""

    size: int = 1
    index: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.size:
            raise GeometryError(f"there is no rank {self.index} of {self.size}")


def heads_of(num_heads: int, rank: Rank) -> range:
    """Returns the heads that `rank` holds. Raises `GeometryError` where they can be neither divided nor repeated."""
    _check_even(num_heads, rank.size)
    if num_heads >= rank.size:
        share = num_heads // rank.size
        return range(rank.index * share, (rank.index + 1) * share)
    head = rank.index * num_heads // rank.size
    return range(head, head + 1)


def holders_of(head: int, num_heads: int, size: int) -> range:
    """Returns the ranks, of `size`, that hold `head`. Raises as `heads_of` does."""
    _check_even(num_heads, size)
    if num_heads >= size:
        rank = head * size // num_heads
        return range(rank, rank + 1)
    repeats = size // num_heads
    return range(head * repeats, (head + 1) * repeats)


def writer_of(head: int, num_heads: int, writers: int, reader: Rank) -> int:
    """Returns the one rank, of `writers`, that writes `head` to `reader`, which holds it. Raises as `heads_of` does."""
    candidates = holders_of(head, num_heads, writers)
    readers = holders_of(head, num_heads, reader.size)
    return candidates[(reader.index - readers.start) * len(candidates) // len(readers)]


def heads_between(num_heads: int, writer: Rank, reader: Rank) -> range:
    """Returns the heads that `writer` writes to `reader`: a run of neighbours, possibly empty."""
    heads = [h for h in heads_of(num_heads, reader) if writer_of(h, num_heads, writer.size, reader) == writer.index]
    return range(heads[0], heads[-1] + 1) if heads else range(0)


def _check_even(num_heads: int, size: int) -> None:
    if num_heads < 1 or (num_heads % size and size % num_heads):
        raise GeometryError(f"{num_heads} KV heads can be neither divided over nor repeated on {size} ranks")
