"""The connector for vLLM between engines of unlike numbers of tensor-parallel ranks, with faults on single ranks."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.e2e.cluster import free_ports
from tests.transfer.connectors.mini_vllm import HYBRID, LATENT, PLAIN, Request, no_facts, until
from tests.transfer.connectors.test_vllm_connector import World, new_world
from transfer.agents.mock import Hold, Land, MockAgent, MockFabric
from transfer.agents.mock_write import MockWrite
from transfer.connectors.vllm import rank_thread
from transfer.connectors.vllm.other_ranks import OtherRanks
from transfer.connectors.vllm.private_socket import listen_privately
from transfer.connectors.vllm.rank_messages import AskToTake
from transfer.connectors.vllm.rank_thread import RankThread
from transfer.connectors.vllm.receiver_thread import ReceiverThread
from transfer.errors import AttemptLost, TransferError
from transfer.memory.buffer import PagedBuffer
from transfer.memory.reservations import Holding
from transfer.plan.layout import KvLayout
from transfer.roles.handshake import Identity
from transfer.roles.receiver import Receiver, ReceiverConfig

AT_ONCE_S = 5.0
"""Less than any deadline of the ranks' own."""
OTHER_RANK = """
import sys
from tests.transfer.connectors.mini_vllm import HYBRID
from transfer.agents.mock import MockAgent, MockFabric
from transfer.connectors.vllm.rank_thread import RankThread
from transfer.memory.buffer import PagedBuffer
from transfer.roles.handshake import Identity

layout = HYBRID.of_rank(2, 1)
make = lambda: (MockAgent(MockFabric(), "other"), PagedBuffer(16, layout.page_bytes))
RankThread(1).join(sys.argv[1], make, Identity("mini", layout))
print("joined", flush=True)
sys.stdin.read()
"""
"""A worker of rank 1, as a process of its own."""


def transfer(world: World, prompt: list[int]) -> Request:
    """Returns the decoder's request when it is over."""
    prefilled = world.prefill(prompt)
    world.until_ready(prefilled)
    decoded = world.decode(prefilled)
    until(lambda: decoded.state == "over", world.step, "no answer")
    return decoded


def rank_of(world: World, index: int) -> RankThread:
    inbox = world.decoder.ranks[index].inbox
    assert isinstance(inbox, RankThread)
    return inbox


@pytest.mark.parametrize(
    ("kv", "num_ranks"),
    [
        *((HYBRID, sizes) for sizes in ((1, 2), (2, 1), (4, 2))),
        *((PLAIN, sizes) for sizes in ((1, 4), (2, 2))),
        *((LATENT, sizes) for sizes in ((1, 2), (2, 1), (2, 2), (1, 4), (4, 2))),
    ],
    ids=lambda one: str(one) if isinstance(one, tuple) else one.layers[0].kind,
)
def test_every_rank_of_the_decoder_has_every_token_but_the_last(kv: KvLayout, num_ranks: tuple[int, int]) -> None:
    """Also where there are fewer heads than ranks, and with MLA, whose one latent every rank has."""
    with new_world(kv, num_ranks) as world:
        for num_tokens in (1, 9, 26):
            decoded = transfer(world, world.prompt(num_tokens))
            assert decoded.wrong == []
            assert not decoded.failed_load
        world.check_all_free()


@pytest.mark.parametrize(
    ("kv", "num_ranks"),
    [(PLAIN, (4, 1)), (PLAIN, (4, 2)), (LATENT, (2, 1)), (LATENT, (4, 2))],
    ids=lambda one: str(one) if isinstance(one, tuple) else one.layers[0].kind,
)
def test_a_rank_that_writes_nothing_does_not_hide_what_the_decoder_has(
    kv: KvLayout, num_ranks: tuple[int, int]
) -> None:
    """Several of the prefiller's ranks have the same heads, and one of them sends. The last word is another's."""
    with new_world(kv, num_ranks) as world:
        prompt = world.prompt(26)
        world.decoder.remember(prompt, 16)
        prefilled = world.prefill(prompt)
        world.until_ready(prefilled)
        assert prefilled.reply is not None
        assert prefilled.reply["num_cached"] == 4
        decoded = world.decode(prefilled)
        until(lambda: decoded.state == "over", world.step, "no answer")
        assert decoded.wrong == []
        assert not decoded.failed_load
        world.decoder.cache.clear()
        world.check_all_free()
        statistics = world.prefiller.scheduler.take_statistics()
        assert statistics is not None
        assert statistics.present_blocks == 4


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_on_one_rank_is_a_failed_load_for_all(rank: int) -> None:
    """And nobody else is given those pages for what they should hold."""
    with new_world(PLAIN, num_ranks=(1, 2)) as world:
        prefilled = world.prefill(world.prompt(10))
        world.until_ready(prefilled)
        world.decoder.ranks[rank].buffer.tags.fill_(7)  # as if another attempt had written there
        decoded = world.decode(prefilled)
        until(lambda: decoded.state == "over", world.step, "it hangs")
        assert decoded.failed_load
        world.check_all_free()
        assert world.decoder.inbox is not None
        assert world.decoder.inbox._takes is not None
        assert world.decoder.inbox._takes.num_wrong_tags + world.decoder.receiver.num_wrong_tags == 1
        again = transfer(world, prefilled.prompt)
        assert again.wrong == []
        assert not again.failed_load


