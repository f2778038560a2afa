"""Pages that are pinned in the KV cache for prompts which are still being sent, so that their sequences find them when
they begin.

A sequence gets all of its pages at once, and those that wait behind it get none before it does. So a pin must never be
what the head of the queue waits for, since the one that the pin is for may be waiting behind that head. That is why all
pins together hold no more pages than the longest sequence leaves: with more, a head that is blocked while nothing runs
would stay blocked for ever.

    attempt:  pin ──► kept ──adopt──► kept for a sequence that waits ──hand_over──► the sequence's own
                        └──unpin──► given back
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from transfer.errors import IntegrityError
from transfer.memory.store import KvStore


class Pins:
    """`Pins` are pages of `store` that are pinned for attempts without a running sequence, `max_pages` different ones
    at most.

    Mutable state: `_owner_of` (attempt → the name under which its pages are held, a new one for each pin, because an
    attempt's name may come again while a sequence still has the first one's pages), `_pages_of` (that name → its pages,
    in the order of its prompt), `_num_owners` (page → how many have pinned it). The pins themselves are the store's.
    """

    def __init__(self, store: KvStore, max_pages: int) -> None:
        self._store = store
        self._max_pages = max_pages
        self._serial = itertools.count()
        self._owner_of: dict[str, str] = {}
        self._pages_of: dict[str, tuple[int, ...]] = {}
        self._num_owners: Counter[int] = Counter()

    def __repr__(self) -> str:
        return f"<Pins {len(self._num_owners)}/{self._max_pages} pages for {len(self._pages_of)} owners>"

    @property
    def pages(self) -> set[int]:
        return set(self._num_owners)

    def pin(self, attempt: str, keys: Sequence[bytes]) -> int:
        """Pins the first unbroken run of `keys`, as far as there is room. Returns its length.

        Raises `IntegrityError`, and changes nothing, for an attempt that has pins.
        """
        if attempt in self._owner_of:
            raise IntegrityError(f"attempt {attempt} has pinned pages already")
        owner = f"pins {next(self._serial)}"
        hits = self._store.lookup(owner, keys)
        count = self._num_with_room(hits.pages)
        self._store.unpin(owner, hits.keys[count:])
        if count:
            self._owner_of[attempt] = owner
            self._pages_of[owner] = hits.pages[:count]
            self._num_owners.update(hits.pages[:count])
        return count

    def unpin(self, attempt: str) -> None:
        """Gives back the pages of an attempt that nobody will come for. Idempotent, and without effect once they were
        adopted."""
        if (owner := self._owner_of.pop(attempt, None)) is not None:
            self.hand_over(owner)
            self._store.release(owner)

    def adopt(self, attempt: str) -> str:
        """Returns the name under which the attempt's pages are held. From here on a sequence of that name answers for
        them.

        Raises `KeyError` for an attempt without pins.
        """
        return self._owner_of.pop(attempt)

    def hand_over(self, owner: str) -> None:
        """Stops counting what was pinned for `owner`, whose sequence has all its pages now or is over. Idempotent."""
        for page in self._pages_of.pop(owner, ()):
            self._num_owners[page] -= 1
            if not self._num_owners[page]:
                del self._num_owners[page]

    def check_integrity(self) -> None:
        """Raises `IntegrityError` unless the tables agree with each other, and there is room for the longest
        sequence."""
        counted = Counter(page for pages in self._pages_of.values() for page in pages)
        if counted != self._num_owners or len(counted) > self._max_pages:
            raise IntegrityError(f"{len(counted)} pages are pinned: {self!r}")
        if not self._pages_of.keys() >= set(self._owner_of.values()):
            raise IntegrityError(f"{len(self._owner_of)} attempts have pins, and not all of them have pages: {self!r}")

    def _num_with_room(self, pages: Sequence[int]) -> int:
        room = self._max_pages - len(self._num_owners)
        for count, page in enumerate(pages):
            if page not in self._num_owners:
                if room == 0:
                    return count
                room -= 1
        return len(pages)
