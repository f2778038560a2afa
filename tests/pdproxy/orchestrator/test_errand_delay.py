"""When the errand is done that frees an abandoned attempt's pages: not while somebody is still at them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdproxy.admission.account import Lease
from pdproxy.admission.custody import Custody, Way
from pdproxy.engines.adapter import Call, ReleaseCall
from pdproxy.engines.builtin import BuiltinAdapter
from pdproxy.fleet.instance import Instance
from pdproxy.kv_signals.board import Expectation, KvBoard
from pdproxy.orchestrator.attempt import Attempt
from pdproxy.orchestrator.reaper import Reaper
from tests.fakes.fake_engine import FakeClient, FakeEngine, FakeReply
from tests.fakes.fleet import make_admission, make_instance, make_ready
from tests.fakes.proxy_harness import proxy_in_front_of
from transfer.wire import ProxyNotif

CALL = Call("/kv_transfer/cancel", b'{"attempt":"a1"}')
LONG_S = 60.0
DELAY_S = 0.1


@dataclass
class Left:
    """An attempt that its request has left. Implements `Attempt` as far as the reaper looks."""

    errand: ReleaseCall
    lease: Lease
    expectation: Expectation
    lease_s: float = LONG_S

    def __post_init__(self) -> None:
        self.id = self.lease.attempt
        self.traits = SimpleNamespace(lease_s=self.lease_s)
        self.lease.step(Custody.FILLING)

    def way(self) -> Way:
        return Way(
            errand=self.errand,
            target=self.lease.account.place,
            not_before_s=self.errand.delay_s,
            over_after_s=self.lease_s,
        )

    def headers(self, instance: Instance) -> dict[str, str]:
        return {}

    def settled(self) -> None:
        self.expectation.drop()


@dataclass
class World:
    """A decoder whom errands go to, and a reaper that sees to what is left there."""

    engine: FakeEngine
    decoder: Instance
    reaper: Reaper

    def leave(self, attempt: str, board: KvBoard, *, lease_s: float = LONG_S, **when: Any) -> None:
        assert self.decoder.account is not None
        lease = self.decoder.account.issue(attempt, 1, time.monotonic())
        left = Left(ReleaseCall("decode", CALL, **when), lease, board.expect(attempt, {0, 1}), lease_s)
        self.reaper.adopt(cast(Attempt, left))

    async def called(self) -> None:
        await self.engine.reached("cancel")

    @property
    def is_called(self) -> bool:
        return bool(self.engine.bodies("/kv_transfer/cancel"))


@asynccontextmanager
async def world(*, has_bug: bool = False) -> AsyncIterator[World]:
    """`has_bug`: what the decoder answers to its first errand meets one."""
    engine, admission = FakeEngine("decode"), make_admission(time.monotonic)
    decoder = make_instance("d0", client=FakeClient(engine), admission=admission, clock=time.monotonic)
    admission.add(make_ready(decoder))
    if has_bug:
        decoder.adapter = Stumbling()

    async def look(instance: Instance) -> None:
        asked = instance.asked()
        await asyncio.sleep(0)
        instance.heard(engine.known_facts(), asked)

    reaper = Reaper(admission, call_timeout_s=5.0, look=look)
    running = asyncio.create_task(reaper.run())
    await asyncio.sleep(0)
    try:
        yield World(engine, decoder, reaper)
        async with asyncio.timeout(5):
            await reaper.idle()
        assert decoder.held == 0
        admission.check_integrity()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@asynccontextmanager
async def reaped(board: KvBoard, **when: Any) -> AsyncIterator[World]:
    async with world() as one:
        one.leave("a1", board, **when)
        for _ in range(3):
            await asyncio.sleep(0)
        yield one
    outcomes = one.reaper.statistics()
    assert (outcomes["dropped"], outcomes["expired"]) == (1, 0)


def tell(board: KvBoard, rank: int, status: str = "ready") -> None:
    board.deliver(ProxyNotif(req_id="a1", rank=rank, status=status))


async def test_at_once_where_nothing_is_said() -> None:
    async with reaped(KvBoard()) as one, asyncio.timeout(5):
        await one.called()


async def test_every_rank_has_written() -> None:
    board = KvBoard()
    async with reaped(board, delay_s=LONG_S, or_ready=True) as one, asyncio.timeout(5):
        tell(board, 0)
        await asyncio.sleep(0.02)
        assert not one.is_called
        tell(board, 1)
        await one.called()


@pytest.mark.parametrize("is_failed", [False, True])
async def test_nobody_says_anything_any_more(is_failed: bool) -> None:
    """One rank has failed: the other may be writing all the same."""
    board, began = KvBoard(), asyncio.get_running_loop().time()
    async with reaped(board, delay_s=DELAY_S, or_ready=True) as one, asyncio.timeout(5):
        if is_failed:
            tell(board, 0, "failed")
        await one.called()
        assert asyncio.get_running_loop().time() - began >= DELAY_S


async def test_being_ready_is_no_reason_to_meet_a_reader() -> None:
    board, began = KvBoard(), asyncio.get_running_loop().time()
    async with reaped(board, delay_s=DELAY_S) as one, asyncio.timeout(5):
        for rank in (0, 1):
            tell(board, rank)
        await one.called()
        assert asyncio.get_running_loop().time() - began >= DELAY_S


class Stumbling(BuiltinAdapter):
    """Its first errand meets a bug."""

    has_stumbled = False

    def read_errand(self, status: int, body: bytes) -> bool:
        if not self.has_stumbled:
            self.has_stumbled = True
            raise RuntimeError("a bug")
        return super().read_errand(status, body)


async def test_a_bug_in_one_errand_leaves_the_others_alone(caplog: pytest.LogCaptureFixture) -> None:
    """It is done again after a pause, or its pages are free when the lease is over, whichever comes first."""
    async with world(has_bug=True) as one, asyncio.timeout(5):
        one.leave("a0", KvBoard(), lease_s=DELAY_S)
        await one.called()
        one.leave("a1", KvBoard(), delay_s=DELAY_S / 2)
    outcomes = one.reaper.statistics()
    assert outcomes["dropped"] + outcomes["expired"] == 2
    assert outcomes["dropped"] >= 1
    assert "met a bug" in caplog.text


async def test_what_cannot_be_dropped_is_free_once_the_engine_is_heard_after_its_lease(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with world() as one, asyncio.timeout(5):
        one.engine.answers_cancel = False
        one.leave("a0", KvBoard(), lease_s=DELAY_S)
        await one.called()
        assert one.decoder.held == 1
    assert one.reaper.statistics()["expired"] == 1
    assert "its pages were waited for" in caplog.text


async def test_one_that_is_down_is_not_asked_until_it_is_heard_again() -> None:
    async with world() as one, asyncio.timeout(5):
        one.decoder.lost("refused")
        one.leave("a1", KvBoard())
        await asyncio.sleep(0.05)
        assert (one.is_called, one.decoder.held) == (False, 1)
        one.decoder.heard(one.engine.known_facts())
        await one.called()
    assert one.reaper.statistics()["dropped"] == 1


# ── in the whole proxy ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_errand_comes_before_a_short_lease_is_over() -> None:
    """The decoder has said of a complete answer that it has taken the KV, and that word was lost."""
    async with proxy_in_front_of(engine_lease_s=0.15) as house:
        house.decoder.consumed_signal = False
        assert (await house.post(stream=True)).status == 200
        await house.settled()
        assert len(house.decoder.cancelled) == 1


async def test_an_answer_without_a_decode_leg_leaves_nothing_to_wait_for() -> None:
    """The KV is at the decoder, which will never be asked to take it."""
    async with proxy_in_front_of() as house:
        house.prefiller.finish_at_first = "stop"
        answer = house.prefiller._prefill

        async def pushed(path: str, body: dict[str, Any]) -> FakeReply:
            if "kv_transfer_params" in body:
                house.decoder.receive(body["kv_transfer_params"]["attempt"], 1)
            return await answer(path, body)

        house.prefiller._prefill = pushed
        left: list[Way] = []
        abandon = house.admission.abandon
        house.admission.abandon = lambda lease, way: (left.append(way), abandon(lease, way))
        assert (await house.post(stream=True)).status == 200
        await house.settled()
        assert [way.not_before_s for way in left if way.errand is not None] == [0.0]


async def test_pages_that_are_waited_for_hold_nothing_of_their_request() -> None:
    async with proxy_in_front_of(way="relay", engine_lease_s=1.0) as house:
        house.decoder.answers_cancel = house.decoder.consumed_signal = False
        house.decoder.hang_at.add("middle")
        call = house.call(stream=True)
        await house.decoder.reached("middle")
        call.leave()
        await call.done()
        [orphan] = house.proxy.reaper.orphans
        assert not hasattr(orphan, "context")
        await house.settled()
