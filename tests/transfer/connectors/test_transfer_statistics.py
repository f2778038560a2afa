"""What the connector for vLLM counts of pushes and loads, by both halves between a small scheduler and real senders."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from tests.transfer.connectors.mini_vllm import HYBRID, PLAIN, TOKENS, Request, until
from tests.transfer.connectors.test_vllm_connector import NOTHING, World, new_world
from transfer.agents.fates import Fate
from transfer.agents.mock import Hold, Land
from transfer.agents.mock_write import MockWrite
from transfer.connectors.vllm.messages import StepReport
from transfer.connectors.vllm.scheduler_side import SchedulerSide
from transfer.connectors.vllm.transfer_statistics import Pushed, TransferStatistics


def counted(side: SchedulerSide) -> TransferStatistics:
    statistics = side.take_statistics()
    assert statistics is not None
    assert side.take_statistics() is None
    return statistics


def test_prompts_that_are_sent_and_loaded_are_counted_with_their_bytes() -> None:
    with new_world(PLAIN) as world:
        prompt, written = world.prompt(26), []

        def land(write: MockWrite) -> Land:
            written.append(write.num_bytes)
            return Land()

        world.agent.script = land
        for num_tokens in (10, 18, 26):
            world.decoder.remember(prompt, 22 if num_tokens == 26 else 0)
            prefilled = world.prefill(prompt[:num_tokens])
            world.until_ready(prefilled)
            answer = world.decode(prefilled)
            until(lambda: answer.state == "over", world.step, "no answer")  # noqa: B023
        world.decoder.cache.clear()
        world.check_all_free()
        sent = counted(world.prefiller.scheduler)
        assert (sent.num_pushes, sent.failed_pushes.total()) == (3, 0)
        assert sent.sent_bytes == sum(written)
        assert sent.present_blocks == 2 + 5, "two of the second lie in the buffer, five of the third in the cache"
        assert len(sent.page_waits_s) == len(sent.send_tails_s) == 3
        assert all(0 < seconds < 20 for seconds in sent.page_waits_s + sent.send_tails_s)
        loaded = counted(world.decoder.scheduler)
        assert (loaded.num_loads, loaded.failed_loads.total(), loaded.num_pushes) == (3, 0, 0)


def preempted(world: World) -> None:
    prefilled = world.prefill(world.prompt(30))
    writes: list[MockWrite] = []

    def hold(write: MockWrite) -> Fate:
        writes.append(write)
        return Hold()

    world.agent.script = hold
    until(lambda: prefilled.num_computed > 8, lambda: world.step(3), "never runs")
    until(lambda: bool(writes), lambda: world.step(0), "never writes")  # however long it takes, more is not computed
    world.prefiller.preempt(prefilled)
    until(lambda: prefilled.state == "over", world.step, "not computed again")
    for write in writes:
        write.land()


def given_up(world: World) -> None:
    prefilled = world.prefill(world.prompt(30))
    until(lambda: prefilled.num_computed > 8, lambda: world.step(3), "never runs")
    world.prefiller.end(prefilled, is_whole=False)


def not_awaited(world: World) -> None:
    prefilled = world.prefill(world.prompt(10))
    prefilled.reads_cache = False
    until(lambda: prefilled.state == "over", world.step, "it hangs")


def peer_lost(world: World) -> None:
    receivers = [{"rank": 0, "host": "127.0.0.1", "port": 1}]
    lost = Request("lost", world.prompt(10), {"attempt": "lost", "timeout_s": 0.3, "receivers": receivers})
    world.prefiller.add(lost)
    until(lambda: lost.state == "over", world.step, "it hangs")


def refused(world: World) -> None:
    prefilled = world.prefill(world.prompt(17 * TOKENS))
    until(lambda: prefilled.state == "over", lambda: world.step(30), "it hangs")


def withdrawn(world: World) -> None:
    prefilled = world.prefill(world.prompt(30))
    until(lambda: prefilled.num_computed > 8, lambda: world.step(3), "never runs")
    assert world.decoder.inbox is not None
    assert prefilled.kv_transfer_params is not None
    world.decoder.inbox.release(prefilled.kv_transfer_params["attempt"])
    outgoing = world.prefiller.scheduler._outgoing[prefilled.request_id]
    until(lambda: outgoing.failure is not None, lambda: world.step(0), "not told")  # while the prompt is not whole
    until(lambda: prefilled.state == "over", world.step, "it hangs")


@pytest.mark.parametrize("fault", [preempted, given_up, not_awaited, peer_lost, refused, withdrawn])
def test_a_push_that_fails_is_counted_once_by_its_reason(fault: Callable[[World], None]) -> None:
    with new_world() as world:
        fault(world)
        world.check_all_free()
        statistics = counted(world.prefiller.scheduler)
        assert (statistics.num_pushes, statistics.failed_pushes) == (0, {fault.__name__: 1})
        assert statistics.send_tails_s == []


def test_a_load_that_fails_is_counted_by_its_reason() -> None:
    with new_world() as world:
        assert world.decoder.inbox is not None
        for reason, prompt in (("lost", world.prompt(10)), ("other_prompt", world.prompt(11))):
            prefilled = world.prefill(prompt)
            world.until_ready(prefilled)
            assert prefilled.reply is not None
            if reason == "lost":
                world.decoder.inbox.release(prefilled.reply["attempt"])
            answer = Request(reason, prompt if reason == "lost" else world.prompt(11), prefilled.reply)
            world.decoder.add(answer)
            until(lambda: answer.state == "over", world.step, "it hangs")  # noqa: B023
        world.check_all_free()
        assert counted(world.decoder.scheduler).failed_loads == {"lost": 1, "other_prompt": 1}


def test_of_several_ranks_bytes_are_a_sum_and_times_are_the_longest() -> None:
    """They end in different steps of vLLM."""
    scheduler = SchedulerSide(TOKENS, 2, HYBRID.groups)
    scheduler.heard(StepReport(pushed={"a": Pushed(10, 3, wait_s=1.0, tail_s=4.0)}), [])
    assert scheduler.take_statistics() is None
    scheduler.heard(StepReport(pushed={"a": Pushed(20, 3, wait_s=2.0, tail_s=3.0)}), [], ["a"])
    both = counted(scheduler)
    assert (both.num_pushes, both.sent_bytes, both.present_blocks) == (1, 30, 3)
    assert (both.page_waits_s, both.send_tails_s) == ([2.0], [4.0])
    report = StepReport(pushed={"b": Pushed(failure="withdrawn")})  # because the other has failed
    report.add(StepReport(pushed={"b": Pushed(failure="peer_lost")}))
    scheduler.heard(report, [], ["b"])
    assert counted(scheduler).failed_pushes == {"peer_lost": 1}
    assert not scheduler.take_orders(NOTHING)


def test_what_travels_between_processes_is_what_was_counted() -> None:
    one, other = TransferStatistics(), TransferStatistics(pages={"free": 3})
    one.count_push(Pushed(10, 3, 1.0, 4.0), None)
    other.count_push(Pushed(wait_s=1.0), "preempted")
    other.count_load(None)
    one.add(TransferStatistics.of(msgspec.msgpack.decode(msgspec.msgpack.encode(other.as_data()))))
    assert (one.num_pushes, one.failed_pushes, one.num_loads) == (1, {"preempted": 1}, 1)
    assert (one.page_waits_s, one.send_tails_s, one.pages) == ([1.0, 1.0], [4.0], {"free": 3})
    assert one.summary()["Avg wait for pages (ms)"] == 1000.0
