"""The grammar of epochs: how the sender of an engine is named after the engine, and what the name tells a receiver.

An engine makes one epoch at each start, and each of its senders has an epoch that begins with it:

    ============  =====================================================  ===================================
    epoch         whose it is                                            the names of its engine
    ============  =====================================================  ===================================
    ``E``         the engine's, and the sender's of its rank 0           ``E``
    ``E-s``       the sender's where the engine receives, too: its       ``E-s``, and ``E`` by the engine's
                  receiver has ``E``, and two agents need two names      own word (`sender_epoch`)
    ``E.i``       the sender's of rank i, from 1 on                      ``E.i``, ``E``
    any with      the same sender's after n of its processes have died   those of the epoch without ``~n``
    ``~n``        (there is no ``~0``)
    ============  =====================================================  ===================================

A peer may send any text as its epoch. A text that does not follow this grammar is an engine of its own.
"""

from __future__ import annotations

_LIFE_MARK = "~"
_RANK_MARK = "."
_SENDER_MARK = "-s"


def sender_epoch(epoch: str) -> str:
    """Returns the epoch of the sender in an engine that receives as well, and whose own epoch this is."""
    return f"{epoch}{_SENDER_MARK}"


def epoch_of_rank(epoch: str, index: int) -> str:
    """Returns the epoch of the sender on rank `index`, which is not 0, of the engine `epoch`."""
    return f"{epoch}{_RANK_MARK}{index}"


def epoch_of_life(epoch: str, life: int) -> str:
    """Returns the epoch of the sender that was started for the engine `epoch` after `life` others of it have died.

    The process that starts it knows that they are dead. So a receiver that meets a later one knows it, too
    (`is_successor`).
    """
    return f"{epoch}{_LIFE_MARK}{life}" if life else epoch


def engine_part(epoch: str) -> str:
    """Returns the epoch without the number of lives."""
    return epoch.partition(_LIFE_MARK)[0]


def engine_of(epoch: str) -> str:
    """Returns the epoch of the engine of which ``EPOCH.1`` is a sender; empty where the engine has one rank."""
    return engine_part(epoch).rpartition(_RANK_MARK)[0]


def engines_of(epoch: str) -> list[str]:
    """Returns the names under which a launcher may know the engine of this sender. None of them is empty: that would
    stand for all engines with one rank."""
    return [name for name in (engine_part(epoch), engine_of(epoch)) if name]


def is_successor(later: str, earlier: str) -> bool:
    """Returns whether a process that says it is `later` was started after the death of `earlier`."""
    if later == earlier or engine_part(later) != engine_part(earlier):
        return False
    return _life(later) > _life(earlier)


def _life(epoch: str) -> int:
    """Returns the number of the life. It is 0 for the first one, and for an epoch that no launcher has numbered."""
    digits = epoch.partition(_LIFE_MARK)[2]
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else 0
