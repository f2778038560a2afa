"""Mistakes that are planted in the program, to see whether a search finds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def planted(patches: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Puts something else in place of attributes as long as the block lasts. Each patch is an object, the name of its
    attribute, and the new value."""
    with ExitStack() as stack:
        for one in patches:
            stack.enter_context(patch.object(*one))
        yield
