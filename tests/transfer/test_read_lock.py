"""How many readers an object has, and locks that only their own token gives back."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from transfer.memory.read_lock import MAX_READERS, LockRefused, Reader, ReadLocks, num_kv_readers, readers_of

R0, R1 = ("a", 0), ("a", 1)


# ── how many ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("tp_size", "is_mla", "num_servers", "dcp_size", "num_readers"),
    [
        (1, True, 1, 1, 1),
        (2, False, 1, 1, 1),
        (128, False, 1, 1, 1),
        (2, True, 1, 1, 2),
        (8, True, 4, 1, 2),
        (8, True, 1, 8, 1),
        (8, True, 2, 3, 2),
        (4, True, 4, 4, 1),
        (128, True, 1, 1, 128),
    ],
)
def test_number_of_readers(tp_size: int, is_mla: bool, num_servers: int, dcp_size: int, num_readers: int) -> None:
    assert num_kv_readers(tp_size, is_mla, num_servers, dcp_size) == num_readers


@pytest.mark.parametrize("is_mla", [True, False])
@pytest.mark.parametrize("name", ["tp_size", "num_servers", "dcp_size"])
@pytest.mark.parametrize("count", [0, -1, MAX_READERS + 1])
def test_a_count_outside_the_limits_is_an_error_that_names_it(name: str, count: int, is_mla: bool) -> None:
    arguments = {"tp_size": 4, "num_servers": 1, "dcp_size": 1, name: count}
    with pytest.raises(ValueError, match=f"^{name} must be from 1 to 128, got {count}$"):
        num_kv_readers(is_mla=is_mla, **arguments)


@pytest.mark.parametrize("is_mla", [True, False])
def test_ranks_that_do_not_divide_over_the_servers(is_mla: bool) -> None:
    with pytest.raises(ValueError, match="tp_size 8 is not divisible by num_servers 3"):
        num_kv_readers(8, is_mla, num_servers=3)


def test_readers_are_the_requests_own() -> None:
    assert readers_of("a", 2) == (R0, R1)
    assert set(readers_of("a", 2)).isdisjoint(readers_of("b", 2))


@pytest.mark.parametrize("count", [0, -3, MAX_READERS + 1])
def test_a_wrong_number_of_readers(count: int) -> None:
    with pytest.raises(ValueError, match="num_readers must be from 1 to 128"):
        readers_of("a", count)


# ── tokens ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_taking_n_locks_is_one_step_with_a_token_per_reader() -> None:
    locks = ReadLocks()
    first, second = locks.take([R0, R1], [b"x", b"y"], deadline=10, now=0)
    assert (first.reader, second.reader) == (R0, R1)
    assert first.keys == second.keys == (b"x", b"y")
    assert len(locks) == 4
    assert repr(locks) == "<ReadLocks 4 locks, 2 tokens>"
    assert locks.give_back(first.token) == first
    assert locks.all() == [second]


def test_a_token_is_given_back_once() -> None:
    locks = ReadLocks()
    (lock,) = locks.take([R0], [b"x"], deadline=10, now=0)
    assert locks.give_back(lock.token) == lock
    assert locks.give_back(lock.token) is None


@pytest.mark.parametrize("swept", [True, False], ids=["swept", "not swept"])
def test_the_late_unlock_of_a_reader_that_locked_again_takes_nothing(swept: bool) -> None:
    locks = ReadLocks()
    (old,) = locks.take([R0], [b"x"], deadline=10, now=0)
    if swept:
        assert locks.sweep(10) == [old]
    (new,) = locks.take([R0], [b"x"], deadline=20, now=10)
    assert new.token != old.token
    locks.give_back(old.token)
    assert locks.get(new.token) == new


def test_tokens_are_never_used_twice() -> None:
    locks = ReadLocks()
    tokens = []
    for _ in range(5):
        (lock,) = locks.take([R0], [b"x"], deadline=10, now=0)
        locks.give_back(lock.token)
        tokens.append(lock.token)
    assert len(set(tokens)) == 5


@pytest.mark.parametrize("deadline", [5, 4.9, -1, math.inf, math.nan])
def test_a_deadline_must_be_a_time_to_come(deadline: float) -> None:
    locks = ReadLocks()
    (lock,) = locks.take([R0], [b"x"], deadline=10, now=0)
    with pytest.raises(LockRefused, match="must end at a time to come"):
        locks.take([R1], [b"x"], deadline=deadline, now=5)
    with pytest.raises(LockRefused, match="must end at a time to come"):
        locks.renew([lock.token], deadline=deadline, now=5)
    assert locks.all() == [lock]


@pytest.mark.parametrize(
    ("readers", "message"),
    [([], "got 0"), ([R0, R1, R0], "named twice"), ((*readers_of("a", 128), ("a", 128)), "got 129")],
)
def test_wrong_readers(readers: list[Reader], message: str) -> None:
    locks = ReadLocks()
    with pytest.raises(ValueError, match=message):
        locks.take(readers, [b"x"], deadline=10, now=0)
    assert not locks.all()


def test_no_keys_no_tokens() -> None:
    locks = ReadLocks()
    assert locks.take([R0], [], deadline=10, now=0) == ()
    assert locks.next_deadline() is None


def test_renewing_moves_the_deadline_and_names_the_lost() -> None:
    locks = ReadLocks()
    first, second = locks.take([R0, R1], [b"x"], deadline=10, now=0)
    assert locks.renew([first.token], deadline=30, now=9) == []
    assert locks.next_deadline() == 10
    assert locks.renew([first.token, second.token, 999], deadline=40, now=10) == [second.token, 999]
    assert locks.sweep(39) == [second]
    assert [lock.token for lock in locks.sweep(40)] == [first.token]
    assert locks.renew([first.token], deadline=50, now=41) == [first.token]


# ── any order ───────────────────────────────────────────────────────────────────────────────────────────────────────


class LockMachine(RuleBasedStateMachine):
    """Against a plain dictionary: token → [reader, keys, deadline]."""

    def __init__(self) -> None:
        super().__init__()
        self.locks = ReadLocks()
        self.model: dict[int, tuple[Reader, frozenset[bytes], float]] = {}
        self.tokens: list[int] = []
        self.now = 0.0

    @rule(num_readers=st.integers(1, 3), keys=st.sets(st.sampled_from([b"x", b"y", b"z"])), ttl=st.integers(-1, 4))
    def take(self, num_readers: int, keys: set[bytes], ttl: int) -> None:
        deadline = self.now + ttl
        try:
            taken = self.locks.take(readers_of("a", num_readers), keys, deadline=deadline, now=self.now)
        except LockRefused:
            assert ttl <= 0
            return
        assert ttl > 0
        assert len(taken) == (num_readers if keys else 0)
        for lock in taken:
            assert lock.token not in self.tokens
            self.tokens.append(lock.token)
            self.model[lock.token] = (lock.reader, frozenset(keys), deadline)

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from(self.tokens or [0]))
        assert (self.locks.give_back(token) is not None) == (self.model.pop(token, None) is not None)

    @rule(data=st.data(), ttl=st.integers(1, 4))
    def renew(self, data: st.DataObject, ttl: int) -> None:
        tokens = data.draw(st.lists(st.sampled_from(self.tokens or [0]), unique=True, max_size=3))
        lost = self.locks.renew(tokens, deadline=self.now + ttl, now=self.now)
        live = [t for t in tokens if t in self.model and self.model[t][2] > self.now]
        assert lost == [t for t in tokens if t not in live]
        for token in live:
            self.model[token] = (*self.model[token][:2], self.now + ttl)

    @rule(step=st.integers(0, 3), is_swept=st.booleans())
    def time_passes(self, step: int, is_swept: bool) -> None:
        self.now += step
        if is_swept:
            expired = {lock.token for lock in self.locks.sweep(self.now)}
            assert expired == {t for t, (_, _, deadline) in self.model.items() if deadline <= self.now}
            for token in expired:
                del self.model[token]

    @invariant()
    def agree(self) -> None:
        assert {t.token: (t.reader, frozenset(t.keys), t.deadline) for t in self.locks.all()} == self.model
        assert len(self.locks) == sum(len(keys) for _, keys, _ in self.model.values())
        assert self.locks.next_deadline() == min((d for _, _, d in self.model.values()), default=None)


TestLockMachine = LockMachine.TestCase
TestLockMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None, derandomize=True)
