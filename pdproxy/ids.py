"""Ids that nobody can guess: of requests and of attempts.

One from `uuid4` costs as much as everything else that is noted of a request, nearly all of it for the system call. So
they are drawn many at a time.
"""

from __future__ import annotations

import os

_ID_BYTES = 16
_NUM_DRAWN = 128

# State: ids drawn from the operating system and not given out. A forked process would give out its parent's.
_drawn: list[str] = []
os.register_at_fork(after_in_child=_drawn.clear)


_SHOWN_DIGITS = 16


def shown(secret: str) -> str:
    """The first half of a `fresh_id`, which may be told to anybody: 64 bits of it stay unknown."""
    return secret[:_SHOWN_DIGITS]


def fresh_id() -> str:
    """32 hex digits, all of them random (128 bits)."""
    while True:
        try:
            return _drawn.pop()
        except IndexError:
            _drawn.extend(os.urandom(_ID_BYTES * _NUM_DRAWN).hex(" ", _ID_BYTES).split())
