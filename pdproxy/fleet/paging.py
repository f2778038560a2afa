"""What a prompt takes of a decoder's PD buffer, as that decoder counts: the one place where the proxy turns tokens into
pages.

Where a decoder names its page groups, a page is one chunk of one group, and of windowed layers only the tail counts.
Where it names none, a page is one chunk of all layers.
"""

from __future__ import annotations

from transfer.errors import GeometryError
from transfer.geometry import KINDS, PageGroup, max_prompt_tokens, most_pages, num_pages
from transfer.wire import BufferFacts

_ALIKE = (PageGroup("full", 0),)
_WINDOWED_KINDS = ("sliding", "chunked")


def pages_needed(facts: BufferFacts, num_tokens: int, *, is_exact: bool = True) -> int:
    """Pages of each rank for a prompt of `num_tokens` tokens, at least one.

    Where that is only a bound, they are enough for every shorter prompt too: the tail of one may take more pages than
    that of a longer one.
    """
    count = num_pages if is_exact else most_pages
    return max(1, count(_groups(facts), num_tokens, facts.chunk_size))


def pages_leased(facts: BufferFacts, num_tokens: int, *, is_exact: bool = True) -> int:
    """`pages_needed`, less where the decoder lets a larger prompt pass through its buffer: then all that there are, so
    that it is alone there."""
    needed = pages_needed(facts, num_tokens, is_exact=is_exact)
    return min(needed, facts.num_pages) if facts.windowed else needed


def longest_prompt(facts: BufferFacts) -> int | None:
    """Tokens of a prompt that fits as a whole, and every shorter one with it; None where every prompt does."""
    return max_prompt_tokens(_groups(facts), facts.num_pages, facts.chunk_size)


def check_groups(facts: BufferFacts) -> None:
    """Raises `GeometryError` for groups that cannot be counted with."""
    if facts.chunk_size < 1:
        raise GeometryError(f"a page of {facts.chunk_size} tokens is none")
    for group in facts.groups:
        has_window = group.window is not None and group.window > 0
        if group.kind not in KINDS or has_window != (group.kind in _WINDOWED_KINDS) or group.state_pages < 0:
            raise GeometryError(f"there can be no {group!r}")


def _groups(facts: BufferFacts) -> tuple[PageGroup, ...]:
    named = (PageGroup(group.kind, group.num_layers, group.window, group.state_pages) for group in facts.groups)
    return tuple(named) or _ALIKE
