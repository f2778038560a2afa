"""Checks and joins of spans, which the agents do before any byte moves: spans that leave a region are refused, and
spans that touch are joined.

NIXL answers an address outside the registered memory by killing the whole connection, so nothing is posted unchecked.
It uses whole-array operations throughout: a write has anything from 1 span (the latency of a small push) to tens of
thousands.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transfer.agents.base import Region, Spans
from transfer.errors import TransferError


def as_spans(rows: Sequence[tuple[int, int, int]]) -> Spans:
    """Returns ``[(local offset, remote offset, bytes), …]`` as an array."""
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def total_bytes(spans: Spans) -> int:
    return int(spans[:, 2].sum())


def check_spans(spans: Spans, local: Region, remote: Region) -> None:
    """Raises `TransferError`, which names the first wrong span, unless every span is one byte or more and inside both
    regions."""
    if not isinstance(spans, np.ndarray) or spans.ndim != 2 or spans.shape[1] != 3 or spans.dtype != np.int64:
        raise TransferError(f"spans are an int64 array of shape [n, 3], got {_shape(spans)}")
    if len(spans) == 1:  # a third of the time that the array operations need for it
        ours, theirs, size = spans[0].tolist()
        is_inside = size > 0 and 0 <= ours <= local.num_bytes - size and 0 <= theirs <= remote.num_bytes - size
        outside = () if is_inside else (0,)
    else:
        outside = tuple(np.flatnonzero(_is_outside(spans, local.num_bytes, remote.num_bytes))[:1])
    for index in outside:
        ours, theirs, size = spans[index].tolist()
        raise TransferError(
            f"span {index} ({size} bytes from {ours} to {theirs}) is outside the regions "
            f"of {local.num_bytes} bytes here and {remote.num_bytes} at the peer"
        )


def merge(spans: Spans) -> Spans:
    """Joins every span to the one before it where they touch on both sides. The order stays; `spans` is not changed."""
    if len(spans) < 2:
        return spans
    ends = spans[:-1, :2] + spans[:-1, 2:]
    is_first = np.ones(len(spans), dtype=np.bool_)
    np.logical_or(ends[:, 0] != spans[1:, 0], ends[:, 1] != spans[1:, 1], out=is_first[1:])
    first = np.flatnonzero(is_first)
    if len(first) == len(spans):
        return spans
    merged = spans[first]
    merged[:, 2] = np.add.reduceat(spans[:, 2], first)
    return merged


def pieces(spans: Spans, num_bytes: int) -> list[Spans]:
    """Cuts the spans into parts of at most `num_bytes` bytes, in order. A span that is longer is cut itself."""
    if total_bytes(spans) <= num_bytes:
        return [spans]
    spans = _cut(spans, num_bytes)
    parts, first, ends = [], 0, np.cumsum(spans[:, 2])
    while first < len(spans):
        before = int(ends[first - 1]) if first else 0
        end = int(np.searchsorted(ends, before + num_bytes, side="right"))
        parts.append(spans[first:end])
        first = end
    return parts


def _cut(spans: Spans, num_bytes: int) -> Spans:
    counts = -(-spans[:, 2] // num_bytes)
    if (counts == 1).all():
        return spans
    rows = np.repeat(spans, counts, axis=0)
    offsets = (np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)) * num_bytes
    rows[:, :2] += offsets[:, None]
    rows[:, 2] = np.minimum(num_bytes, rows[:, 2] - offsets)
    return rows


def _is_outside(spans: Spans, local_bytes: int, remote_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Returns one bool per span. Compares offsets with what is left of the region: their sum with a size could
    overflow."""
    ours, theirs, sizes = spans[:, 0], spans[:, 1], spans[:, 2]
    is_outside: np.ndarray[tuple[int], np.dtype[np.bool_]] = (
        (sizes < 1) | (ours < 0) | (theirs < 0) | (ours > local_bytes - sizes) | (theirs > remote_bytes - sizes)
    )
    return is_outside


def _shape(spans: object) -> str:
    if isinstance(spans, np.ndarray):
        return f"{spans.dtype} of shape {list(spans.shape)}"
    return type(spans).__name__
