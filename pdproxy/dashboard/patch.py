"""A patch is the difference between two pictures, as a JSON merge patch (RFC 7396): it makes the second of the
first."""

from __future__ import annotations

from typing import Any


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Returns what to merge into `before` to get `after`; empty where they are equal. None stands for what is gone, so
    that no member of `after` may be None itself. Lists are replaced as a whole, whatever is in them."""
    patch: dict[str, Any] = {}
    for name, value in after.items():
        known = before.get(name)
        if value == known:
            continue
        is_deeper = isinstance(known, dict) and isinstance(value, dict)
        patch[name] = difference(before[name], value) if is_deeper else value
    return patch | dict.fromkeys(before.keys() - after.keys())
