"""The module reads how urgent a request says it is, and limits that to what the operator allows. A higher number goes
first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from pdproxy.errors import InvalidRequest

FIELD: Final = "priority"
HEADER: Final = "x-pdproxy-priority"
MAX_LEVELS: Final = 1024
"""The most priorities that an operator may tell apart. Each one in use costs every look at the queue a little."""

_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,18}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityLimits:
    """`PriorityLimits` say what a client may ask for. More counts as `most`, and less counts as `least`.

    Where both are equal, all requests are equally urgent. Raises `ValueError` for limits too far apart, or in the wrong
    order.
    """

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 0 <= self.most - self.least < MAX_LEVELS:
            raise ValueError(f"priorities from {self.least} to {self.most}: 1 to {MAX_LEVELS} of them are possible")

    def clamp(self, priority: int) -> int:
        return min(max(priority, self.least), self.most)


def read_priority(fields: Mapping[str, msgspec.Raw], headers: Mapping[str, str], limits: PriorityLimits) -> int:
    """Returns the body's ``priority``, else the header's, else 0, moved into `limits`. `headers` have lower-case names.

    Raises `InvalidRequest` naming the field or the header that is no integer.
    """
    if FIELD not in fields and HEADER not in headers:
        return 0 if limits.least <= 0 <= limits.most else limits.clamp(0)
    asked = _from_body(fields)
    if asked is None:
        asked = _from_header(headers)
    return limits.clamp(0 if asked is None else asked)


def _from_body(fields: Mapping[str, msgspec.Raw]) -> int | None:
    raw = fields.get(FIELD)
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=int | None)
    except msgspec.DecodeError:
        raise InvalidRequest(f"{FIELD} must be an integer", param=FIELD) from None


def _from_header(headers: Mapping[str, str]) -> int | None:
    text = headers.get(HEADER)
    if text is None:
        return None
    if _INTEGER.fullmatch(text.strip()) is None:
        raise InvalidRequest(f"the header {HEADER} must be an integer", param=HEADER)
    return int(text)
