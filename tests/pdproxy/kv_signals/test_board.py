"""The KV-ready board: every order in which ranks may speak, too often, too late, from the grave, or never."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import permutations

import pytest

from pdproxy.admission.account import Account, Place
from pdproxy.admission.custody import Custody, Evidence
from pdproxy.errors import DeadlineExceeded, IntegrityError, KvFailed
from pdproxy.kv_signals.board import Expectation, KvBoard, KvFacts
from tests.fakes.stepped_loop import SteppedLoop
from transfer import wire

Awaited = asyncio.Task[KvFacts]


@pytest.fixture
def board(loop: SteppedLoop) -> Iterator[KvBoard]:
    board = KvBoard(clock=loop.time)
    yield board
    board.check_integrity()


def ready(
    rank: int = 0, attempt: str = "a", epoch: str = "e1", num_pages: int = 2, transfer_s: float = 0.5
) -> wire.KvReady:
    return wire.KvReady(
        attempt=attempt, rank=rank, epoch=epoch, num_pages=num_pages, num_bytes=100 * num_pages, transfer_s=transfer_s
    )


def granted(rank: int = 0, num_pages: int = 2, epoch: str = "e1") -> wire.KvGranted:
    return wire.KvGranted(attempt="a", rank=rank, epoch=epoch, num_pages=num_pages)


def failed(rank: int = 0, attempt: str = "a", epoch: str = "e1") -> wire.KvFailed:
    return wire.KvFailed(attempt=attempt, rank=rank, epoch=epoch, reason="peer lost")


def released(rank: int = 0, attempt: str = "a", epoch: str = "e1", reason: str = "consumed") -> wire.KvReleased:
    return wire.KvReleased(attempt=attempt, rank=rank, epoch=epoch, num_pages=2, reason=reason)


def wait(loop: SteppedLoop, expectation: Expectation, patience_s: float = 10.0) -> Awaited:
    task = loop.create_task(expectation.ready(loop.now + patience_s))
    loop.settle()
    return task


# ── granted ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_granted_when_every_rank_has_said_so(board: KvBoard) -> None:
    """Once, with the pages of the fullest rank; a rank that says nothing takes all of the prompt's."""
    told: list[int] = []
    expectation = board.expect("a", range(2), epoch="e1")
    expectation.on_granted(told.append)
    board.deliver(granted(0, 3))
    board.deliver(granted(0, 9))
    board.deliver(granted(1, 9, epoch="another"))
    assert told == []
    board.deliver(granted(1, 2))
    board.deliver(granted(1, 1))
    assert told == [3]
    expectation.drop()
    assert (board.statistics().num_duplicates, board.statistics().num_stale) == (2, 1)


@pytest.mark.parametrize("before", ["ready", "failed", "dropped"])
def test_a_grant_that_comes_too_late_says_nothing(board: KvBoard, before: str) -> None:
    told: list[int] = []
    expectation = board.expect("a", [0])
    expectation.on_granted(told.append)
    if before == "dropped":
        expectation.drop()
    else:
        board.deliver(ready() if before == "ready" else failed())
    board.deliver(granted())
    expectation.drop()
    assert told == []


# ── ready ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_ready_when_every_rank_has_said_so(loop, board, order):
    task = wait(loop, board.expect("a", range(3)))
    for rank in order:
        assert not task.done()
        board.deliver(ready(rank, num_pages=2 + rank, transfer_s=0.1 * rank))
        loop.settle()
    assert task.result() == KvFacts(num_pages=9, rank_pages=4, num_bytes=900, transfer_s=0.2)
    assert loop.num_timers == 0


def test_said_before_anybody_waits(loop, board):
    expectation = board.expect("a", [0])
    board.deliver(ready())
    with pytest.raises(StopIteration) as returned:
        expectation.ready(loop.now).send(None)
    assert returned.value.value.num_pages == 2


def test_one_rank_speaking_twice_is_not_two(loop, board):
    task = wait(loop, board.expect("a", [0, 1]))
    board.deliver(ready(0))
    board.deliver(ready(0))
    loop.settle()
    assert not task.done()
    assert board.statistics().num_duplicates == 1


def test_waiting_costs_nothing(loop, board):
    tasks = [wait(loop, board.expect(f"a{i}", [0])) for i in range(100)]
    stats = board.statistics()
    assert (loop.is_idle, loop.num_timers, stats.num_open, stats.num_waiting) == (True, 100, 100, 100)
    for i in range(100):
        board.deliver(ready(attempt=f"a{i}"))
    loop.settle()
    assert all(task.done() for task in tasks)
    assert loop.num_timers == 0


def test_only_one_may_wait(loop, board):
    expectation = board.expect("a", [0])
    wait(loop, expectation)
    second = wait(loop, expectation)
    assert isinstance(second.exception(), RuntimeError)


def test_who_was_cancelled_may_wait_again(loop, board):
    expectation = board.expect("a", [0])
    first = wait(loop, expectation)
    first.cancel()
    loop.settle()
    second = wait(loop, expectation)
    board.deliver(ready())
    loop.settle()
    assert first.cancelled()
    assert second.result().num_pages == 2


