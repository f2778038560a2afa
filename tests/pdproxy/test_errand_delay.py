"""When the errand is done that frees an abandoned attempt's pages: not while somebody is still at them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdproxy.attempt import Attempt
from pdproxy.engines.base import Call, Errand
from pdproxy.reaper import Reaper
from pdproxy.signals.board import Expectation, KvBoard
from transfer.wire import ProxyNotif

CALL = Call("/v1/completions", b"{}")
LONG_S = 60.0
DELAY_S = 0.1


class Decoder:
    """Whom the errand goes to. Implements `Instance`, its client and a leg, as far as the reaper looks."""

    name = "decode-0"
    status = 200

    def __init__(self) -> None:
        self.called = asyncio.Event()
        self.adapter = self.client = self

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> Decoder:
        self.called.set()
        return self

    async def read(self) -> bytes:
        return b""

    def close(self) -> None:
        """Nothing is open."""

    def read_errand(self, status: int, body: bytes) -> bool:
        return True


@dataclass
class Left:
    """An attempt that its request has left. Implements `Attempt` as far as the reaper looks."""

    errand: Errand
    decoder: Decoder
    expectation: Expectation
    manner: Any = field(default_factory=lambda: SimpleNamespace(lease_s=LONG_S))
    flight: Any = field(default_factory=lambda: SimpleNamespace(attempt="a1"))
    is_settled: bool = False
    is_void: bool = False
    is_decoded: bool = False

    def abandon(self) -> Errand:
        return self.errand

    def instance(self, role: str) -> Decoder:
        return self.decoder

    def headers(self, instance: Decoder) -> dict[str, str]:
        return {}

    def give_up(self) -> None:
        self.expectation.drop()


@asynccontextmanager
async def reaped(board: KvBoard, *, also: Left | None = None, **when: Any) -> AsyncIterator[Decoder]:
    """`also`: one more, that is nobody's to drop."""
    decoder, reaper = Decoder(), Reaper(call_timeout_s=5.0)
    running = asyncio.create_task(reaper.run())
    await asyncio.sleep(0)
    left = Left(Errand("decode", CALL, **when), decoder, board.expect("a1", {0, 1}))
    for one in (left, also):
        if one is not None:
            reaper.adopt(cast(Attempt, one))
    for _ in range(3):
        await asyncio.sleep(0)
    try:
        yield decoder
        async with asyncio.timeout(5):
            await reaper.idle()
        outcomes = reaper.statistics()
        assert (outcomes["dropped"], outcomes["expired"]) == (1, 0 if also is None else 1)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def tell(board: KvBoard, rank: int, status: str = "ready") -> None:
    board.deliver(ProxyNotif(req_id="a1", rank=rank, status=status))


async def test_at_once_where_nothing_is_said() -> None:
    async with reaped(KvBoard()) as decoder, asyncio.timeout(5):
        await decoder.called.wait()


async def test_every_rank_has_written() -> None:
    board = KvBoard()
    async with reaped(board, delay_s=LONG_S, or_ready=True) as decoder, asyncio.timeout(5):
        tell(board, 0)
        await asyncio.sleep(0.02)
        assert not decoder.called.is_set()
        tell(board, 1)
        await decoder.called.wait()


@pytest.mark.parametrize("is_failed", [False, True])
async def test_nobody_says_anything_any_more(is_failed: bool) -> None:
    """One rank has failed: the other may be writing all the same."""
    board, began = KvBoard(), asyncio.get_running_loop().time()
    async with reaped(board, delay_s=DELAY_S, or_ready=True) as decoder, asyncio.timeout(5):
        if is_failed:
            tell(board, 0, "failed")
        await decoder.called.wait()
        assert asyncio.get_running_loop().time() - began >= DELAY_S


async def test_being_ready_is_no_reason_to_meet_a_reader() -> None:
    board, began = KvBoard(), asyncio.get_running_loop().time()
    async with reaped(board, delay_s=DELAY_S) as decoder, asyncio.timeout(5):
        for rank in (0, 1):
            tell(board, rank)
        await decoder.called.wait()
        assert asyncio.get_running_loop().time() - began >= DELAY_S


class Stumbling(Decoder):
    def read_errand(self, status: int, body: bytes) -> bool:
        raise RuntimeError("a bug")


async def test_a_bug_in_one_errand_leaves_the_others_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Its own pages are free when the lease is over."""
    stumbling = Stumbling()
    left = Left(Errand("decode", CALL), stumbling, KvBoard().expect("a0", {0}))
    left.manner, left.flight = SimpleNamespace(lease_s=DELAY_S), SimpleNamespace(attempt="a0")
    async with reaped(KvBoard(), also=left, delay_s=DELAY_S / 2), asyncio.timeout(5):
        await stumbling.called.wait()
    assert "its pages are waited for" in caplog.text
