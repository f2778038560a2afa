"""KV objects: each is one chunk of one layer group under a key, in one page. This module knows who holds which, and
which may be evicted.

An object is there from the moment in which its bytes are complete until it is evicted. It is held by a set of owners,
which are requests' ids. There is no counter: an owner is in the set or it is not. So nobody can leave twice and nothing
can fall below zero. While the set is not empty the object is not evicted. One that nobody holds is *idle*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from transfer.errors import IntegrityError


@dataclass(slots=True, eq=False)
class KvObject:
    """A `KvObject` is a complete chunk. `page` is its own until it is evicted."""

    key: bytes
    page: int
    owners: set[str]


class Objects:
    """`Objects` holds all objects of one store.

    Mutable state: `_objects` (key → object) and `_idle`, the keys of those that nobody holds, in the order in which
    their last owner left. Pages are only named here; the caller allocates and frees them.
    """

    def __init__(self) -> None:
        self._objects: dict[bytes, KvObject] = {}
        self._idle: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._objects)

    def __iter__(self) -> Iterator[KvObject]:
        return iter(self._objects.values())

    def __repr__(self) -> str:
        return f"<Objects {len(self)}, {self.num_idle} idle>"

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def add(self, key: bytes, page: int, owner: str) -> bool:
        """Adds an object that `owner` holds. Returns False, and changes nothing, if the key is there already."""
        if key in self._objects:
            return False
        self._objects[key] = KvObject(key, page, {owner})
        return True

    def pin(self, owner: str, keys: Iterable[bytes]) -> list[KvObject]:
        """Adds `owner` to those who hold the objects of the first unbroken run of `keys` that are there. Returns this
        run.

        An owner that holds an object already holds it once, as before.
        """
        run = []
        for key in keys:
            if (found := self._objects.get(key)) is None:
                break
            found.owners.add(owner)
            self._idle.pop(key, None)
            run.append(found)
        return run

    def unpin(self, owner: str, keys: Iterable[bytes]) -> None:
        """Notes that `owner` holds these objects no more. Where it does not hold one, nothing happens.

        `keys` are in the order of the prompt. The last becomes idle first, so that a tail is evicted before its head.
        """
        for key in reversed(list(keys)):
            left = self._objects.get(key)
            if left is None or owner not in left.owners:
                continue
            left.owners.remove(owner)
            if not left.owners:
                self._idle[key] = None

    def oldest(self, count: int) -> list[bytes]:
        """Returns the keys of the `count` objects that have been idle longest, which `evict` would remove."""
        return list(islice(self._idle, count))

    def evict(self, count: int) -> list[int]:
        """Removes the `count` objects that have been idle longest. Returns their pages.

        Raises `ValueError`, and changes nothing, if fewer are idle.
        """
        if not 0 <= count <= self.num_idle:
            raise ValueError(f"cannot evict {count} objects, {self.num_idle} are idle")
        pages = []
        for key in self.oldest(count):
            del self._idle[key]
            pages.append(self._objects.pop(key).page)
        return pages

    def check_integrity(self) -> None:
        """Raises `IntegrityError` unless objects are kept under their keys, and exactly those are idle that nobody
        holds."""
        unheld = {o.key for o in self if not o.owners}
        if unheld != self._idle.keys():
            raise IntegrityError(f"idle objects and objects without owner differ: {unheld ^ self._idle.keys()}")
        for key, known in self._objects.items():
            if key != known.key:
                raise IntegrityError(f"{known!r} is kept under {key.hex()}")
