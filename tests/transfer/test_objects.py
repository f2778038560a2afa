"""Objects: every step from every state, holders as sets, and the order of eviction."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from transfer.errors import IllegalTransition, IntegrityError
from transfer.memory.objects import KvObject, Objects, ObjectState

X = b"x"


def bring_to(state: str) -> tuple[Objects, KvObject]:
    """Objects with ``x`` (page 7, writer ``w``) in this state; GONE is also gone from the table."""
    objects = Objects()
    known = objects.add(X, 7, "w")
    if state != "WRITING":
        objects.commit(X, "w")
    if state in ("IDLE", "GONE"):
        objects.leave("w", [X])
    if state == "GONE":
        objects.evict(1)
    return objects, known


STEPS: dict[str, Callable[[Objects, KvObject], object]] = {
    "add": lambda objects, _: objects.add(X, 8, "v"),
    "commit": lambda objects, _: objects.commit(X, "w"),
    "commit by another": lambda objects, _: objects.commit(X, "v"),
    "hold": lambda objects, known: objects.hold("v", [known]),
    "leave": lambda objects, _: objects.leave("w", [X]),
    "leave by another": lambda objects, _: objects.leave("v", [X]),
    "evict": lambda objects, _: objects.evict(1),
}

ILLEGAL = IllegalTransition
TABLE: dict[tuple[str, str], str | type[Exception]] = {
    ("WRITING", "add"): ILLEGAL,
    ("WRITING", "commit"): "READY",
    ("WRITING", "commit by another"): ILLEGAL,
    ("WRITING", "hold"): ILLEGAL,
    ("WRITING", "leave"): "GONE",
    ("WRITING", "leave by another"): "WRITING",
    ("WRITING", "evict"): ValueError,
    ("READY", "add"): ILLEGAL,
    ("READY", "commit"): ILLEGAL,
    ("READY", "commit by another"): ILLEGAL,
    ("READY", "hold"): "READY",
    ("READY", "leave"): "IDLE",
    ("READY", "leave by another"): "READY",
    ("READY", "evict"): ValueError,
    ("IDLE", "add"): ILLEGAL,
    ("IDLE", "commit"): ILLEGAL,
    ("IDLE", "commit by another"): ILLEGAL,
    ("IDLE", "hold"): "READY",
    ("IDLE", "leave"): "IDLE",
    ("IDLE", "leave by another"): "IDLE",
    ("IDLE", "evict"): "GONE",
    ("GONE", "add"): "GONE",
    ("GONE", "commit"): ILLEGAL,
    ("GONE", "commit by another"): ILLEGAL,
    ("GONE", "hold"): ILLEGAL,
    ("GONE", "leave"): "GONE",
    ("GONE", "leave by another"): "GONE",
    ("GONE", "evict"): ValueError,
}


def test_the_table_names_every_step_from_every_state() -> None:
    states = {"IDLE", *(state.name for state in ObjectState)}
    assert set(TABLE) == {(state, step) for state in states for step in STEPS}


@pytest.mark.parametrize(("state", "step"), TABLE)
def test_step(state: str, step: str) -> None:
    objects, known = bring_to(state)
    before = (known.state, set(known.holders), len(objects), objects.num_idle)
    outcome = TABLE[state, step]
    if isinstance(outcome, str):
        STEPS[step](objects, known)
        now = "IDLE" if known.is_ready and objects.is_idle(X) else known.state.name
        assert now == outcome
    else:
        with pytest.raises(outcome):
            STEPS[step](objects, known)
        assert (known.state, known.holders, len(objects), objects.num_idle) == before
    objects.check_integrity()


def ready(objects: Objects, *keys: bytes, owner: str = "w", is_temporary: bool = False) -> None:
    """READY objects, pinned by `owner`; the page is the key's first byte."""
    for key in keys:
        objects.add(key, key[0], owner, is_temporary=is_temporary)
        objects.commit(key, owner)


def test_leaving_twice_is_leaving_once() -> None:
    objects = Objects()
    ready(objects, b"a")
    held = objects.ready_run([b"a"])
    objects.hold("v", held)
    objects.leave("w", [b"a"])
    objects.leave("w", [b"a"])
    assert held[0].holders == {"v"}
    assert objects.num_idle == 0


def test_holding_several_is_all_or_none() -> None:
    objects = Objects()
    ready(objects, b"a")
    objects.leave("w", [b"a"])
    written = objects.add(b"b", 1, "w")
    with pytest.raises(IllegalTransition, match=r"only READY objects can be pinned, not .*62"):
        objects.hold("v", [*objects.ready_run([b"a"]), written])
    assert objects.is_idle(b"a")


def test_the_run_ends_at_the_first_that_is_absent_or_being_written() -> None:
    objects = Objects()
    ready(objects, b"a", b"b", b"d")
    objects.add(b"c", 1, "w")
    assert [o.key for o in objects.ready_run([b"a", b"b", b"c", b"d"])] == [b"a", b"b"]
    assert [o.key for o in objects.ready_run([b"d", b"", b"a"])] == [b"d"]
    assert objects.ready_run([b"?", b"a"]) == []


def test_longest_idle_first_and_of_one_prefix_the_tail_before_the_head() -> None:
    objects = Objects()
    ready(objects, b"a", b"b", b"c", owner="first")
    ready(objects, b"x", b"y", owner="second")
    objects.leave("second", [b"x", b"y"])
    objects.leave("first", [b"a", b"b", b"c"])
    assert bytes(objects.evict(5)) == b"yxcba"


