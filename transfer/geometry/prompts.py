"""The arithmetic on a prompt's length: it counts the tokens and blocks that need not travel."""

from __future__ import annotations

from transfer.errors import GeometryError
from transfer.geometry.checks import not_negative, positive
from transfer.geometry.groups import KINDS


def num_skipped_tokens(kind: str, num_tokens: int, window: int | None = None) -> int:
    """Returns how many tokens at the front of a prompt of `num_tokens` have KV that nobody will read in layers of this
    kind.

    A sliding window of W needs the last W − 1 tokens, since the next token is in its own window. A chunked layer needs
    the tokens of the running chunk, a state only its last position.
    """
    not_negative("num_tokens", num_tokens)
    if kind in ("full", "mla"):
        return 0
    if kind == "linear":
        return max(0, num_tokens - 1)
    if kind not in KINDS:
        raise GeometryError(f"unknown kind of layer {kind!r}; one of {', '.join(KINDS)} is expected")
    if window is None:
        raise GeometryError(f"{kind} layers need a window")
    positive("window", window)
    return max(0, num_tokens - window + 1) if kind == "sliding" else num_tokens // window * window


def block_counts(kind: str, num_tokens: int, window: int | None, block_size: int) -> tuple[int, int]:
    """Returns the `(null, real)` blocks of a prompt. Blocks stay positional, and the null ones at the front hold no
    memory."""
    null = num_skipped_tokens(kind, num_tokens, window) // positive("block_size", block_size)
    return null, -(-num_tokens // block_size) - null
