"""The module makes ids of requests and of attempts, which nobody can guess.

One id from `uuid4` costs as much as everything else that the proxy notes about a request. Nearly all of that is the
system call. So this module draws many ids at a time.
"""

from __future__ import annotations

import os
from typing import Final

_ID_BYTES: Final = 16
_NUM_DRAWN: Final = 128

# State: ids which were drawn from the operating system and not given out. A forked process must not give out the ids
# of its parent, so it starts with none.
_drawn: Final[list[str]] = []
os.register_at_fork(after_in_child=_drawn.clear)


_SHOWN_DIGITS: Final = 16


def shown(secret: str) -> str:
    """Returns the first half of a `fresh_id`. Anybody may see it: the other 64 bits stay unknown."""
    return secret[:_SHOWN_DIGITS]


def fresh_id() -> str:
    """Returns 32 hex digits, all of them random (128 bits)."""
    while True:
        try:
            return _drawn.pop()
        except IndexError:
            _drawn.extend(os.urandom(_ID_BYTES * _NUM_DRAWN).hex(" ", _ID_BYTES).split())
