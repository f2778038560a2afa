"""Read locks: who reads which objects, and until when. Names and numbers only; time is passed in.

With MLA every TP rank reads the same latent KV, so one object has as many readers as there are ranks; with plain
attention each rank has objects of its own, and one reader. Whoever asks says the number: it cannot be seen from who is
connected, and the first reader's unlock must not free what the others still read.

A lock is *(object, reader, deadline)*. The locks that a reader gets by one call share a **token**, and only the token
gives them back. Every call gives fresh tokens, so a reader whose time was up and who unlocks late returns a token that
is void, and takes nothing from anybody: not even from itself, if it has locked again meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from transfer.errors import TransferError

MAX_READERS = 128
Reader = tuple[str, int]
"""The request's id and the number of the reader among the request's readers."""


class LockRefused(TransferError):
    """No lock was taken: an object is not there to be read, or the deadline is no time to come."""


@dataclass(frozen=True, slots=True)
class ReadLock:
    """One reader's locks on `keys`, taken together. `deadline` is the one last agreed when this value was made."""

    token: int
    reader: Reader
    keys: tuple[bytes, ...]
    deadline: float


def num_kv_readers(tp_size: int, is_mla: bool, num_servers: int = 1, dcp_size: int = 1) -> int:
    """How many readers one object has: 1 without MLA, else the ranks of one server divided over its context groups.

    `num_servers` is over how many cache servers the TP ranks are spread, `dcp_size` the decode context parallelism.
    Raises `ValueError`, naming the argument, for counts outside 1 … `MAX_READERS` and for ranks that do not divide
    evenly over the servers.
    """
    for name, count in (("tp_size", tp_size), ("num_servers", num_servers), ("dcp_size", dcp_size)):
        check_num_readers(name, count)
    if tp_size % num_servers:
        raise ValueError(f"tp_size {tp_size} is not divisible by num_servers {num_servers}")
    return -(-(tp_size // num_servers) // dcp_size) if is_mla else 1


def check_num_readers(name: str, count: int) -> None:
    """Raises `ValueError`, naming the argument, unless `count` is in 1 … `MAX_READERS`. Nothing is ever clamped."""
    if not 1 <= count <= MAX_READERS:
        raise ValueError(f"{name} must be from 1 to {MAX_READERS}, got {count}")


def readers_of(owner: str, num_readers: int) -> tuple[Reader, ...]:
    """The ids of `owner`'s readers. Raises `ValueError` for a count outside 1 … `MAX_READERS`."""
    check_num_readers("num_readers", num_readers)
    return tuple((owner, number) for number in range(num_readers))


class ReadLocks:
    """All locks that were taken and neither given back nor swept.

    Mutable state: `_locks` (token → lock, with its present deadline) and `_last_token`, which only grows.
    """

    def __init__(self) -> None:
        self._locks: dict[int, ReadLock] = {}
        self._last_token = 0

    def __len__(self) -> int:
        """Locks, one per object and reader."""
        return sum(len(lock.keys) for lock in self._locks.values())

    def __repr__(self) -> str:
        return f"<ReadLocks {len(self)} locks, {len(self._locks)} tokens>"

    def get(self, token: int) -> ReadLock | None:
        return self._locks.get(token)

    def all(self) -> list[ReadLock]:
        return list(self._locks.values())

    def take(
        self, readers: Sequence[Reader], keys: Iterable[bytes], *, deadline: float, now: float
    ) -> tuple[ReadLock, ...]:
        """Every reader's lock on every key, as one step; one token per reader. No keys, no tokens.

        Raises `LockRefused` for a deadline that has passed or is not finite, `ValueError` for no, too many or repeated
        readers; either before anything has changed.
        """
        check_num_readers("the number of readers", len(readers))
        if len(set(readers)) != len(readers):
            raise ValueError(f"a reader is named twice: {list(readers)}")
        _check_deadline(deadline, now)
        locked = tuple(dict.fromkeys(keys))
        return tuple(self._grant(reader, locked, deadline) for reader in readers) if locked else ()

    def give_back(self, token: int) -> ReadLock | None:
        """The lock that ends by this call; None if the token is void (given back, swept, never given)."""
        return self._locks.pop(token, None)

    def renew(self, tokens: Iterable[int], *, deadline: float, now: float) -> list[int]:
        """Move the deadline of live tokens, to earlier or later. Returns the lost ones: what they covered may be gone.

        A lock past its deadline is lost even if nobody has swept it yet. Raises `LockRefused` as `take` does.
        """
        _check_deadline(deadline, now)
        lost = []
        for token in tokens:
            lock = self._locks.get(token)
            if lock is None or lock.deadline <= now:
                lost.append(token)
            else:
                self._locks[token] = replace(lock, deadline=deadline)
        return lost

    def sweep(self, now: float) -> list[ReadLock]:
        """Drop the locks whose deadline has come, and return them."""
        expired = [lock for lock in self._locks.values() if lock.deadline <= now]
        for lock in expired:
            del self._locks[lock.token]
        return expired

    def next_deadline(self) -> float | None:
        """When `sweep` has something to do next; None if no lock is held."""
        return min((lock.deadline for lock in self._locks.values()), default=None)

    def _grant(self, reader: Reader, keys: tuple[bytes, ...], deadline: float) -> ReadLock:
        self._last_token += 1
        lock = ReadLock(self._last_token, reader, keys, deadline)
        self._locks[lock.token] = lock
        return lock


def _check_deadline(deadline: float, now: float) -> None:
    if not now < deadline < math.inf:
        raise LockRefused(f"a read lock must end at a time to come: the deadline is {deadline} and now is {now}")
