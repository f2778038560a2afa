"""Objects: every step from every state, owners as sets, and the order of eviction."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from transfer.errors import IntegrityError
from transfer.memory.objects import Objects

X = b"x"


def bring_to(state: str) -> Objects:
    """Objects of which ``x`` (page 7) is held by ``w``, is idle, or is not there."""
    objects = Objects()
    if state != "ABSENT":
        objects.add(X, 7, "w")
    if state == "IDLE":
        objects.unpin("w", [X])
    return objects


def state_of(objects: Objects) -> str:
    if not len(objects):
        return "ABSENT"
    return "IDLE" if objects.num_idle else "HELD"


STEPS: dict[str, Callable[[Objects], object]] = {
    "add": lambda objects: objects.add(X, 8, "v"),
    "pin": lambda objects: [o.page for o in objects.pin("v", [X])],
    "unpin": lambda objects: objects.unpin("w", [X]),
    "unpin by another": lambda objects: objects.unpin("v", [X]),
    "evict": lambda objects: objects.evict(1),
}

TABLE: dict[tuple[str, str], tuple[str, object]] = {
    ("ABSENT", "add"): ("HELD", True),
    ("ABSENT", "pin"): ("ABSENT", []),
    ("ABSENT", "unpin"): ("ABSENT", None),
    ("ABSENT", "unpin by another"): ("ABSENT", None),
    ("ABSENT", "evict"): ("ABSENT", ValueError),
    ("HELD", "add"): ("HELD", False),
    ("HELD", "pin"): ("HELD", [7]),
    ("HELD", "unpin"): ("IDLE", None),
    ("HELD", "unpin by another"): ("HELD", None),
    ("HELD", "evict"): ("HELD", ValueError),
    ("IDLE", "add"): ("IDLE", False),
    ("IDLE", "pin"): ("HELD", [7]),
    ("IDLE", "unpin"): ("IDLE", None),
    ("IDLE", "unpin by another"): ("IDLE", None),
    ("IDLE", "evict"): ("ABSENT", [7]),
}


def test_the_table_names_every_step_from_every_state() -> None:
    assert set(TABLE) == {(state, step) for state in ("ABSENT", "HELD", "IDLE") for step in STEPS}


@pytest.mark.parametrize(("state", "step"), TABLE)
def test_step(state: str, step: str) -> None:
    objects = bring_to(state)
    assert state_of(objects) == state
    left_in, outcome = TABLE[state, step]
    if outcome is ValueError:
        with pytest.raises(ValueError, match="cannot evict 1 objects, 0 are idle"):
            STEPS[step](objects)
    else:
        assert STEPS[step](objects) == outcome
    assert state_of(objects) == left_in
    objects.check_integrity()


def add(objects: Objects, *keys: bytes, owner: str = "w") -> None:
    """Adds objects that `owner` holds; the page is the key's first byte."""
    for key in keys:
        assert objects.add(key, key[0], owner)


def test_leaving_twice_is_leaving_once() -> None:
    objects = Objects()
    add(objects, b"a")
    (held,) = objects.pin("v", [b"a"])
    objects.unpin("w", [b"a"])
    objects.unpin("w", [b"a"])
    assert held.owners == {"v"}
    assert objects.num_idle == 0


def test_the_run_ends_at_the_first_that_is_absent_and_nothing_behind_it_is_pinned() -> None:
    objects = Objects()
    add(objects, b"a", b"b", b"d")
    objects.unpin("w", [b"a", b"b", b"d"])
    assert [o.key for o in objects.pin("v", [b"a", b"b", b"c", b"d"])] == [b"a", b"b"]
    assert objects.num_idle == 1
    assert [o.key for o in objects.pin("v", [b"d", b"", b"a"])] == [b"d"]
    assert objects.pin("v", [b"?", b"a"]) == []


def test_longest_idle_first_and_of_one_prefix_the_tail_before_the_head() -> None:
    objects = Objects()
    add(objects, b"a", b"b", b"c", owner="first")
    add(objects, b"x", b"y", owner="second")
    objects.unpin("second", [b"x", b"y"])
    objects.unpin("first", [b"a", b"b", b"c"])
    assert bytes(objects.evict(5)) == b"yxcba"


