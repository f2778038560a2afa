"""Everything an object remembers, as plain values: a step that is refused must leave it as it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from enum import Enum
from typing import Any


def snapshot(value: Any) -> Any:
    """Nested tuples; the order of lists and mappings counts, that of sets does not. Functions are left out."""
    if isinstance(value, (str, bytes, int, float, Enum)) or value is None:
        return value
    if isinstance(value, Mapping):
        return tuple((snapshot(key), snapshot(entry)) for key, entry in value.items())
    if isinstance(value, Set):
        return frozenset(snapshot(entry) for entry in value)
    if isinstance(value, Sequence):
        return tuple(snapshot(entry) for entry in value)
    if isinstance(value, Callable):  # type: ignore[arg-type]
        return ()
    names = getattr(type(value), "__slots__", None) or vars(value)
    return type(value).__name__, tuple((name, snapshot(getattr(value, name))) for name in names)