# ── failed, late, never ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("signal", [failed(1), released(1, reason="expired"), failed(0), released(0, reason="expired")])
def test_any_rank_that_cannot_have_it_ends_the_wait(loop, board, signal):
    """Also a rank that had it and let go of it before the others were ready."""
    task = wait(loop, board.expect("a", [0, 1]))
    board.deliver(ready(0))
    board.deliver(signal)
    loop.settle()
    error = task.exception()
    assert isinstance(error, KvFailed)
    assert f"rank {signal.rank}" in error.message
    assert signal.reason in error.message


def test_failed_before_anybody_waits(loop, board):
    expectation = board.expect("a", [0])
    board.deliver(failed())
    assert isinstance(wait(loop, expectation).exception(), KvFailed)


def test_ready_after_failed_does_not_heal(loop, board):
    expectation = board.expect("a", [0, 1])
    for signal in (failed(0), ready(0), ready(1)):
        board.deliver(signal)
    assert isinstance(wait(loop, expectation).exception(), KvFailed)


def test_failed_after_ready_says_nothing(loop, board):
    expectation = board.expect("a", [0])
    board.deliver(ready())
    board.deliver(failed())
    assert wait(loop, expectation).result().num_pages == 2
    assert board.statistics().num_duplicates == 1


def test_the_deadline_ends_the_wait(loop, board):
    task = wait(loop, board.expect("a", [0, 1]), patience_s=3.0)
    board.deliver(ready(0))
    loop.advance(2.9)
    assert not task.done()
    loop.advance(0.2)
    error = task.exception()
    assert isinstance(error, DeadlineExceeded)
    assert "1 of 2 ranks" in error.message


@pytest.mark.parametrize("order", ["ready first", "deadline first"])
def test_ready_at_the_instant_of_the_deadline(loop, board, order):
    """Woken by the one or the other: what has been said by then counts."""
    sooner = 1e-10 if order == "deadline first" else 0.0
    loop.call_at(loop.now + 1.0, board.deliver, ready())
    task = wait(loop, board.expect("a", [0]), patience_s=1.0 - sooner)
    loop.advance(2.0)
    assert task.result().num_pages == 2


def test_dropped_while_somebody_waits(loop, board):
    expectation = board.expect("a", [0])
    task = wait(loop, expectation)
    expectation.drop()
    loop.settle()
    assert isinstance(task.exception(), KvFailed)


# ── released ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_released_when_every_rank_has_said_so(loop, board):
    expectation = board.expect("a", [0, 1])
    waiting = loop.create_task(expectation.released.wait())
    for signal in (ready(0), ready(1), released(0)):
        board.deliver(signal)
        board.deliver(signal)
    loop.settle()
    assert not waiting.done()
    board.deliver(released(1))
    loop.settle()
    assert waiting.done()
    stats = board.statistics()
    assert (stats.num_open, stats.num_released, stats.num_dropped) == (0, 1, 0)


def test_the_lease_returns_though_the_coroutine_has_gone(loop, board):
    account = Account(Place("d0", is_owner=True), 8, loop.time())
    lease = account.issue("a", 4, loop.time())
    lease.step(Custody.FILLING)
    expectation = board.expect("a", [0])
    expectation.on_released(lambda: account.take_back(lease, Evidence.ENGINE_SAID, loop.time()))
    task = wait(loop, expectation)
    task.cancel()
    loop.settle()
    board.deliver(failed())
    assert account.held == 4, "failed is not released: a write may still land"
    board.deliver(released(reason="failed"))
    assert account.held == 0
    expectation.drop()
    assert board.statistics().num_dropped == 0


def test_each_callback_is_called_once(board):
    expectation = board.expect("a", [0])
    calls = []
    expectation.on_released(lambda: calls.append("early"))
    board.deliver(released())
    board.deliver(released())
    expectation.on_released(lambda: calls.append("late"))
    assert calls == ["early", "late"]


def test_a_callback_finds_the_board_as_it_will_be(board):
    """It may expect the same attempt again, or drop: custody has ended before anyone is told."""
    expectation = board.expect("a", [0])
    expectation.on_released(lambda: board.expect("a", [0]))
    expectation.on_released(expectation.drop)
    board.deliver(released())
    assert (expectation.released.is_set(), board.statistics().num_open) == (True, 1)


def test_drop_is_idempotent_and_forgets_the_callbacks(board):
    expectation = board.expect("a", [0])
    calls = []
    expectation.on_released(lambda: calls.append("called"))
    expectation.drop()
    expectation.drop()
    board.deliver(released())
    assert (calls, expectation.released.is_set()) == ([], False)
    stats = board.statistics()
    assert (stats.num_dropped, stats.num_unexpected, stats.num_open) == (1, 1, 0)
    with pytest.raises(RuntimeError, match="no release any more"):
        expectation.on_released(lambda: None)


def test_dropping_an_old_one_leaves_its_successor_alone(loop, board):
    old = board.expect("a", [0])
    old.drop()
    task = wait(loop, board.expect("a", [0]))
    old.drop()
    board.deliver(ready())
    loop.settle()
    assert task.done()