def test_a_head_that_others_share_outlives_every_tail() -> None:
    objects = Objects()
    add(objects, b"h", b"1", owner="first")
    objects.pin("second", [b"h"])
    add(objects, b"2", owner="second")
    objects.unpin("first", [b"h", b"1"])
    objects.unpin("second", [b"h", b"2"])
    assert bytes(objects.evict(3)) == b"12h"


def test_used_again_is_evicted_later() -> None:
    objects = Objects()
    add(objects, b"a", b"b")
    objects.unpin("w", [b"a", b"b"])
    objects.pin("v", [b"b"])
    objects.unpin("v", [b"b"])
    assert bytes(objects.evict(2)) == b"ab"


def test_more_than_what_is_idle_is_not_evicted() -> None:
    objects = Objects()
    add(objects, b"a", b"b")
    objects.unpin("w", [b"a"])
    with pytest.raises(ValueError, match="cannot evict 2 objects, 1 are idle"):
        objects.evict(2)
    assert len(objects) == 2


def test_integrity_sees_an_owner_that_vanished() -> None:
    objects = Objects()
    add(objects, b"a")
    objects.pin("w", [b"a"])[0].owners.clear()
    with pytest.raises(IntegrityError, match="idle objects and objects without owner differ"):
        objects.check_integrity()


def test_integrity_sees_an_object_under_another_key() -> None:
    objects = Objects()
    add(objects, b"a")
    objects.pin("w", [b"a"])[0].key = b"b"
    with pytest.raises(IntegrityError, match="is kept under 61"):
        objects.check_integrity()


# ── any order ───────────────────────────────────────────────────────────────────────────────────────────────────────

KEYS = [b"a", b"b", b"c", b"d"]
owners = st.sampled_from(["v", "w", "x"])
keys_in_order = st.lists(st.sampled_from(KEYS), unique=True)


class ObjectMachine(RuleBasedStateMachine):
    """Against a plain dictionary of owners, and a list for the order of idleness."""

    def __init__(self) -> None:
        super().__init__()
        self.objects = Objects()
        self.owners: dict[bytes, set[str]] = {}
        self.idle: list[bytes] = []

    @rule(key=st.sampled_from(KEYS), owner=owners)
    def add(self, key: bytes, owner: str) -> None:
        is_new = key not in self.owners
        assert self.objects.add(key, key[0], owner) == is_new
        if is_new:
            self.owners[key] = {owner}

    @rule(keys=keys_in_order, owner=owners)
    def pin(self, keys: list[bytes], owner: str) -> None:
        run = []
        for key in keys:
            if key not in self.owners:
                break
            run.append(key)
            self.owners[key].add(owner)
            if key in self.idle:
                self.idle.remove(key)
        assert [(o.key, o.page) for o in self.objects.pin(owner, keys)] == [(key, key[0]) for key in run]

    @rule(keys=keys_in_order, owner=owners)
    def unpin(self, keys: list[bytes], owner: str) -> None:
        self.objects.unpin(owner, keys)
        for key in reversed(keys):
            if owner in self.owners.get(key, ()):
                self.owners[key].remove(owner)
                if not self.owners[key]:
                    self.idle.append(key)

    @rule(count=st.integers(0, 3))
    def evict(self, count: int) -> None:
        if count > len(self.idle):
            with pytest.raises(ValueError, match="cannot evict"):
                self.objects.evict(count)
            return
        victims, self.idle = self.idle[:count], self.idle[count:]
        assert self.objects.evict(count) == [key[0] for key in victims]
        for key in victims:
            del self.owners[key]

    @invariant()
    def agree(self) -> None:
        self.objects.check_integrity()
        assert {o.key: o.owners for o in self.objects} == self.owners
        assert self.objects.num_idle == len(self.idle)


TestObjectMachine = ObjectMachine.TestCase
TestObjectMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None, derandomize=True)
