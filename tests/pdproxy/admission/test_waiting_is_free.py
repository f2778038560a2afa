"""Waiting costs nothing, however many wait, and whoever's turn it is hears of it at once.

That no turn of the loop is spent on anybody, but for a look at all limits together now and then, is asserted; how long
a signal takes is measured and printed, with a bound that only something very wrong would exceed: the machine may be
busy.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import zmq

from pdproxy.aio.coarse_timer import LOOK_S
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.proxy_harness import Call, Harness, proxy_in_front_of, until
from tests.fakes.suspension import cost_of_waiting, counting_turns
from transfer.wire import KvReady, encode

NUM_WAITING = 10_000
NUM_OTHERS = 1_000
BOUND_S = 0.05


class Quiet(FakeEngine):
    """A decoder that says nothing of its KV by itself; it notes whose came last, and when a decode leg reached it."""

    def __init__(self, num_pages: int) -> None:
        super().__init__("decode", num_pages=num_pages)
        self.attempt = ""
        self.reached_at = 0.0
        self.decodes = asyncio.Event()

    def receive(self, attempt: str, num_pages: int) -> None:
        if self.signals == "lost":
            self.attempt = attempt
        super().receive(attempt, num_pages)

    async def pass_point(self, point: str) -> None:
        if point == "decode":
            self.reached_at = time.perf_counter()
            self.decodes.set()
        await super().pass_point(point)

    def kv_ready(self) -> KvReady:
        return KvReady(attempt=self.attempt, rank=0, epoch=self.epoch, num_pages=1, num_bytes=1024, transfer_s=0.001)


def num_waiting(house: Harness) -> tuple[int, int]:
    """For slots, for signals."""
    admission = house.proxy.pool.of_role("decode")[0].admission
    return admission.num_waiting, house.proxy.board.statistics().num_waiting


async def at_rest(house: Harness, for_slots: int, for_signals: int) -> None:
    """Until so many wait, and nothing else is to be done. Looks seldom, for looking has its price."""
    async with asyncio.timeout(60):
        while num_waiting(house) != (for_slots, for_signals):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def crowd(num_slots: int, size: int) -> AsyncIterator[tuple[Harness, Quiet]]:
    """`size` requests wait: of the first `num_slots`, each holds a slot and waits for its KV, the rest for a slot."""
    decoder = Quiet(num_slots)
    options: dict[str, Any] = {"max_queue": size, "kv_timeout_s": 600.0, "slot_timeout_s": 600.0}
    async with proxy_in_front_of(decoders=[decoder], **options) as house:
        decoder.signals = "lost"
        for_signals = min(size, num_slots)
        with no_collection():
            calls = [house.call(prompt=[1]) for _ in range(size)]
            await at_rest(house, size - for_signals, for_signals)
        yield house, decoder
        with no_collection():
            await disperse(house, calls)


@contextmanager
def no_collection() -> Iterator[None]:
    """Of garbage: looking for it among thousands of new tasks would take most of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def disperse(house: Harness, calls: list[Call]) -> None:
    for call in calls:
        call.leave()
    async with asyncio.timeout(60):
        await asyncio.gather(*(call.task for call in calls))
        await house.proxy.reaper.idle()


async def test_ten_thousand_waiting_requests_do_not_turn_the_loop(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with crowd(NUM_WAITING // 2, NUM_WAITING) as (house, _):
        num_turns, cpu_s = await cost_of_waiting(1.0)
        with capsys.disabled():
            print(f"\n{NUM_WAITING} requests waiting for 1 s: {num_turns} turns of the loop, {cpu_s * 1000:.1f} ms CPU")
        assert num_turns <= 40 + 1.0 / LOOK_S, (
            "the sleeper's own, those of the proxy's clocks, and the looks at all limits at once"
        )
        assert cpu_s < 0.1
        assert num_waiting(house) == (NUM_WAITING // 2, NUM_WAITING // 2)


async def turns_from_signal_to_decode(size: int) -> int:
    async with crowd(size + 2, size) as (house, decoder):
        call = house.call(prompt=[1])
        await at_rest(house, 0, size + 1)
        decoder.decodes.clear()
        with counting_turns() as turns:
            house.proxy.board.deliver(decoder.kv_ready())
            await decoder.decodes.wait()
        assert (await call.answer()).status == 200
        return turns.num


async def test_a_signal_goes_to_its_request_and_to_no_other() -> None:
    assert await turns_from_signal_to_decode(300) == await turns_from_signal_to_decode(0) <= 3


async def one_latency_s(house: Harness, decoder: Quiet, push: zmq.Socket[bytes]) -> float:
    """From the decoder's socket to the decode leg of the request that waited."""
    call = house.call(prompt=[1])
    await until(lambda: num_waiting(house) == (0, NUM_OTHERS + 1))
    decoder.decodes.clear()
    started = time.perf_counter()
    push.send(encode(decoder.kv_ready()))
    await decoder.decodes.wait()
    assert (await call.answer()).status == 200
    return decoder.reached_at - started


async def test_a_signal_arrives_at_once_while_a_thousand_others_wait(capsys: pytest.CaptureFixture[str]) -> None:
    async with crowd(NUM_OTHERS + 1, NUM_OTHERS) as (house, decoder):
        context = zmq.Context()
        push = context.socket(zmq.PUSH)
        push.connect(house.prefiller.generations()[0].body["kv_transfer_params"]["notify"])
        rounds = [sorted([await one_latency_s(house, decoder, push) for _ in range(100)]) for _ in range(3)]
        push.close(linger=0)
        context.term()
        told = ", ".join(f"{one[50] * 1000:.2f} and {one[98] * 1000:.2f} ms" for one in rounds)
        with capsys.disabled():
            print(f"\na signal among {NUM_OTHERS} waiting requests, median and 99th percentile of 100: {told}")
        assert min(one[98] for one in rounds) < BOUND_S
