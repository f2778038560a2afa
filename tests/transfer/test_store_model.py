"""The object store against a plain model: any order of calls by any owner, and nothing is lost or freed under anybody.

The model says who may hold what and which pages hold which bytes; it knows nothing of pools or the order of
eviction. Every page that the store hands out is checked to be nobody else's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transfer.memory.pages import PagePool
from transfer.memory.store import KvStore, StoreFull

NUM_PAGES = 5
KEYS = [b"a", b"b", b"c", b"d"]
OWNERS = ["r", "s", "t"]
owners = st.sampled_from(OWNERS)
keys_in_order = st.lists(st.sampled_from([*KEYS, b""]), max_size=4, unique=True)


@dataclass
class Model:
    """`objects`: key → page, what the store should hold; the rest says who holds it."""

    objects: dict[bytes, int] = field(default_factory=dict)
    pins: set[tuple[str, bytes]] = field(default_factory=set)
    private: set[tuple[str, int]] = field(default_factory=set)

    def held(self, key: bytes) -> bool:
        return any(k == key for _, k in self.pins)

    @property
    def idle(self) -> set[bytes]:
        return {key for key in self.objects if not self.held(key)}

    @property
    def num_free(self) -> int:
        return NUM_PAGES - len(self.objects) - len(self.private)

    def run(self, keys: list[bytes]) -> list[bytes]:
        absent = [i for i, key in enumerate(keys) if key not in self.objects]
        return keys[: absent[0] if absent else len(keys)]


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = KvStore(PagePool(NUM_PAGES))
        self.model = Model()

    @property
    def there(self) -> dict[bytes, int]:
        return {o.key: o.page for o in self.store._objects}

    def evicted(self, count: int) -> None:
        """`count` pages were wanted: whatever the store evicted for that was idle, and no more than was missing."""
        gone = {key for key in self.model.objects if key not in self.there}
        assert gone <= self.model.idle
        assert len(gone) == max(0, count - self.model.num_free)
        for key in gone:
            del self.model.objects[key]

    def fresh(self, pages: list[int]) -> None:
        """None of the pages handed out is anybody's."""
        model = self.model
        taken = [*model.objects.values(), *(p for _, p in model.private)]
        assert len(set(pages)) == len(pages)
        assert not set(pages) & set(taken)

    # ── rules ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @rule(owner=owners, keys=keys_in_order)
    def lookup(self, owner: str, keys: list[bytes]) -> None:
        hits, run = self.store.lookup(owner, keys), self.model.run(keys)
        assert list(hits.keys) == run
        assert list(hits.pages) == [self.model.objects[key] for key in run]
        self.model.pins |= {(owner, key) for key in run}

    @rule(owner=owners, keys=keys_in_order)
    def unpin(self, owner: str, keys: list[bytes]) -> None:
        self.store.unpin(owner, keys)
        self.model.pins -= {(owner, key) for key in keys}

    @rule(owner=owners)
    def release(self, owner: str) -> None:
        self.store.release(owner)
        model = self.model
        model.pins = {(o, key) for o, key in model.pins if o != owner}
        model.private = {(o, page) for o, page in model.private if o != owner}

    @rule(owner=owners, count=st.integers(0, NUM_PAGES + 1))
    def allocate(self, owner: str, count: int) -> None:
        if count > self.model.num_free + len(self.model.idle):
            with pytest.raises(StoreFull):
                self.store.allocate(owner, count)
            return
        pages = self.store.allocate(owner, count)
        assert len(pages) == count
        self.evicted(count)
        self.fresh(pages)
        self.model.private |= {(owner, page) for page in pages}

    @precondition(lambda self: self.model.private)
    @rule(data=st.data(), key=st.sampled_from([*KEYS, b""]))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        owner, page = data.draw(st.sampled_from(sorted(self.model.private)))
        is_new = bool(key) and key not in self.model.objects
        assert self.store.publish(owner, key, page) == is_new
        if is_new:
            self.model.private.remove((owner, page))
            self.model.objects[key] = page
            self.model.pins.add((owner, key))

    # ── what must hold after every step ─────────────────────────────────────────────────────────────────────────────

    @invariant()
    def agree(self) -> None:
        self.store.check_integrity()
        model, count = self.model, self.store.statistics()
        assert self.there == model.objects
        assert count.num_private == len(model.private)
        assert count.num_free == model.num_free
        assert count.num_idle == len(model.idle)
        assert count.num_pinned == len({key for _, key in model.pins})
        assert self.store.num_available == model.num_free + len(model.idle)

    def teardown(self) -> None:
        for owner in OWNERS:
            self.store.release(owner)
        self.store.check_integrity()
        count = self.store.statistics()
        assert (count.num_owners, count.num_pinned) == (0, 0)
        assert self.store.num_available == NUM_PAGES


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=250, stateful_step_count=40, deadline=None, derandomize=True)