def test_a_rank_that_hears_nothing_of_rank_0_fails_its_load_and_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_thread, "TAKE_TIMEOUT_S", 0.2)
    with new_world(num_ranks=(1, 2)) as world:
        deaf, send = rank_of(world, 1), rank_of(world, 1)._send
        monkeypatch.setattr(deaf, "_send", lambda message: None if isinstance(message, AskToTake) else send(message))
        assert transfer(world, world.prompt(10)).failed_load
        world.check_all_free()
        monkeypatch.setattr(deaf, "_send", send)
        decoded = transfer(world, world.prompt(10))
        assert decoded.wrong == []
        assert not decoded.failed_load


def test_pages_come_back_only_when_the_last_rank_has_copied() -> None:
    with new_world(num_ranks=(1, 2)) as world:
        prefilled = world.prefill(world.prompt(10))
        world.until_ready(prefilled)
        assert prefilled.reply is not None
        attempt, inboxes = prefilled.reply["attempt"], [rank.inbox for rank in world.decoder.ranks]
        for inbox in reversed(inboxes):  # whichever asks first
            assert inbox is not None
            assert inbox.take(attempt, 9)
        for inbox in inboxes:
            assert inbox is not None
            assert world.holding(prefilled) is Holding.TAKEN
            inbox.consumed(attempt)
        until(lambda: world.holding(prefilled) is None, world.step, "its pages are held")
        world.check_all_free()


def test_what_rank_0_refuses_is_refused_on_every_rank_whoever_asks_first() -> None:
    with new_world(num_ranks=(1, 2)) as world:
        prefilled = world.prefill(world.prompt(10))
        world.until_ready(prefilled)
        assert prefilled.reply is not None
        attempt, inboxes = prefilled.reply["attempt"], [rank.inbox for rank in world.decoder.ranks]
        with pytest.raises(AttemptLost, match="another prompt"):
            inboxes[1].take(attempt, 99)  # type: ignore[union-attr]
        with pytest.raises(AttemptLost, match="another prompt"):
            inboxes[0].take(attempt, 9)  # type: ignore[union-attr]
        for inbox in inboxes:
            inbox.release(attempt)  # type: ignore[union-attr]
        world.check_all_free()


@pytest.mark.parametrize("num_ranks", [(1, 2), (2, 2)], ids=str)
def test_a_cancel_half_way_keeps_the_pages_until_no_rank_can_be_written(num_ranks: tuple[int, int]) -> None:
    with new_world(num_ranks=num_ranks) as world:
        writes: list[MockWrite] = []

        def hold(write: MockWrite) -> Hold:
            writes.append(write)
            return Hold()

        for agent in world.agents:
            agent.script = hold
        prefilled = world.prefill(world.prompt(10))
        until(lambda: len(writes) >= max(num_ranks), world.step, "nothing is written")
        assert prefilled.kv_transfer_params is not None
        inbox, attempt = world.decoder.inbox, prefilled.kv_transfer_params["attempt"]
        assert inbox is not None
        inbox._call(lambda receiver, _: receiver.cancel(attempt))
        for _ in range(20):
            world.step()
        assert world.holding(prefilled) is Holding.QUARANTINED
        for agent in world.agents:
            agent.script = lambda write: Land()
        for write in writes:
            write.land()
        world.check_all_free()
        assert transfer(world, world.prompt(10)).wrong == []


