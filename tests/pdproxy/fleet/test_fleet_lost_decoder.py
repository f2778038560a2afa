"""What waits at a decoder that has gone for good does not wait for its deadline."""

from __future__ import annotations

import asyncio

import pytest

from pdproxy.errors import KvFailed
from pdproxy.fleet.breaker import BreakerState
from pdproxy.kv_signals.board import KvBoard
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fleet import Held
from tests.fakes.proxy_harness import proxy_in_front_of, until
from transfer.wire import KvReady, KvReleased


def ready(rank: int = 0, epoch: str = "e1") -> KvReady:
    return KvReady(attempt="a", rank=rank, epoch=epoch, num_pages=1, num_bytes=1, transfer_s=0.0)


def released(rank: int = 0, epoch: str = "e1") -> KvReleased:
    return KvReleased(attempt="a", rank=rank, epoch=epoch, num_pages=1, reason="consumed")


async def test_whoever_waits_is_told_at_once_and_others_are_not() -> None:
    board = KvBoard()
    lost, kept = board.expect("a", [0, 1], epoch="e1"), board.expect("b", [0], epoch="e2")
    nameless = board.expect("c", [0])
    waiting = asyncio.ensure_future(lost.ready(board.now() + 60))
    await asyncio.sleep(0)
    assert board.fail_epoch("e1", "d0: refused") == 1
    with pytest.raises(KvFailed, match="d0: refused"):
        await waiting
    assert [one.failed.is_set() for one in (lost, kept, nameless)] == [True, False, False]
    assert board.fail_epoch("e1", "again") == 0
    assert board.statistics().num_lost == 1
    for one in (lost, kept, nameless):
        one.drop()
    board.check_integrity()


async def test_kv_that_was_ready_is_gone_as_well() -> None:
    board = KvBoard()
    expectation = board.expect("a", [0], epoch="e1")
    board.deliver(ready())
    assert expectation.is_ready
    board.fail_epoch("e1", "d0: it was restarted")
    with pytest.raises(KvFailed, match="restarted"):
        await expectation.ready(board.now() + 60)
    expectation.drop()
    board.check_integrity()


async def test_only_the_rank_that_has_gone() -> None:
    board = KvBoard()
    expectation = board.expect("a", [0, 1], epoch={0: "e1", 1: "e2"})
    board.deliver(ready(0))
    board.deliver(ready(1, "e2"))
    board.deliver(released(0))
    assert board.fail_epoch("e1", "gone") == 0, "it had given its pages back before"
    assert board.fail_epoch("e2", "gone") == 1
    assert expectation.failure is not None
    assert "rank 1" in expectation.failure
    expectation.drop()
    board.check_integrity()


async def test_failed_is_an_event_for_every_kind_of_failure() -> None:
    """A prefill leg is raced against it."""
    board = KvBoard()
    expectation = board.expect("a", [0], epoch="e1")
    racing = asyncio.ensure_future(expectation.failed.wait())
    await asyncio.sleep(0)
    assert not racing.done()
    board.deliver(released())
    assert await racing
    board.check_integrity()


# ── the whole proxy ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_decoder_that_refuses_connections_loses_who_waits_for_kv_there_to_another() -> None:
    async with proxy_in_front_of(decoders=[FakeEngine("decode"), FakeEngine("decode")]) as house:
        for decoder in house.decoders:
            decoder.signals = "lost"
        call = house.call()
        await until(lambda: house.proxy.board.statistics().num_waiting == 1)
        dead = next(i for i, decoder in enumerate(house.decoders) if decoder.pages)
        house.decoders[1 - dead].signals = "ready"
        instance = house.proxy.pool.instances[1 + dead]
        house.client_of(house.decoders[dead]).is_up = False
        await house.proxy.probe.look(instance)
        answer = await call.answer()
        assert (answer.status, answer.headers["x-pdproxy-decoder"]) == (200, f"decode-{1 - dead}")
        assert instance.held == house.decoders[dead].num_occupied == 1, "it may live on"
        house.client_of(house.decoders[dead]).is_up = True
        instance.suspected.set()
        await house.settled()
        assert instance.held == house.decoders[dead].num_occupied == 0


async def test_a_decoder_that_goes_down_ends_the_prefill_leg_that_waits_for_its_pages() -> None:
    """The prefiller would look for it until its own time is over."""
    async with proxy_in_front_of(decoders=[FakeEngine("decode"), FakeEngine("decode")]) as house:
        house.prefiller.hang_at.add("prefill")
        call = house.call()
        await house.prefiller.reached("prefill")
        dead = next(i for i, one in enumerate(house.proxy.pool.of_role("decode")) if one.held)
        house.client_of(house.decoders[dead]).is_up = False
        await house.proxy.probe.look(house.proxy.pool.instances[1 + dead])
        house.prefiller.hang_at.discard("prefill")  # who hangs there goes on hanging, the next one does not
        answer = await call.answer()
        assert (answer.status, answer.headers["x-pdproxy-decoder"]) == (200, f"decode-{1 - dead}")
        assert house.prefiller.closed == ["/v1/completions"]
        house.client_of(house.decoders[dead]).is_up = True
        house.proxy.pool.instances[1 + dead].suspected.set()
        await house.settled()