def test_a_head_that_others_share_outlives_every_tail() -> None:
    objects = Objects()
    ready(objects, b"h", b"1", owner="first")
    objects.hold("second", objects.ready_run([b"h"]))
    ready(objects, b"2", owner="second")
    objects.leave("first", [b"h", b"1"])
    objects.leave("second", [b"h", b"2"])
    assert bytes(objects.evict(3)) == b"12h"


def test_used_again_is_evicted_later() -> None:
    objects = Objects()
    ready(objects, b"a", b"b")
    objects.leave("w", [b"a", b"b"])
    objects.hold("v", objects.ready_run([b"b"]))
    objects.leave("v", [b"b"])
    assert bytes(objects.evict(2)) == b"ab"


def test_more_than_what_is_idle_is_not_evicted() -> None:
    objects = Objects()
    ready(objects, b"a", b"b")
    objects.leave("w", [b"a"])
    with pytest.raises(ValueError, match="cannot evict 2 objects, 1 are idle"):
        objects.evict(2)
    assert len(objects) == 2


def test_a_temporary_object_goes_with_its_last_holder() -> None:
    objects = Objects()
    ready(objects, b"t", is_temporary=True)
    objects.hold("v", objects.ready_run([b"t"]))
    assert objects.leave("w", [b"t"]) == []
    assert objects.leave("v", [b"t"]) == [b"t"[0]]
    assert len(objects) == objects.num_idle == 0


def test_integrity_sees_a_holder_that_vanished() -> None:
    objects = Objects()
    ready(objects, b"a")
    objects.ready_run([b"a"])[0].holders.clear()
    with pytest.raises(IntegrityError, match="idle objects and objects without holder differ"):
        objects.check_integrity()


def test_integrity_sees_another_holder_of_what_is_being_written() -> None:
    objects = Objects()
    objects.add(b"a", 1, "w").holders.add("v")
    with pytest.raises(IntegrityError, match="held by others than its writer"):
        objects.check_integrity()


# ── any order ───────────────────────────────────────────────────────────────────────────────────────────────────────

KEYS = [b"a", b"b", b"c", b"d"]
HOLDERS = ["v", "w", "x", "y"]


class ObjectMachine(RuleBasedStateMachine):
    """Against plain dictionaries of holders, and a list for the order of idleness."""

    def __init__(self) -> None:
        super().__init__()
        self.objects = Objects()
        self.writing: dict[bytes, str] = {}
        self.ready: dict[bytes, set[str]] = {}
        self.temporary: set[bytes] = set()
        self.idle: list[bytes] = []

    @rule(key=st.sampled_from(KEYS), writer=st.sampled_from(["v", "w"]), is_temporary=st.booleans())
    def add(self, key: bytes, writer: str, is_temporary: bool) -> None:
        if key in self.writing or key in self.ready:
            with pytest.raises(IllegalTransition):
                self.objects.add(key, key[0], writer)
            return
        self.objects.add(key, key[0], writer, is_temporary=is_temporary)
        self.writing[key] = writer
        (self.temporary.add if is_temporary else self.temporary.discard)(key)

    @rule(key=st.sampled_from(KEYS), writer=st.sampled_from(["v", "w"]))
    def commit(self, key: bytes, writer: str) -> None:
        if self.writing.get(key) != writer:
            with pytest.raises(IllegalTransition):
                self.objects.commit(key, writer)
            return
        self.objects.commit(key, writer)
        del self.writing[key]
        self.ready[key] = {writer}

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True), holder=st.sampled_from(HOLDERS))
    def hold(self, keys: list[bytes], holder: str) -> None:
        run = self.objects.ready_run(keys)
        self.objects.hold(holder, run)
        expected = []
        for key in keys:
            if key not in self.ready:
                break
            expected.append(key)
        assert [o.key for o in run] == expected
        for key in expected:
            self.ready[key].add(holder)
            if key in self.idle:
                self.idle.remove(key)

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True), holder=st.sampled_from(HOLDERS))
    def leave(self, keys: list[bytes], holder: str) -> None:
        freed = []
        for key in reversed(keys):
            if self.writing.get(key) == holder:
                del self.writing[key]
                freed.append(key[0])
            elif holder in self.ready.get(key, ()):
                self.ready[key].remove(holder)
                if not self.ready[key] and key in self.temporary:
                    del self.ready[key]
                    freed.append(key[0])
                elif not self.ready[key]:
                    self.idle.append(key)
        assert self.objects.leave(holder, keys) == freed

    @rule(count=st.integers(0, 3))
    def evict(self, count: int) -> None:
        if count > len(self.idle):
            with pytest.raises(ValueError, match="cannot evict"):
                self.objects.evict(count)
            return
        victims, self.idle = self.idle[:count], self.idle[count:]
        assert self.objects.evict(count) == [key[0] for key in victims]
        for key in victims:
            del self.ready[key]

    @invariant()
    def agree(self) -> None:
        self.objects.check_integrity()
        assert {o.key: o.holders for o in self.objects if o.is_ready} == self.ready
        assert {o.key: o.holders for o in self.objects if not o.is_ready} == {k: {w} for k, w in self.writing.items()}
        assert self.objects.num_idle == len(self.idle)


TestObjectMachine = ObjectMachine.TestCase
TestObjectMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None, derandomize=True)