# ── strangers ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("say", [ready, failed, released])
def test_what_nobody_expects_is_counted_and_ignored(loop, board, say):
    task = wait(loop, board.expect("a", [0], epoch="e1"))
    board.deliver(say(attempt="b"))
    board.deliver(say(rank=7))
    board.deliver(say(epoch="e0"))
    loop.settle()
    assert not task.done()
    stats = board.statistics()
    assert (stats.num_unexpected, stats.num_foreign_ranks, stats.num_stale, stats.num_taken) == (1, 1, 1, 0)


def test_each_rank_may_have_its_own_epoch(loop, board):
    task = wait(loop, board.expect("a", [0, 1], epoch={0: "e0", 1: "e1"}))
    board.deliver(ready(0, epoch="e1"))
    board.deliver(ready(1, epoch="e1"))
    loop.settle()
    assert not task.done()
    board.deliver(ready(0, epoch="e0"))
    loop.settle()
    assert task.done()


def test_without_an_epoch_any_will_do(loop, board):
    task = wait(loop, board.expect("a", [0]))
    board.deliver(ready(epoch="whatever"))
    loop.settle()
    assert task.done()


@pytest.mark.parametrize(("ranks", "message"), [([], "no ranks"), ([0], "already expected")])
def test_an_attempt_is_expected_once_and_of_someone(board, ranks, message):
    board.expect("a", [0])
    with pytest.raises(ValueError, match=message):
        board.expect("a", ranks)
    assert board.statistics().num_open == 1


# ── LMCache's notification ──────────────────────────────────────────────────────────────────────────────────────────


def test_notifications_without_a_rank_are_counted(loop, board):
    task = wait(loop, board.expect("a", [0, 1]))
    board.deliver(wire.ProxyNotif(req_id="a"))
    loop.settle()
    assert not task.done()
    board.deliver(wire.ProxyNotif(req_id="a"))
    board.deliver(wire.ProxyNotif(req_id="a"))
    loop.settle()
    assert task.result() == KvFacts(num_pages=0, rank_pages=0, num_bytes=0, transfer_s=0.0)
    assert board.statistics().num_duplicates == 1


def test_notifications_with_a_rank_are_a_set(loop, board):
    task = wait(loop, board.expect("a", [0, 1]))
    for rank in (0, 0):
        board.deliver(wire.ProxyNotif(req_id="a", rank=rank))
    loop.settle()
    assert not task.done()
    board.deliver(wire.ProxyNotif(req_id="a", rank=1))
    loop.settle()
    assert task.done()


def test_the_attempt_field_goes_before_the_request_id(loop, board):
    task = wait(loop, board.expect("a", [0]))
    board.deliver(wire.ProxyNotif(req_id="a", attempt="an earlier one"))
    board.deliver(wire.ProxyNotif(req_id="cmpl-a", attempt="a", status="READY"))
    loop.settle()
    assert task.done()
    assert board.statistics().num_unexpected == 1


@pytest.mark.parametrize("rank", [None, 1])
def test_a_notification_may_say_failed(loop, board, rank):
    task = wait(loop, board.expect("a", [0, 1]))
    board.deliver(wire.ProxyNotif(req_id="a", rank=rank, status="failed"))
    loop.settle()
    assert isinstance(task.exception(), KvFailed)


def test_a_status_nobody_knows_is_counted_and_ignored(loop, board):
    task = wait(loop, board.expect("a", [0]))
    board.deliver(wire.ProxyNotif(req_id="a", status="thinking"))
    board.deliver(wire.ProxyNotif(req_id="a", rank=9))
    loop.settle()
    assert not task.done()
    stats = board.statistics()
    assert (stats.num_senseless, stats.num_foreign_ranks) == (1, 1)


# ── looking ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_repr_is_a_status_line(board):
    expectation = board.expect("a", [0, 1])
    for signal in (ready(0), failed(1), released(1)):
        board.deliver(signal)
    assert repr(expectation) == "<Expectation a: 1/2 ready, 1 failed, 1/2 released>"
    assert repr(board) == "<KvBoard 1 of 1 open, 3 signals>"
    expectation.drop()
    assert repr(expectation) == "<Expectation a: 1/2 ready, 1 failed, 1/2 released, dropped>"


def test_integrity_sees_a_lost_wakeup(loop):
    board = KvBoard(clock=loop.time)
    expectation = board.expect("a", [0])
    wait(loop, expectation)
    expectation._ready_ranks[0] = ready()
    with pytest.raises(IntegrityError, match="not woken"):
        board.check_integrity()


def test_integrity_sees_an_expectation_that_was_lost(loop):
    board = KvBoard(clock=loop.time)
    board.expect("a", [0])
    board._open.clear()
    with pytest.raises(IntegrityError, match="1 expected, 0 ended"):
        board.check_integrity()


def test_integrity_sees_a_signal_that_was_not_counted(loop):
    board = KvBoard(clock=loop.time)
    board._count.num_signals += 1
    with pytest.raises(IntegrityError, match="1 signals, 0 heard"):
        board.check_integrity()
