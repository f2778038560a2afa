"""KV objects: one chunk of one layer group under a key, in one page. Who holds which, and which may be evicted.

    (absent) ──add──► WRITING ──commit──► READY ──evict, or the last holder of a temporary one leaves──► GONE
                         └──the writer leaves──► GONE

An object is held by a set of holders, which are requests' ids. There is no counter: a holder is in the set or it is
not, so nobody can leave twice and nothing can fall below zero. While the set is not empty the object is neither evicted
nor freed. A READY object that nobody holds is *idle*; a temporary one never is, it goes with its last holder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from transfer.errors import IllegalTransition, IntegrityError


class ObjectState(Enum):
    WRITING = "writing"
    READY = "ready"
    GONE = "gone"


_ALLOWED: dict[ObjectState, frozenset[ObjectState]] = {
    ObjectState.WRITING: frozenset({ObjectState.READY, ObjectState.GONE}),
    ObjectState.READY: frozenset({ObjectState.GONE}),
    ObjectState.GONE: frozenset(),
}


@dataclass(slots=True, eq=False)
class KvObject:
    """While WRITING the only holder is the writer; `page` is its own until it is GONE."""

    key: bytes
    page: int
    is_temporary: bool = False
    state: ObjectState = ObjectState.WRITING
    holders: set[str] = field(default_factory=set)

    @property
    def is_ready(self) -> bool:
        return self.state is ObjectState.READY

    @property
    def is_pinned(self) -> bool:
        return self.is_ready and bool(self.holders)

    def move_to(self, state: ObjectState) -> None:
        if state not in _ALLOWED[self.state]:
            raise IllegalTransition(f"object {self.key.hex()}: {self.state.name} → {state.name}")
        self.state = state


class Objects:
    """All objects of one store.

    Mutable state: `_objects` (key → object, none of them GONE) and `_idle`, the keys of those that nobody holds, in the
    order in which their last holder left. Pages are only named here; the caller allocates and frees them.
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

    def get(self, key: bytes) -> KvObject | None:
        return self._objects.get(key)

    def is_idle(self, key: bytes) -> bool:
        return key in self._idle

    def ready_run(self, keys: Iterable[bytes]) -> list[KvObject]:
        """The objects of the first unbroken run of READY keys."""
        run = []
        for key in keys:
            found = self._objects.get(key)
            if found is None or not found.is_ready:
                break
            run.append(found)
        return run

    def add(self, key: bytes, page: int, writer: str, *, is_temporary: bool = False) -> KvObject:
        """A WRITING object, held by its writer. Raises `IllegalTransition` if the key is there in any state."""
        if (known := self._objects.get(key)) is not None:
            raise IllegalTransition(f"object {key.hex()} is {known.state.name} already")
        added = KvObject(key, page, is_temporary, holders={writer})
        self._objects[key] = added
        return added

    def commit(self, key: bytes, writer: str) -> None:
        """Its bytes are there: READY, pinned by the writer. Raises `IllegalTransition` unless `writer` writes it."""
        known = self._objects.get(key)
        if known is None or writer not in known.holders:
            raise IllegalTransition(f"object {key.hex()} is not being written by {writer}")
        known.move_to(ObjectState.READY)

    def hold(self, holder: str, objects: Iterable[KvObject]) -> None:
        """`holder` joins those that hold them; once in, it stays in, once. Raises `IllegalTransition` unless READY."""
        joined = list(objects)
        wrong = [o.key.hex() for o in joined if not o.is_ready]
        if wrong:
            raise IllegalTransition(f"only READY objects can be pinned, not {wrong}")
        for held in joined:
            held.holders.add(holder)
            self._idle.pop(held.key, None)

    def leave(self, holder: str, keys: Iterable[bytes]) -> list[int]:
        """`holder` holds these no more; where it does not, nothing happens. Returns the pages of objects now GONE.

        `keys` are in the order of the prompt: the last becomes idle first, so that a tail is evicted before its head.
        """
        freed = []
        for key in reversed(list(keys)):
            left = self._objects.get(key)
            if left is None or holder not in left.holders:
                continue
            left.holders.remove(holder)
            if left.holders:
                continue
            if left.is_ready and not left.is_temporary:
                self._idle[key] = None
            else:
                freed.append(self._drop(left))
        return freed

    def evict(self, count: int) -> list[int]:
        """The pages of the `count` objects that have been idle longest, which are GONE now.

        Raises `ValueError`, and changes nothing, if fewer are idle.
        """
        if not 0 <= count <= self.num_idle:
            raise ValueError(f"cannot evict {count} objects, {self.num_idle} are idle")
        pages = []
        for key in list(islice(self._idle, count)):
            del self._idle[key]
            pages.append(self._drop(self._objects[key]))
        return pages

    def check_integrity(self) -> None:
        """Raises `IntegrityError` unless idle is what nobody holds, and WRITING what its writer alone holds."""
        unheld = {o.key for o in self if not o.holders}
        if unheld != self._idle.keys() or any(not o.is_ready or o.is_temporary for o in self if not o.holders):
            raise IntegrityError(f"idle objects and objects without holder differ: {unheld ^ self._idle.keys()}")
        for key, known in self._objects.items():
            if key != known.key or known.state is ObjectState.GONE:
                raise IntegrityError(f"{known!r} is kept under {key.hex()}")
            if not known.is_ready and len(known.holders) != 1:
                raise IntegrityError(f"{known!r} is held by others than its writer")

    def _drop(self, known: KvObject) -> int:
        known.move_to(ObjectState.GONE)
        del self._objects[known.key]
        return known.page
