"""The two range checks that every number from outside passes, and the short form of an error."""

from __future__ import annotations

from transfer.errors import GeometryError


def positive(name: str, value: int) -> int:
    """Returns `value`. Raises `GeometryError` where it is below 1."""
    if value < 1:
        raise GeometryError(f"{name} must be at least 1, not {value}")
    return value


def not_negative(name: str, value: int) -> int:
    """Returns `value`. Raises `GeometryError` where it is below 0."""
    if value < 0:
        raise GeometryError(f"{name} must not be negative, but is {value}")
    return value


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, which is short enough for one line of ours."""
    return next(iter(str(error).splitlines()), type(error).__name__)