async def test_a_restarted_decoder_fails_the_attempts_of_its_former_self() -> None:
    async with proxy_in_front_of(when_no_decoder="refuse") as house:
        house.decoder.signals = "lost"
        call = house.call()
        await until(lambda: house.proxy.board.statistics().num_waiting == 1)
        house.decoder.signals = "ready"
        house.decoder.pages.clear()
        house.decoder.epoch = "second"
        await house.proxy.probe.look(house.proxy.pool.instances[1])
        answer = await call.answer()
        assert (answer.status, answer.error["code"]) == (502, "kv_transfer_failed"), "no other is ready"
        assert "decode-0: it was restarted" in answer.error["message"]
        await house.settled()
        assert house.proxy.board.statistics().num_lost == 1


async def test_those_who_only_wait_lose_nothing_when_a_decoder_is_lost_and_no_retry_is_spent() -> None:
    """Nothing was sent for them; that many went at once must not leave others without a retry."""
    decoders = [FakeEngine("decode"), FakeEngine("decode")]
    options = {"retries": 0, "retry_share": 0.0, "retry_min_per_s": 0.0, "decode_policy": "round_robin"}
    async with proxy_in_front_of(decoders=decoders, **options) as house:
        leases = [await Held(one, house.decoder.num_pages).wait() for one in house.proxy.pool.of_role("decode")]
        calls = [house.call() for _ in range(10)]
        await until(lambda: house.admission.num_waiting == len(calls))
        shares = [one.pages.num_waiting for one in house.proxy.pool.of_role("decode") if one.pages is not None]
        assert shares == [5, 5]
        house.client_of(decoders[0]).is_up = False
        await house.proxy.probe.look(house.proxy.pool.instances[1])
        assert house.admission.num_waiting == len(calls)
        for lease in leases:
            lease.release()
        answers = [await call.answer() for call in calls]
        assert [answer.status for answer in answers] == [200] * len(calls)
        assert {answer.headers["x-pdproxy-decoder"] for answer in answers} == {"decode-1"}
        house.client_of(decoders[0]).is_up = True
        await house.settled()


async def test_a_decoder_that_dies_under_load_is_no_fault_of_the_prefiller_that_pushes_to_it() -> None:
    decoders = [FakeEngine("decode"), FakeEngine("decode")]
    async with proxy_in_front_of(decoders=decoders, decode_policy="round_robin", retry_min_per_s=10.0) as house:
        prefiller, dying, _ = house.proxy.pool.instances
        house.prefiller.hang_at |= {"prefill", "prefill_done"}
        calls = [house.call() for _ in range(20)]
        await until(lambda: prefiller.num_legs == len(calls))
        assert dying.held == 10
        decoders[0].takes_kv = False
        house.client_of(decoders[0]).is_up = False
        house.prefiller.let_go("prefill")
        await until(lambda: len(house.prefiller.generations()) == 30 or prefiller.breaker.state is BreakerState.OPEN)
        assert prefiller.breaker.state is BreakerState.CLOSED
        assert prefiller.breaker.statistics().num_faults <= 2
        house.prefiller.let_go("prefill_done")
        answers = [await call.answer() for call in calls]
        assert [answer.status for answer in answers] == [200] * len(calls)
        assert {answer.headers["x-pdproxy-decoder"] for answer in answers} == {"decode-1"}
        page = (await house.get("/metrics")).body.decode()
        assert 'pdproxy_legs_total{instance="prefill-0",leg="prefill",outcome="no_kv"}' in page
        house.client_of(decoders[0]).is_up = True
        await house.settled()


async def test_a_prefiller_whose_kv_reaches_nobody_is_left_alone_in_the_end() -> None:
    async with proxy_in_front_of(retries=0, breaker_faults=3) as house:
        prefiller, decoder = house.proxy.pool.instances
        house.decoder.takes_kv = False
        for _ in range(3):
            assert prefiller.is_routable
            answer = await house.post()
            assert (answer.status, answer.error["code"]) == (502, "leg_failed")
            assert "prefill leg on instance 'prefill-0'" in answer.error["message"]
            await until(lambda: not decoder.is_suspected)
        assert decoder.is_ready
        assert prefiller.breaker.state is BreakerState.OPEN
