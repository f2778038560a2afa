"""The object store against a plain model: any order of calls by any owner, and nothing is lost or freed under anybody.

The model says who may hold what and which pages hold which bytes; it knows nothing of pools, tokens' tables or the
order of eviction. Every page that the store hands out is checked to be nobody else's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transfer.errors import IllegalTransition
from transfer.memory.pages import PagePool
from transfer.memory.store import KvStore, StoreFull

NUM_PAGES = 5
KEYS = [b"a", b"b", b"c", b"d"]
OWNERS = ["r", "s", "t"]
owners = st.sampled_from(OWNERS)
keys_in_order = st.lists(st.sampled_from([*KEYS, b""]), max_size=4, unique=True)


@dataclass
class Model:
    """`ready` and `writing`: key → page, what the store should hold; the rest says who holds it."""

    ready: dict[bytes, int] = field(default_factory=dict)
    writing: dict[bytes, tuple[str, int]] = field(default_factory=dict)
    temporary: set[bytes] = field(default_factory=set)
    pins: set[tuple[str, bytes]] = field(default_factory=set)
    private: set[tuple[str, int]] = field(default_factory=set)

    def held(self, key: bytes) -> bool:
        return any(k == key for _, k in self.pins)

    @property
    def idle(self) -> set[bytes]:
        return {key for key in self.ready if not self.held(key)}

    @property
    def num_free(self) -> int:
        return NUM_PAGES - len(self.ready) - len(self.writing) - len(self.private)

    def run(self, keys: list[bytes]) -> list[bytes]:
        absent = [i for i, key in enumerate(keys) if key not in self.ready]
        return keys[: absent[0] if absent else len(keys)]

    def drop_temporary(self) -> None:
        for key in self.idle & self.temporary:
            del self.ready[key]

    def abort(self, owner: str) -> None:
        self.writing = {k: (w, p) for k, (w, p) in self.writing.items() if w != owner}


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = KvStore(PagePool(NUM_PAGES))
        self.model = Model()

    def evicted(self, count: int) -> None:
        """`count` pages were wanted: whatever the store evicted for that was idle, and no more than was missing."""
        gone = {key for key in self.model.ready if self.store._objects.get(key) is None}
        assert gone <= self.model.idle
        assert len(gone) == max(0, count - self.model.num_free)
        for key in gone:
            del self.model.ready[key]

    def fresh(self, pages: list[int]) -> None:
        """None of the pages handed out is anybody's."""
        model = self.model
        taken = [*model.ready.values(), *(p for _, p in model.writing.values()), *(p for _, p in model.private)]
        assert len(set(pages)) == len(pages)
        assert not set(pages) & set(taken)

    # ── rules ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @rule(owner=owners, keys=keys_in_order)
    def lookup(self, owner: str, keys: list[bytes]) -> None:
        hits, run = self.store.lookup(owner, keys), self.model.run(keys)
        assert list(hits.keys) == run
        assert list(hits.pages) == [self.model.ready[key] for key in run]
        self.model.pins |= {(owner, key) for key in run}

    @rule(owner=owners)
    def unpin(self, owner: str) -> None:
        self.store.unpin(owner)
        self.model.pins = {(o, key) for o, key in self.model.pins if o != owner}
        self.model.drop_temporary()

    @rule(owner=owners)
    def abort(self, owner: str) -> None:
        self.store.abort(owner)
        self.model.abort(owner)

    @rule(owner=owners)
    def release(self, owner: str) -> None:
        self.store.release(owner)
        model = self.model
        model.pins = {(o, key) for o, key in model.pins if o != owner}
        model.private = {(o, page) for o, page in model.private if o != owner}
        model.abort(owner)
        model.drop_temporary()

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
        is_new = bool(key) and key not in self.model.ready and key not in self.model.writing
        assert self.store.publish(owner, key, page) == is_new
        if is_new:
            self.model.private.remove((owner, page))
            self.model.ready[key] = page
            self.model.pins.add((owner, key))
            self.model.temporary.discard(key)

    @rule(owner=owners, keys=keys_in_order, is_temporary=st.booleans())
    def reserve(self, owner: str, keys: list[bytes], is_temporary: bool) -> None:
        model = self.model
        if b"" in keys:
            outcome: type[Exception] | None = ValueError
        elif any(key in model.ready or key in model.writing for key in keys):
            outcome = IllegalTransition
        else:
            outcome = StoreFull if len(keys) > model.num_free + len(model.idle) else None
        if outcome is not None:
            with pytest.raises(outcome):
                self.store.reserve(owner, keys, is_temporary=is_temporary)
            return
        pages = self.store.reserve(owner, keys, is_temporary=is_temporary)
        self.evicted(len(keys))
        self.fresh(pages)
        model.writing |= {key: (owner, page) for key, page in zip(keys, pages, strict=True)}
        model.temporary = model.temporary | set(keys) if is_temporary else model.temporary - set(keys)

    @rule(owner=owners, keys=keys_in_order)
    def commit(self, owner: str, keys: list[bytes]) -> None:
        model = self.model
        if any(model.writing.get(key, ("", 0))[0] != owner for key in keys):
            with pytest.raises(IllegalTransition):
                self.store.commit(owner, keys)
            return
        self.store.commit(owner, keys)
        for key in keys:
            model.ready[key] = model.writing.pop(key)[1]
            model.pins.add((owner, key))

    @rule(owner=owners)
    def commit_all(self, owner: str) -> None:
        self.commit(owner, [key for key, (writer, _) in self.model.writing.items() if writer == owner])

    # ── what must hold after every step ─────────────────────────────────────────────────────────────────────────────

    @invariant()
    def agree(self) -> None:
        self.store.check_integrity()
        model, count = self.model, self.store.statistics()
        assert {o.key: o.page for o in self.store._objects if o.is_ready} == model.ready
        assert {o.key: o.page for o in self.store._objects if not o.is_ready} == {
            key: page for key, (_, page) in model.writing.items()
        }
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
