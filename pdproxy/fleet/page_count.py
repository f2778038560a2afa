"""Tokens become pages only in this module of the proxy: it counts what a prompt takes of its page owner's memory.

It counts as the page owner counts. Where the page owner names its page groups, a page is one chunk of one group, and of
windowed layers only the tail counts. Where it names none, a page is one chunk of all layers. Where its pages have no
size, a prompt is a page.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from pdproxy.engines.adapter import Adapter
from pdproxy.engines.info import EngineInfo
from transfer.errors import GeometryError
from transfer.geometry import KINDS, PageGroup, max_prompt_tokens, most_pages, num_pages

_ALIKE: Final = (PageGroup("full", 0),)
_WINDOWED_KINDS: Final = ("sliding", "chunked")


MAX_SHAPES: Final = 1024
"""The number of shapes that are remembered, however often engines change their sizes."""


class Shape:
    """Shape holds what decides, at a page owner, how many pages a prompt takes and which way it goes. Owners that are
    alike share one object: `facts` and `adapter` are those of one of them."""

    __slots__ = ("adapter", "facts")

    def __init__(self, facts: EngineInfo, adapter: Adapter) -> None:
        self.facts = facts
        self.adapter = adapter


class Shapes:
    """Shapes keeps the shapes of one fleet.

    Mutable state: those that some instance has, or had, by what makes them alike.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Shape] = {}

    def of(self, facts: EngineInfo, adapter: Adapter) -> Shape:
        """Returns the shape of an instance with these facts and this adapter; makes it where there is none yet."""
        size = facts.num_pages, facts.chunk_size, facts.groups, facts.windowed, facts.max_model_len, facts.num_unsent
        key = (*size, adapter.name, adapter.traits)
        shape = self._known.get(key)
        if shape is None:
            if len(self._known) >= MAX_SHAPES:
                self._known.clear()  # equal shapes get two objects once, which only costs time
            shape = self._known[key] = Shape(facts, adapter)
        return shape


def pages_needed(facts: EngineInfo, num_tokens: int, *, is_exact: bool = True, num_prompts: int = 1) -> int:
    """Returns how many pages of each rank the prompts of `num_tokens` tokens together need, at least one.

    Where `num_tokens` is only a bound (`is_exact` is false), they are enough for every shorter prompt too: the tail of
    a shorter prompt may take more pages than that of a longer one.
    """
    chunk_size = facts.chunk_size
    if chunk_size is None:
        return num_prompts
    if facts.num_unsent:  # with windows, a prompt without them may take more pages
        num_tokens = max(1, num_tokens - facts.num_unsent)
    if not facts.groups:
        return -(-num_tokens // chunk_size) or 1
    count = num_pages if is_exact else most_pages
    return count(facts.groups, num_tokens, chunk_size) or 1


def pages_leased(facts: EngineInfo, num_tokens: int, *, is_exact: bool = True, num_prompts: int = 1) -> int:
    """Returns `pages_needed`, or less where the page owner lets a larger prompt pass through its memory. Then it
    returns all the pages that there are, so that the prompt is alone there."""
    needed = pages_needed(facts, num_tokens, is_exact=is_exact, num_prompts=num_prompts)
    return min(needed, facts.num_pages) if facts.windowed else needed


def longest_prompt(facts: EngineInfo) -> int | None:
    """Returns the length in tokens of the longest prompt that fits as a whole, as does every shorter one; None where
    every prompt fits."""
    if facts.chunk_size is None:
        return None
    return max_prompt_tokens(_groups(facts), facts.num_pages, facts.chunk_size)


def check_groups(facts: EngineInfo) -> None:
    """Raises `GeometryError` for groups that cannot be counted with."""
    if facts.chunk_size is not None and facts.chunk_size < 1:
        raise GeometryError(f"a page of {facts.chunk_size} tokens is none")
    for group in facts.groups:
        has_window = group.window is not None and group.window > 0
        if group.kind not in KINDS or has_window != (group.kind in _WINDOWED_KINDS) or group.state_pages < 0:
            raise GeometryError(f"there can be no {group!r}")


def _groups(facts: EngineInfo) -> tuple[PageGroup, ...]:
    return facts.groups or _ALIKE
