"""The KV object store. It is an engine's prefix cache over its cache pages, with exact custody.

Every page is free, in exactly one object, or private to exactly one owner (a request's id). A sequence's pages are the
objects it pins and its private pages; all of it goes back by one `release(owner)`, which may be called any number of
times and at any moment.

    lookup ─► pins      allocate ─► private pages ──publish──► pins
    ◄────────────── unpin, or release for everything ──────────────

Nothing waits and nothing does I/O. A call that cannot be carried out now raises an error, with the numbers, and changes
nothing. One thread calls it, so that every call is one step to everybody.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from transfer.errors import IllegalTransition, IntegrityError, TransferError
from transfer.memory.objects import Objects

POOL_OWNER = "kv store"


class PageSource(Protocol):
    """A `PageSource` is a pool as the store needs it (`PagePool` is one). The store is the only one that takes pages
    from it."""

    num_pages: int

    @property
    def num_free(self) -> int: ...
    def allocate(self, count: int, owner: Hashable) -> list[int]: ...
    def leave(self, owner: Hashable, pages: Iterable[int]) -> list[int]: ...


class StoreFull(TransferError):
    """The pages are not there: `needed` are asked for, `free` + `idle` can be had now and `num_pages` ever."""

    def __init__(self, needed: int, free: int, idle: int, num_pages: int) -> None:
        when = "can never be had" if needed > num_pages else "cannot be had now"
        super().__init__(
            f"{needed} pages {when}: {free} are free and {idle} could be evicted, of {num_pages} that there are"
        )


@dataclass(frozen=True, slots=True)
class Hits:
    """`Hits` is what a lookup found and its owner has pinned now. `pages[i]` holds `keys[i]`."""

    keys: tuple[bytes, ...]
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """`StoreStatistics` counts pages, objects (one page each), owners, and what has happened so far.

    `num_hits` and `num_misses` count keys that were asked for, in every lookup, a repeated one too.
    """

    num_pages: int
    num_free: int
    num_private: int
    num_objects: int
    num_pinned: int
    num_idle: int
    num_owners: int
    num_hits: int
    num_misses: int
    num_evicted: int


@dataclass(slots=True)
class _Holding:
    """A `_Holding` is what one owner holds: `keys` of the objects it pins, in the order of its prompt, and its private
    pages."""

    keys: dict[bytes, None] = field(default_factory=dict)
    private: dict[int, None] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not self.keys and not self.private


class KvStore:
    """A `KvStore` holds KV objects over the pages of `pool`.

    Mutable state: `_objects` (who holds what), `_owners` (owner → what it holds; none is empty), and counters that only
    grow.
    """

    def __init__(self, pool: PageSource) -> None:
        self._pool = pool
        self._objects = Objects()
        self._owners: dict[str, _Holding] = {}
        self.on_evicted: Callable[[Sequence[bytes]], object] = lambda keys: None
        """Called with the keys of objects that are about to be evicted; must not raise."""
        self._num_hits = self._num_misses = self._num_evicted = 0

    def __repr__(self) -> str:
        count = self.statistics()
        return (
            f"<KvStore {count.num_free}/{count.num_pages} pages free, {count.num_objects} objects "
            f"({count.num_pinned} pinned, {count.num_idle} idle), {count.num_private} private>"
        )

    @property
    def num_available(self) -> int:
        """The number of pages that `allocate` can have now: the free ones, and those of the idle objects."""
        return self._pool.num_free + self._objects.num_idle

    # ── pins ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def lookup(self, owner: str, keys: Sequence[bytes]) -> Hits:
        """Pins for `owner` the first unbroken run of those `keys` that are there. Returns the run.

        A second call under the same id pins nothing twice, and returns the run as it is then. Other keys are pinned
        besides; everything stays until `unpin` or `release`.
        """
        run = self._objects.pin(owner, keys)
        if run:
            self._holding(owner).keys.update(dict.fromkeys(o.key for o in run))
        self._num_hits += len(run)
        self._num_misses += len(keys) - len(run)
        return Hits(tuple(o.key for o in run), tuple(o.page for o in run))

    def unpin(self, owner: str, keys: Sequence[bytes]) -> None:
        """Gives back the owner's pins of `keys`, which are in the order of the prompt. Idempotent.

        Its other pins and its private pages stay its own.
        """
        if owner in self._owners:
            self._let_go(owner, keys)

    def release(self, owner: str) -> None:
        """Gives back all pins and private pages of a request that is over. Idempotent.

        Nobody may still write into the owner's pages.
        """
        if (holding := self._owners.get(owner)) is None:
            return
        self._free(list(holding.private))
        holding.private.clear()
        self._let_go(owner, list(holding.keys))

    # ── private pages ───────────────────────────────────────────────────────────────────────────────────────────────

    def allocate(self, owner: str, count: int) -> list[int]:
        """Returns `count` private pages. Evicts idle objects where needed. Raises `StoreFull`, and takes nothing, where
        that is not enough."""
        self._check_room(count)
        num_evicted = max(0, count - self._pool.num_free)
        if num_evicted:
            self.on_evicted(self._objects.oldest(num_evicted))
        evicted = self._objects.evict(num_evicted)
        self._num_evicted += len(evicted)
        self._free(evicted)
        pages = self._pool.allocate(count, POOL_OWNER)
        if pages:
            self._holding(owner).private.update(dict.fromkeys(pages))
        return pages

    def publish(self, owner: str, key: bytes, page: int) -> bool:
        """Makes an object of the owner's private page, which holds `key`, complete. The owner pins it.

        Returns False, and the page stays the owner's private copy, where the key cannot be shared (empty) or is there
        already. Raises `IllegalTransition` if the page is not the owner's.
        """
        holding = self._owners.get(owner)
        if holding is None or page not in holding.private:
            raise IllegalTransition(f"page {page} is not a private page of {owner}")
        if not key or not self._objects.add(key, page, owner):
            return False
        del holding.private[page]
        holding.keys[key] = None
        return True

    # ── what is there ───────────────────────────────────────────────────────────────────────────────────────────────

    def statistics(self) -> StoreStatistics:
        return StoreStatistics(
            num_pages=self._pool.num_pages,
            num_free=self._pool.num_free,
            num_private=sum(len(holding.private) for holding in self._owners.values()),
            num_objects=len(self._objects),
            num_pinned=len(self._objects) - self._objects.num_idle,
            num_idle=self._objects.num_idle,
            num_owners=len(self._owners),
            num_hits=self._num_hits,
            num_misses=self._num_misses,
            num_evicted=self._num_evicted,
        )

    def check_integrity(self) -> None:
        """Raises `IntegrityError` unless pages add up, and owners and objects agree on who holds what."""
        self._objects.check_integrity()
        pages = [o.page for o in self._objects] + [p for h in self._owners.values() for p in h.private]
        if len(set(pages)) != len(pages) or len(pages) + self._pool.num_free != self._pool.num_pages:
            raise IntegrityError(f"{len(pages)} pages in objects or private, {len(set(pages))} different: {self!r}")
        if idle_owners := [owner for owner, holding in self._owners.items() if holding.is_empty]:
            raise IntegrityError(f"owners left behind that hold nothing: {idle_owners}")
        held = {(o.key, owner) for o in self._objects for owner in o.owners}
        told = {(key, owner) for owner, holding in self._owners.items() for key in holding.keys}
        if held != told:
            raise IntegrityError(f"owners of objects and what owners hold differ: {held ^ told}")

    # ── how ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _holding(self, owner: str) -> _Holding:
        return self._owners.setdefault(owner, _Holding())

    def _let_go(self, owner: str, keys: Sequence[bytes]) -> None:
        """Lets the owner leave these objects. The owner is forgotten if that was all it held."""
        holding = self._owners[owner]
        for key in keys:
            holding.keys.pop(key, None)
        self._objects.unpin(owner, keys)
        if holding.is_empty:
            del self._owners[owner]

    def _check_room(self, count: int) -> None:
        """Raises `StoreFull` unless `count` pages can be had."""
        if count < 0:
            raise ValueError(f"cannot take {count} pages")
        free, idle = self._pool.num_free, self._objects.num_idle
        if count > free + idle:
            raise StoreFull(count, free, idle, self._pool.num_pages)

    def _free(self, pages: list[int]) -> None:
        if pages:
            self._pool.leave(POOL_OWNER, pages)
