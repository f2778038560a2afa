"""Decoders are told that a prefiller's process has ended, until they have heard it."""

from __future__ import annotations

import asyncio

import pytest

from pdproxy.fleet import ended
from tests.fakes.calls import until
from tests.fakes.fake_engine import BROKEN, FakeEngine, error_reply
from tests.fakes.proxy_harness import Harness, proxy_in_front_of

PATH = "/kv_transfer/sender_ended"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended, "RETRY_S", 0.01)


async def restart(house: Harness, engine: FakeEngine) -> str:
    """Returns the epoch of the process that has ended, once the proxy has seen the next one."""
    [instance] = [one for one in house.proxy.pool.instances if one.client is house.client_of(engine)]
    before = engine.epoch
    engine.restart()
    instance.suspected.set()
    await until(lambda: instance.epoch == engine.epoch)
    return before


def num_told(decoder: FakeEngine) -> int:
    return sum(seen.path == PATH for seen in decoder.calls)


async def test_every_decoder_is_told_once() -> None:
    prefillers = [FakeEngine("prefill"), FakeEngine("prefill")]
    decoders = [FakeEngine("decode"), FakeEngine("decode")]
    async with proxy_in_front_of(prefillers, decoders) as house:
        first = await restart(house, prefillers[0])
        await until(lambda: all(decoder.ended_senders == [first] for decoder in decoders))
        second = await restart(house, prefillers[1])
        await until(lambda: all(decoder.ended_senders == [first, second] for decoder in decoders))
        await asyncio.sleep(0.05)
        assert [num_told(decoder) for decoder in decoders] == [2, 2]
        assert [num_told(prefiller) for prefiller in prefillers] == [0, 0]


@pytest.mark.parametrize("failure", [BROKEN, error_reply(503, "busy")], ids=["broken", "busy"])
async def test_one_that_does_not_answer_is_told_again_and_keeps_nobody_waiting(failure: object) -> None:
    prefiller, decoders = FakeEngine("prefill"), [FakeEngine("decode"), FakeEngine("decode")]
    async with proxy_in_front_of([prefiller], decoders) as house:
        decoders[0].fail_at[PATH if failure is not BROKEN else "sender_ended"] = failure  # type: ignore[assignment]
        epoch = await restart(house, prefiller)
        await until(lambda: num_told(decoders[0]) >= 3)
        assert decoders[1].ended_senders == [epoch]
        assert num_told(decoders[1]) == 1
        decoders[0].fail_at.clear()
        await until(lambda: decoders[0].ended_senders == [epoch])
        await asyncio.sleep(0.05)
        assert decoders[0].ended_senders == [epoch]


async def test_a_frozen_decoder_does_not_keep_another_one_from_hearing_of_the_next() -> None:
    prefillers, decoders = [FakeEngine("prefill"), FakeEngine("prefill")], [FakeEngine("decode"), FakeEngine("decode")]
    async with proxy_in_front_of(prefillers, decoders, probe_timeout_s=0.05) as house:
        decoders[0].hang_at.add("sender_ended")
        first = await restart(house, prefillers[0])
        second = await restart(house, prefillers[1])
        await until(lambda: sorted(decoders[1].ended_senders) == sorted([first, second]))
        decoders[0].let_go("sender_ended")
        await until(lambda: sorted(set(decoders[0].ended_senders)) == sorted([first, second]))


async def test_one_that_knows_no_such_call_is_told_once() -> None:
    prefiller, decoder = FakeEngine("prefill"), FakeEngine("decode")
    async with proxy_in_front_of([prefiller], [decoder]) as house:
        decoder.fail_at[PATH] = error_reply(404, "no such path")
        await restart(house, prefiller)
        await until(lambda: num_told(decoder) == 1)
        await asyncio.sleep(0.05)
        assert num_told(decoder) == 1


async def test_a_decoder_that_is_another_process_by_then_need_not_hear_it() -> None:
    prefiller, decoder = FakeEngine("prefill"), FakeEngine("decode")
    async with proxy_in_front_of([prefiller], [decoder]) as house:
        decoder.fail_at[PATH] = error_reply(503, "busy")
        await restart(house, prefiller)
        await until(lambda: num_told(decoder) >= 1)
        before = await restart(house, decoder)
        decoder.fail_at.clear()
        await asyncio.sleep(0.05)
        assert set(decoder.ended_senders) <= {before}, "its own end is no news that could hurt"