def test_a_rank_whose_process_is_gone_is_waited_for_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine's end is vLLM's to make; until then it says that it is not well."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    layout = HYBRID.of_rank(2, 0)
    listener, path = listen_privately(socket.SOCK_STREAM, 1)
    assert os.stat(os.path.dirname(path)).st_mode & 0o77 == 0
    child = subprocess.Popen(
        [sys.executable, "-c", OTHER_RANK, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    thread = ReceiverThread(no_facts, lambda: True, "127.0.0.1", free_ports(1)[0])
    try:
        thread.start()
        agent, others = MockAgent(MockFabric(), "first"), OtherRanks(listener, path, 2)
        buffer = PagedBuffer(16, layout.page_bytes)
        thread.receive(agent, buffer, Identity("mini", layout), ReceiverConfig(), None, others)
        assert list(tmp_path.iterdir()) == []
        assert thread.is_healthy()
        thread._do(others.delivered(), AT_ONCE_S)
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)  # until it stands
        failed: list[BaseException] = []

        def wait_for_it() -> None:
            try:
                thread._do(others.delivered(), 3 * AT_ONCE_S)
            except TransferError as error:
                failed.append(error)

        waiting = threading.Thread(target=wait_for_it)
        waiting.start()
        time.sleep(0.1)
        assert waiting.is_alive(), "it does not wait for a rank that stands still"
        child.kill()
        waiting.join(AT_ONCE_S)
        assert "rank 1 of this engine is gone" in str(failed[0])
        assert not thread.is_healthy()
        assert "rank 1 of this engine is gone: nothing can be received any more" in caplog.text
        with pytest.raises(AttemptLost, match="rank 1 of this engine is gone"):
            thread.take("an attempt", 9)
    finally:
        child.kill()
        child.communicate()
        thread.close()


def test_a_rank_that_is_gone_reads_nothing_any_more_and_its_pages_come_back(caplog: pytest.LogCaptureFixture) -> None:
    with new_world(num_ranks=(1, 2)) as world:
        prefilled = world.prefill(world.prompt(10))
        world.until_ready(prefilled)
        assert prefilled.reply is not None
        attempt, (first, second) = prefilled.reply["attempt"], [rank.inbox for rank in world.decoder.ranks]
        assert first is not None
        assert second is not None
        first.take(attempt, 9)
        second.take(attempt, 9)
        first.consumed(attempt)
        assert world.holding(prefilled) is Holding.TAKEN
        second.close()
        until(lambda: world.holding(prefilled) is None, lambda: None, "its pages are held")
    assert "ERROR" not in caplog.text, "vLLM has ended it"


def test_a_rank_whose_rank_0_is_gone_fails_its_loads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_world(num_ranks=(1, 2)) as world:
        first, second, failed = world.decoder.ranks[0].inbox, rank_of(world, 1), []
        assert first is not None

        def take() -> None:
            with pytest.raises(TransferError, match="rank 0 of this engine is gone"):
                second.take("an attempt", 9)
            failed.append(time.monotonic())

        monkeypatch.setattr(second, "_send", lambda message: None)  # rank 0 does not even hear of it
        loading = threading.Thread(target=take)
        loading.start()
        until(lambda: bool(second._asked), lambda: None, "it does not ask")
        assert not failed
        began = time.monotonic()
        first.close()
        loading.join()
        assert failed[0] - began < AT_ONCE_S
        take()
        assert failed[1] - began < AT_ONCE_S


def test_a_rank_that_cannot_begin_is_known_to_rank_0_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    layout = HYBRID.of_rank(2, 0)
    listener, path = listen_privately(socket.SOCK_STREAM, 1)

    def fail() -> tuple[MockAgent, PagedBuffer]:
        raise TransferError("no memory is left")

    def join() -> None:
        with pytest.raises(TransferError, match="no memory"):
            RankThread(1).join(path, fail, Identity("mini", HYBRID.of_rank(2, 1)))

    thread, joining = (
        ReceiverThread(no_facts, lambda: True, "127.0.0.1", free_ports(1)[0]),
        threading.Thread(target=join),
    )
    thread.start()
    joining.start()
    agent, buffer = MockAgent(MockFabric(), "first"), PagedBuffer(16, layout.page_bytes)
    began = time.monotonic()
    with pytest.raises(TransferError, match="another rank of this engine ended before it had joined"):
        thread.receive(agent, buffer, Identity("mini", layout), ReceiverConfig(), None, OtherRanks(listener, path, 2))
    assert time.monotonic() - began < AT_ONCE_S
    joining.join()
    thread.close()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_ends_while_the_receiver_is_opened_is_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else attempts would be kept for it that the others have read."""
    listener, path = listen_privately(socket.SOCK_STREAM, 1)
    others, second, start = OtherRanks(listener, path, 2), RankThread(1), Receiver.start

    async def start_late(receiver: Receiver) -> None:
        second._loop.call_soon_threadsafe(second._writer.close)  # type: ignore[union-attr]
        while others.lost is None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await start(receiver)

    monkeypatch.setattr(Receiver, "start", start_late)
    layout = HYBRID.of_rank(2, 1)
    made = MockAgent(MockFabric(), "other"), PagedBuffer(16, layout.page_bytes)
    joining = threading.Thread(target=second.join, args=(path, lambda: made, Identity("mini", layout)))
    thread = ReceiverThread(no_facts, lambda: True, "127.0.0.1", free_ports(1)[0])
    layout = HYBRID.of_rank(2, 0)
    agent, buffer = MockAgent(MockFabric(), "first"), PagedBuffer(16, layout.page_bytes)
    try:
        thread.start()
        joining.start()
        with pytest.raises(TransferError, match="rank 1 of this engine is gone"):
            thread.receive(agent, buffer, Identity("mini", layout), ReceiverConfig(), None, others)
    finally:
        joining.join()
        thread.close()
        second.close()


def test_a_socket_whose_path_is_too_long_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with pytest.raises(TransferError, match="TMPDIR"):
        listen_privately(socket.SOCK_STREAM, 1)
    assert list(folder.iterdir()) == []
