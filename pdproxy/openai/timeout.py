"""The module reads how long a client gives its request: the body's ``timeout``, or the header ``x-request-timeout``.

The body's is in seconds. The proxy keeps both to itself. An engine never sees them, because the time began to count
here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

import msgspec

from pdproxy.errors import InvalidRequest

FIELD: Final = "timeout"
HEADER: Final = "x-request-timeout"

_DURATION: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s)?")


def read_timeout(fields: Mapping[str, msgspec.Raw], headers: Mapping[str, str]) -> float | None:
    """Returns the client's limit in seconds: the shorter one where both are given, None where neither is given.

    `headers` have lower-case names. Raises `InvalidRequest` naming the field or the header that is no time above 0.
    """
    if FIELD not in fields and HEADER not in headers:
        return None
    given = [seconds for seconds in (_from_body(fields), _from_header(headers)) if seconds is not None]
    return min(given, default=None)


def _from_body(fields: Mapping[str, msgspec.Raw]) -> float | None:
    raw = fields.get(FIELD)
    if raw is None:
        return None
    try:
        seconds = msgspec.json.decode(raw, type=float | None)
    except msgspec.DecodeError:
        seconds = math.nan
    if seconds is not None and not 0.0 < seconds < math.inf:
        raise InvalidRequest(f"{FIELD} must be a number of seconds above 0", param=FIELD)
    return seconds


def _from_header(headers: Mapping[str, str]) -> float | None:
    """Reads ``30``, ``30s`` or ``250ms``. Returns seconds, or None where the header is missing."""
    text = headers.get(HEADER)
    if text is None:
        return None
    found = _DURATION.fullmatch(text.strip())
    seconds = 0.0 if found is None else float(found[1]) / (1000.0 if found[2] == "ms" else 1.0)
    if seconds <= 0.0:
        raise InvalidRequest(f"the header {HEADER} must be a time above 0, as 30, 30s or 250ms", param=HEADER)
    return seconds
