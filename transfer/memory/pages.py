"""The pages of a slab: which are free, who owns the others, and whose bytes a page still holds. It touches no memory
and no clock.

A page is held by a set of owners and is free when the set is empty. There is no counter: an owner is in the set or not,
so it cannot leave twice, and a page cannot be lost by counting wrong.

    blank ──allocate──► held ──remember──► held, findable ──last owner leaves──► free, findable ──allocate──► held
      ▲                  │                     ▲                                        │
      └──last one leaves─┘                     └───────────────share────────────────────┘

Pages are handed out as runs of neighbours where there are any, because NIXL merges neighbouring pages into one large
copy (64 KiB pages side by side travel at the speed of 1 MiB ones). Blank pages go first. When they do not suffice, just
as many findable ones as are missing are forgotten, become blank and join the runs beside them: the one left longest
ago, its neighbours from the older half, the next one left longest ago, and so on. (Strictly in order of age, requests
of mixed sizes end up with runs of one page; in this way, in a half-free pool, with runs of five.) An owner's pages are
left last one first, so that the front of a prompt, which others are more likely to have, is forgotten after its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from itertools import repeat

from transfer.errors import IntegrityError
from transfer.memory.free_runs import FreeRuns


class PagePool:
    """A `PagePool` has `num_pages` pages. Owners are anything hashable, an attempt's id for example.

    Mutable state: `_owners` (page → who holds it) and `_pages_of` (owner → its pages, in the order it got them) say the
    same thing twice; `_blank` are free pages that remember nothing, `_idle` free ones that do, left longest ago first,
    each with its number (`_num_left` counts); `_key_of` and `_page_of` (page → key → page) are the chunks that can be
    found.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 0:
            raise ValueError(f"num_pages must not be negative, got {num_pages}")
        self.num_pages = num_pages
        self._owners: dict[int, frozenset[Hashable]] = {}
        self._pages_of: dict[Hashable, dict[int, None]] = {}
        self._blank = FreeRuns(num_pages)
        self._idle: OrderedDict[int, int] = OrderedDict()
        self._num_left = 0
        self._key_of: dict[int, Hashable] = {}
        self._page_of: dict[Hashable, int] = {}

    def __repr__(self) -> str:
        return f"<PagePool {self.num_held}/{self.num_pages} held, {len(self._key_of)} findable>"

    @property
    def num_free(self) -> int:
        """The number of pages that nobody holds. Those that can still be found are among them."""
        return len(self._blank) + len(self._idle)

    @property
    def num_held(self) -> int:
        return len(self._owners)

    def statistics(self) -> dict[str, int]:
        """Returns counts of pages. `shared` have several owners; `idle` are free and can be found."""
        return {
            "pages": self.num_pages,
            "free": self.num_free,
            "held": self.num_held,
            "shared": sum(len(owners) > 1 for owners in self._owners.values()),
            "findable": len(self._key_of),
            "idle": len(self._idle),
        }

    # ── who holds what ──────────────────────────────────────────────────────────────────────────────────────────────

    def owners(self, page: int) -> frozenset[Hashable]:
        return self._owners.get(page, frozenset())

    def pages_of(self, owner: Hashable) -> list[int]:
        """Returns the pages that `owner` holds, in the order it got them."""
        return list(self._pages_of.get(owner, ()))

    def can_allocate(self, count: int, shared: Iterable[int] = ()) -> bool:
        """Returns whether `count` pages are free besides the `shared` ones, which are to be taken with `share`
        first."""
        return count + sum(page in self._idle for page in set(shared)) <= self.num_free

    def allocate(self, count: int, owner: Hashable) -> list[int]:
        """Returns `count` more pages for `owner`, neighbours first. The pages forget what they remembered.

        Raises `ValueError`, and takes nothing, when `can_allocate` says no.
        """
        if count < 0 or not self.can_allocate(count):
            raise ValueError(f"cannot allocate {count} pages, {self.num_free} of {self.num_pages} are free")
        self._forget_idle(count - len(self._blank))
        pages = self._blank.take(count)
        if pages:
            self._owners.update(zip(pages, repeat(frozenset((owner,)))))
            self._note_pages(owner, pages)
        return pages

    def share(self, pages: Iterable[int], owner: Hashable) -> None:
        """Adds `owner` to the owners of pages that are held or findable. An owner that is there already stays there
        once.

        Raises `IntegrityError`, and changes nothing, if a page has no owner and no bytes worth sharing.
        """
        shared = list(pages)
        wrong = [p for p in shared if p not in self._owners and p not in self._idle]
        if wrong:
            raise IntegrityError(f"pages to be shared that nobody holds or remembers: {wrong}")
        for page in shared:
            self._idle.pop(page, None)
            self._owners[page] = self.owners(page) | {owner}
        if shared:
            self._note_pages(owner, shared)

    def leave(self, owner: Hashable, pages: Iterable[int] | None = None) -> list[int]:
        """Notes that `owner` no longer holds these pages (None: all of its pages). Returns those that are free now.

        Raises `IntegrityError`, and changes nothing, if one of them is not its own. For an owner without pages, None
        means no pages.
        """
        own = self._pages_of.get(owner, {})
        left = list(own) if pages is None else list(pages)
        if pages is not None:
            wrong = [p for p in left if p not in own]
            if wrong or len(set(left)) != len(left):
                raise IntegrityError(f"{owner!r} gives back pages that it does not hold: {wrong or left}")
        alone = frozenset((owner,))
        freed = [page for page in left if self._owners[page] == alone]
        if len(freed) < len(left):
            for page in left:
                self._owners[page] -= alone
        for page in freed:
            del self._owners[page]
        if own and len(left) == len(own):
            del self._pages_of[owner]
        else:
            for page in left:
                del own[page]
        self._put_back(freed)
        return freed

    # ── whose bytes ─────────────────────────────────────────────────────────────────────────────────────────────────

    def find(self, key: Hashable) -> int | None:
        """Returns the page, held or free, that holds chunk `key`, complete; None where there is none."""
        return self._page_of.get(key)

    def remember(self, page: int, key: Hashable) -> bool:
        """Notes that the bytes of this held page are chunk `key`, complete, until it is allocated again. Returns True
        if it can be found.

        The first page for a key wins. A later one stays private, and does not take over when the first is gone. To save
        one transfer of one page, the copy would have to be watched for as long as it lives. Raises `IntegrityError`,
        and changes nothing, if nobody holds the page or it is another chunk.
        """
        if page not in self._owners or self._key_of.get(page, key) != key:
            raise IntegrityError(f"page {page} cannot be chunk {key!r}: it is free, or another chunk")
        winner = self._page_of.setdefault(key, page)
        if winner != page:
            return False
        self._key_of[page] = key
        return True

    def forget(self, pages: Iterable[int]) -> None:
        """Makes these held pages impossible to find: their bytes are not what they were remembered as."""
        for page in pages:
            key = self._key_of.pop(page, None)
            if key is not None:
                del self._page_of[key]

    def check_integrity(self) -> None:
        """Raises `IntegrityError` unless every page is held, blank or idle, and the tables agree with each other."""
        self._blank.check_integrity()
        places = [*self._owners, *self._blank, *self._idle]
        if sorted(places) != list(range(self.num_pages)):
            raise IntegrityError(f"{len(places)} pages held, blank or idle, of {self.num_pages}: {self!r}")
        by_page = {(page, owner) for page, owners in self._owners.items() for owner in owners}
        by_owner = {(page, owner) for owner, pages in self._pages_of.items() for page in pages}
        if by_page != by_owner or not all(self._owners.values()) or not all(self._pages_of.values()):
            raise IntegrityError(f"pages and owners differ: {by_page ^ by_owner}")
        by_key = {page: key for key, page in self._page_of.items()}
        if by_key != self._key_of or len(self._page_of) != len(self._key_of):
            raise IntegrityError(f"{len(self._key_of)} pages remember {len(self._page_of)} keys")
        findable = self._key_of.keys()
        if not self._idle.keys() <= findable or any(page in findable for page in self._blank):
            raise IntegrityError("a free page is in the wrong place for what it remembers")

    # ── how ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _note_pages(self, owner: Hashable, pages: list[int]) -> None:
        if owner in self._pages_of:
            self._pages_of[owner].update(dict.fromkeys(pages))
        else:
            self._pages_of[owner] = dict.fromkeys(pages)

    def _put_back(self, freed: list[int]) -> None:
        """Puts pages back that nobody holds any more. The last of them is forgotten first."""
        if not self._key_of:
            self._blank.add(freed)
            return
        self._blank.add(page for page in freed if page not in self._key_of)
        for page in reversed(freed):
            if page in self._key_of:
                self._num_left += 1
                self._idle[page] = self._num_left

    def _forget_idle(self, count: int) -> None:
        """Makes `count` pages blank: the one left longest ago, its neighbours, and so on."""
        pages: list[int] = []
        while len(pages) < count:
            pages += self._pop_oldest_run(count - len(pages))
        for page in pages:
            del self._page_of[self._key_of.pop(page)]
        self._blank.add(pages)

    def _pop_oldest_run(self, count: int) -> list[int]:
        """Takes and returns at most `count` idle neighbours around the page left longest ago, all from the older half
        of the idle time."""
        oldest, left_at = self._idle.popitem(last=False)
        # Pages are numbered as they are left: this number lies half way from the oldest to the latest.
        limit = (left_at + self._num_left) // 2
        run = [oldest]
        for direction in (-1, 1):
            page = oldest + direction
            while len(run) < count and self._idle.get(page, limit + 1) <= limit:
                del self._idle[page]
                run.append(page)
                page += direction
        return run
