"""The module finds the numbers of a JSON body that no engine can read: ``1e999``, or an integer of four hundred
digits.

JSON allows such numbers. Python reads them as infinity, or as an integer of any size, so that they get as far as a
tensor before something breaks. So a body is searched for what could be such a number, which costs about 2 ns per byte.
Only where something is found, the fields are read one by one, to name the one at fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from pdproxy.errors import InvalidRequest

MAX_NAME_CHARS: Final = 64
"""The most characters of a field's name that an error message shows, because the name is the client's own text."""

_SHAPES: Final = bytes.maketrans(b"123456789E", b"000000000e")
"""A table that makes all digits equal, so that a long number can be searched for as plain bytes."""
_LONG_INTEGER: Final = b"0" * 19
"""The shape of the shortest integer outside of 64 bits, which has 19 digits. A number with a two-digit exponent
overflows a double only with more than 200 digits before the exponent.
"""
_COMMON: Final = b"000"
_LONG_EXPONENT: Final = b"0e000"
_LONG_SIGNED_EXPONENT: Final = b"0e+000"


def may_overflow(json: bytes) -> bool:
    """Tells whether something in `json` looks like a number out of range. False is certain; True may come from a
    text.
    """
    shapes = json.translate(_SHAPES)
    # All that is looked for has `_COMMON` in it, so that one search often is enough. `find` is faster than `in`, which
    # first asks whether it looks for a number.
    if shapes.find(_COMMON) < 0:
        return False
    return (
        shapes.find(_LONG_INTEGER) >= 0 or shapes.find(_LONG_EXPONENT) >= 0 or shapes.find(_LONG_SIGNED_EXPONENT) >= 0
    )


def has_long_integer(json: bytes) -> bool:
    """Tells whether 19 or more digits follow each other somewhere in `json`."""
    return json.translate(_SHAPES).find(_LONG_INTEGER) >= 0


def check_numbers(fields: Mapping[str, msgspec.Raw]) -> None:
    """Reads every field. Raises `InvalidRequest` naming the first field with a number out of range, at any depth.

    A number is out of range if it is infinite as a double, or if it is an integer that does not fit into 64 bits.
    """
    for name, raw in fields.items():
        if not _is_in_range(raw):
            shown = name[:MAX_NAME_CHARS]
            raise InvalidRequest(f"{shown}: a number is out of range", param=shown)


def _is_in_range(raw: msgspec.Raw) -> bool:
    try:
        value = msgspec.json.decode(raw)  # refuses what is infinite as a double
        msgspec.msgpack.encode(value)  # refuses integers of more than 64 bits
    except (msgspec.ValidationError, OverflowError):
        return False
    except (msgspec.DecodeError, RecursionError):
        return True  # something else is wrong with it, for its reader to say
    return True
