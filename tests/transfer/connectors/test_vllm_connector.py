"""Both halves of the connector for vLLM, between a small scheduler of blocks and real senders and receivers."""

from __future__ import annotations

import os
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from tests.transfer.connectors.mini_vllm import HYBRID, PLAIN, TOKENS, WINDOWED, MiniVllm, Request, until
from transfer import wire
from transfer.agents.fates import Fate
from transfer.agents.mock import Hold, Land, MockAgent, MockFabric
from transfer.agents.mock_write import MockWrite
from transfer.connectors.vllm import worker_side
from transfer.connectors.vllm.messages import StepReport
from transfer.connectors.vllm.prompt_digest import prompt_digest
from transfer.connectors.vllm.scheduler_side import SchedulerSide
from transfer.connectors.vllm.worker_side import WorkerSide
from transfer.memory.reservations import Holding
from transfer.plan.layout import KvLayout
from transfer.roles.epochs import epoch_of_rank

SEED = int(os.environ.get("PDPROXY_TEST_SEED", "11"))

NOTHING = SimpleNamespace(
    scheduled_new_reqs=[],
    scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[]),
    num_scheduled_tokens={},
    preempted_req_ids=set(),
)
"""A step of vLLM in which nothing is computed."""


def lora(name: str) -> SimpleNamespace:
    return SimpleNamespace(lora_name=name)


def image(identifier: str, offset: int = 1) -> SimpleNamespace:
    place = SimpleNamespace(offset=offset, length=2)
    return SimpleNamespace(modality="image", identifier=identifier, mm_position=place)


class World:
    """A prefiller and a decoder. `requests` are what was asked so far."""

    def __init__(
        self,
        num_blocks: int = 60,
        kv: KvLayout = HYBRID,
        num_ranks: tuple[int, int] = (1, 1),
        pages: tuple[int, int] = (1, 1),
    ) -> None:
        self.fabric = MockFabric()
        self.agents = [
            MockAgent(self.fabric, epoch_of_rank("prefiller", i) if i else "prefiller") for i in range(num_ranks[0])
        ]
        self.agent = self.agents[0]
        options: dict[str, Any] = {"num_blocks": num_blocks, "kv": kv}
        self.prefiller = MiniVllm(
            "prefiller",
            self.agents.__getitem__,
            sends=True,
            num_ranks=num_ranks[0],
            pages_per_block=pages[0],
            **options,
        )
        self.decoder = MiniVllm(
            "decoder",
            lambda rank: MockAgent(self.fabric, f"decoder {rank}"),
            sends=False,
            num_ranks=num_ranks[1],
            pages_per_block=pages[1],
            **options,
        )

    def prompt(self, num_tokens: int) -> list[int]:
        return [random.randrange(1, 1000) for _ in range(num_tokens)]

    def prefill(self, prompt: list[int], timeout_s: float = 30.0, **more: object) -> Request:
        attempt = uuid.uuid4().hex
        params = more | {
            "attempt": attempt,
            "receivers": [msgspec.to_builtins(end) for end in self.decoder.receiver.endpoints],
            "timeout_s": timeout_s,
        }
        request = Request(f"prefill {attempt[:6]}", prompt, params)
        self.prefiller.add(request)
        return request

    def decode(self, prefilled: Request, name: str = "decode") -> Request:
        assert prefilled.kv_transfer_params is not None
        request = Request(f"{name} {prefilled.request_id}", prefilled.prompt, prefilled.reply)
        self.decoder.add(request)
        return request

    def holding(self, prefilled: Request) -> Holding | None:
        assert prefilled.kv_transfer_params is not None
        reservation = self.decoder.receiver.reservations.get(prefilled.kv_transfer_params["attempt"])
        return None if reservation is None else reservation.holding

    def step(self, budget: int = 7) -> None:
        self.prefiller.step(budget)
        self.decoder.step(budget)

    def until_ready(self, prefilled: Request) -> None:
        """Waits as a proxy does: for the prefiller's answer, and for the decoder's word."""

        def is_ready() -> bool:
            assert "failure" not in (prefilled.reply or {}), prefilled.reply
            return prefilled.reply is not None and self.holding(prefilled) is Holding.READY

        until(is_ready, self.step, "the KV is not ready")

    def check_all_free(self) -> None:
        """Every block and page is back."""
        engines = self.prefiller, self.decoder
        until(lambda: not any(e.kept or e.requests for e in engines), self.step, "a request is kept")
        for engine in engines:
            assert len(engine.free) == len(set(engine.free)) == 59, engine.name
        pages = self.decoder.receiver.reservations
        until(lambda: pages.num_free == pages.num_pages, self.step, f"pages are held: {pages!r}")
        pages.check_integrity()


@contextmanager
def new_world(
    kv: KvLayout = HYBRID, num_ranks: tuple[int, int] = (1, 1), pages: tuple[int, int] = (1, 1)
) -> Iterator[World]:
    """`pages` are those of a block of the prefiller and of the decoder."""
    world = World(kv=kv, num_ranks=num_ranks, pages=pages)
    try:
        yield world
    finally:
        world.prefiller.close()
        world.decoder.close()


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 17, 18, 30])
def test_the_decoder_has_every_token_but_the_last(num_tokens: int) -> None:
    """Also where the window of the last token begins with a block."""
    with new_world() as world:
        prefilled = world.prefill(world.prompt(num_tokens))
        world.until_ready(prefilled)
        decoded = world.decode(prefilled)
        until(lambda: decoded.state == "over", world.step, "no answer")
        assert decoded.wrong == []
        assert not decoded.failed_load
        world.check_all_free()


@pytest.mark.parametrize("num_tokens", [5, 10, 17, 30])
def test_a_model_whose_layers_all_have_a_window_is_served(num_tokens: int) -> None:
    """Its pages are fewer than its prompt's blocks, so no block's name is that of the page at the same place."""
    with new_world(WINDOWED) as world:
        prefilled = world.prefill(world.prompt(num_tokens))
        world.until_ready(prefilled)
        decoded = world.decode(prefilled)
        until(lambda: decoded.state == "over", world.step, "no answer")
        assert decoded.wrong == []
        assert not decoded.failed_load
        world.check_all_free()


UNLIKE = ((2, 1), (1, 2), (3, 1), (1, 4), (2, 3), (2, 2))
"""The pages of a block of the prefiller and of the decoder."""


@pytest.mark.parametrize("kv", [HYBRID, PLAIN], ids=["hybrid", "plain"])
@pytest.mark.parametrize("pages", UNLIKE, ids=lambda pages: f"{pages[0]}to{pages[1]}")
def test_blocks_of_unlike_sizes_carry_every_token_but_the_last(kv: KvLayout, pages: tuple[int, int]) -> None:
    """At lengths around the borders of pages and of both engines' blocks, several chunks of computing to a block."""
    borders = {TOKENS * count * times for count in (1, *pages, pages[0] * pages[1]) for times in (1, 2)}
    lengths = {border + rest for border in borders for rest in (-1, 0, 1, 2)}
    with new_world(kv, pages=pages) as world:
        for num_tokens in sorted(length for length in lengths if 0 < length <= 34):
            prefilled = world.prefill(world.prompt(num_tokens))
            world.until_ready(prefilled)
            decoded = world.decode(prefilled)
            until(lambda: decoded.state == "over", world.step, "no answer")  # noqa: B023
            assert decoded.wrong == [], f"{num_tokens} tokens"
            assert not decoded.failed_load, f"{num_tokens} tokens"
        world.check_all_free()


def test_what_the_buffer_has_is_not_sent_again_by_a_prefiller_with_larger_blocks() -> None:
    """A block's pages have names of their own, which are no names of whole blocks."""
    with new_world(PLAIN, pages=(2, 1)) as world:
        prompt, sent = world.prompt(26), []
        world.decoder.remember(prompt, 26)

        def land(write: MockWrite) -> Land:
            sent.append(write.num_bytes)
            return Land()

        world.agent.script = land
        for num_tokens, num_pages in ((18, 5), (26, 3)):  # four of the first five are of whole blocks
            sent.clear()
            prefilled = world.prefill(prompt[:num_tokens])
            world.until_ready(prefilled)
            assert prefilled.reply is not None
            assert prefilled.reply.get("num_cached", 0) == 0
            world.decoder.cache.clear()
            decoded = world.decode(prefilled)
            until(lambda: decoded.state == "over", world.step, "no answer")  # noqa: B023
            assert decoded.wrong == []
            assert not decoded.failed_load
            assert sum(sent) // PLAIN.of_rank().page_bytes == num_pages
            world.decoder.remember(prompt, 26)
        world.decoder.cache.clear()
        world.check_all_free()


def test_a_load_in_several_pieces_is_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_side, "PIECE_BYTES", 3 * TOKENS * 16)
    with new_world() as world:
        prefilled = world.prefill(world.prompt(30))
        world.until_ready(prefilled)
        decoded = world.decode(prefilled)
        until(lambda: decoded.state == "over", world.step, "no answer")
        assert decoded.wrong == []
        assert not decoded.failed_load


def test_a_prompt_is_not_computed_before_its_pages_are_reserved() -> None:
    with new_world() as world:
        largest = [world.prefill(world.prompt(20)) for _ in range(3)]  # 5 + 2 or 3 pages each, of 16
        world.until_ready(largest[0])
        world.until_ready(largest[1])
        for _ in range(20):
            world.step()
        assert largest[2].state == "waiting"
        assert not largest[2].blocks
        decoded = world.decode(largest[0])
        until(lambda: decoded.state == "over", world.step, "no answer")
        world.until_ready(largest[2])
        for one in largest[1:]:
            answer = world.decode(one)
            until(lambda: answer.state == "over", world.step, "no answer")  # noqa: B023
            assert answer.wrong == []
        world.check_all_free()


def test_blocks_stay_until_the_last_write_has_landed() -> None:
    with new_world() as world:
        writes: list[MockWrite] = []

        def hold(write: MockWrite) -> Hold:
            writes.append(write)
            return Hold()

        world.agent.script = hold
        prefilled = world.prefill(world.prompt(10))
        until(lambda: prefilled.state == "over", world.step, "not computed")
        for _ in range(20):
            world.step()
        assert prefilled.request_id in world.prefiller.kept
        world.agent.script = lambda write: Land()
        for write in list(writes):
            write.land()
        world.until_ready(prefilled)
        decoded = world.decode(prefilled)
        until(lambda: decoded.state == "over", world.step, "no answer")
        assert decoded.wrong == []
        world.check_all_free()


@pytest.mark.parametrize("num_tokens", [9, 13, 17])
def test_a_block_that_only_the_decoder_still_needs_stays_until_it_is_sent(num_tokens: int) -> None:
    """With the last token computed, the window of the next one begins with a block; the decoder computes the last token
    itself, and needs the block before."""
    with new_world() as world:
        writes: list[MockWrite] = []

        def hold(write: MockWrite) -> Hold:
            writes.append(write)
            return Hold()

        world.agent.script = hold
        prefilled = world.prefill(world.prompt(num_tokens))
        until(lambda: prefilled.state == "over", world.step, "not computed")
        world.agent.script = lambda write: Land()
        while writes:
            writes.pop().land()
        world.until_ready(prefilled)
        decoded = world.decode(prefilled)
        until(lambda: decoded.state == "over", world.step, "no answer")
        assert decoded.wrong == []
        assert not decoded.failed_load
        world.check_all_free()


@pytest.mark.parametrize("when", ["waiting", "running", "over"])
def test_an_abort_gives_everything_back(when: str) -> None:
    with new_world() as world:
        prefilled = world.prefill(world.prompt(30))
        until(lambda: prefilled.state == when, lambda: world.step(3), f"never {when}")
        if when == "over":
            world.until_ready(prefilled)
            decoded = world.decode(prefilled)
            world.decoder.end(decoded, is_whole=False)
        else:
            world.prefiller.end(prefilled, is_whole=False)
        world.check_all_free()


@pytest.mark.parametrize("is_late", [False, True])
def test_a_preempted_prompt_is_sent_on_when_it_is_computed_again(is_late: bool) -> None:
    """Its blocks become others' in the same step, and what was sent of them may still be under way."""
    with new_world() as world:
        writes: list[MockWrite] = []

        def hold(write: MockWrite) -> Fate:
            writes.append(write)
            return Hold()

        def land() -> None:
            world.agent.script = lambda write: Land()
            for write in writes:
                write.land()

        prefilled = world.prefill(world.prompt(30))
        if is_late:
            world.agent.script = hold
        until(lambda: prefilled.num_computed > 8, lambda: world.step(3), "never runs")
        until(lambda: bool(writes) == is_late, lambda: None, "nothing is under way")
        world.prefiller.preempt(prefilled)
        late = threading.Timer(0.1, land)
        late.start()
        world.step(3)
        late.join()
        world.until_ready(prefilled)
        decoded = world.decode(prefilled)
        until(lambda: decoded.state == "over", world.step, "no answer")
        assert decoded.wrong == []
        assert not decoded.failed_load
        world.check_all_free()


def test_a_preempted_prompt_of_which_something_is_read_for_too_long_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_side, "DRAIN_S", 0.05)
    with new_world() as world:
        writes: list[MockWrite] = []

        def hold(write: MockWrite) -> Fate:
            writes.append(write)
            return Hold()

        world.agent.script = hold
        prefilled = world.prefill(world.prompt(30))
        until(lambda: prefilled.num_computed > 8 and bool(writes), lambda: world.step(3), "never runs")
        world.prefiller.preempt(prefilled)
        until(lambda: prefilled.state == "over", world.step, "not computed again")
        assert prefilled.reply is not None
        assert "preempted" in prefilled.reply["failure"]
        assert world.holding(prefilled) is not Holding.READY
        for write in writes:
            write.land()
        world.check_all_free()


def test_a_decoder_that_cannot_be_reached_fails_the_attempt_and_not_the_engine() -> None:
    with new_world() as world:
        prefilled = world.prefill(world.prompt(10))
        assert prefilled.kv_transfer_params is not None
        world.prefiller.end(prefilled, is_whole=False)
        params = prefilled.kv_transfer_params | {"receivers": [{"rank": 0, "host": "127.0.0.1", "port": 1}]}
        lost = Request("lost", prefilled.prompt, params | {"attempt": "lost", "timeout_s": 0.3})
        world.prefiller.add(lost)
        until(lambda: lost.state == "over", world.step, "it hangs")
        assert lost.reply is not None
        assert lost.reply["failure"]
        assert lost.reply["is_receiver_lost"]
        world.check_all_free()


def test_a_decoder_reserves_nothing_for_a_leader_that_has_been_replaced() -> None:
    """It hears of terms by reservations alone: a leg's headers end at vLLM."""
    with new_world() as world:
        newer = world.prefill(world.prompt(10), term=8)
        world.until_ready(newer)
        older = world.prefill(world.prompt(10), term=7)
        until(lambda: older.state == "over", world.step, "it hangs")
        assert older.reply is not None
        assert older.reply["failure"] == "the attempt is of term 7, and a leader of term 8 has been heard of"
        assert world.holding(older) is None
        inbox = world.decoder.inbox
        assert inbox is not None
        numbers = dict.fromkeys(("bytes_per_token", "page_bytes", "num_pages", "num_free", "num_quarantined"), 0)
        names = {"epoch": "e", "role": "decode", "model": "m", "dtype": "float32", "chunk_size": TOKENS}
        inbox._make_facts = lambda _: msgspec.convert(
            names | numbers | {"max_model_len": 9, "receivers": []}, wire.BufferFacts
        )
        assert inbox.buffer_facts().term == 8
        assert inbox.cancel(newer.kv_transfer_params["attempt"])  # type: ignore[index]
        world.check_all_free()


def test_kv_that_is_gone_is_a_failed_load() -> None:
    with new_world() as world:
        prefilled = world.prefill(world.prompt(10))
        world.until_ready(prefilled)
        assert world.decoder.inbox is not None
        assert prefilled.reply is not None
        world.decoder.inbox.release(prefilled.reply["attempt"])
        decoded = world.decode(prefilled)
        until(lambda: decoded.state == "over", world.step, "it hangs")
        assert decoded.failed_load
        world.check_all_free()


@pytest.mark.parametrize("num_tokens", [7, 9, 12, 40])
def test_kv_of_another_prompt_is_a_failed_load(num_tokens: int) -> None:
    """The two engines may have cut a prompt unlike, or been sent unlike ones: of the same number of pages, or not."""
    with new_world() as world:
        prefilled = world.prefill(world.prompt(10))
        world.until_ready(prefilled)
        other = Request("other", world.prompt(num_tokens), prefilled.reply)
        world.decoder.add(other)
        until(lambda: other.state == "over", world.step, "it hangs")
        assert other.failed_load
        world.check_all_free()


@pytest.mark.parametrize(
    ("there", "here", "what"),
    [
        ({}, {"prompt": [5, 8, 7, 9, 10]}, "the tokens"),
        ({}, {"prompt": [5, 6, 7, 8]}, r"the number of tokens (5 there, 4 here)"),
        ({"lora_request": lora("pirate")}, {}, "the LoRA adapter"),
        ({"lora_request": lora("pirate")}, {"lora_request": lora("poet")}, "the LoRA adapter"),
        ({"mm_features": [image("a cat")]}, {"mm_features": [image("a dog")]}, "the images or other inputs"),
        ({"mm_features": [image("a", 1)]}, {"mm_features": [image("a", 2)]}, "the places of images and other inputs"),
        ({"cache_salt": "mine"}, {"cache_salt": "yours"}, "the cache salt"),
        ({"prompt_embeds": torch.zeros(5, 2)}, {"prompt_embeds": torch.ones(5, 2)}, "the prompt's embeddings"),
    ],
)
def test_kv_of_an_equally_long_prompt_is_a_failed_load_that_says_what_differs(
    there: dict[str, Any], here: dict[str, Any], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with new_world() as world:
        prefilled = world.prefill([5, 6, 7, 9, 11])
        for name, value in there.items():
            setattr(prefilled, name, value)
        world.until_ready(prefilled)
        assert prefilled.reply is not None
        other = Request("other", prefilled.prompt, prefilled.reply)
        for name, value in here.items():
            setattr(other, name, value)
        world.decoder.add(other)
        until(lambda: other.state == "over", world.step, "it hangs")
        assert other.failed_load
        (told,) = [record.getMessage() for record in caplog.records if "another prompt" in record.getMessage()]
        assert told.startswith(f"request other: attempt {prefilled.reply['attempt']} cannot be loaded")
        assert f"prompt: {what} of" in told
        world.check_all_free()


def test_a_prompt_that_is_equal_in_all_is_loaded() -> None:
    """And so is one of which the last token differs: the decoder computes that itself."""
    equal: dict[str, Any] = {
        "lora_request": lora("pirate"),
        "mm_features": [image("a cat"), image("a dog", 2)],
        "cache_salt": "ours",
    }
    with new_world() as world:
        prefilled = world.prefill([5, 6, 7, 9, 11])
        vars(prefilled).update(equal)
        world.until_ready(prefilled)
        answer = Request("answer", [5, 6, 7, 9, 12], prefilled.reply, **equal)
        world.decoder.add(answer)
        until(lambda: answer.state == "over", world.step, "it hangs")
        assert not answer.failed_load
        assert answer.wrong == []
        world.check_all_free()


def test_a_prefiller_that_does_not_say_what_it_read_is_believed() -> None:
    with new_world() as world:
        prefilled = world.prefill(world.prompt(10))
        world.until_ready(prefilled)
        assert prefilled.reply is not None
        assert prefilled.reply.pop("prompt")
        answer = world.decode(prefilled)
        until(lambda: answer.state == "over", world.step, "it hangs")
        assert not answer.failed_load


def test_images_that_two_engines_name_unlike_are_not_compared() -> None:
    """Their names have the path of the model in them, and some engines number them by request."""
    a, b = (Request("x", [5, 6, 7], None, mm_features=[image(name)]) for name in ("a", "b"))
    assert prompt_digest(a, "blake3 /here").differences(prompt_digest(b, "blake3 /there")) == []
    assert prompt_digest(a).differences(prompt_digest(b)) == []
    assert prompt_digest(a, "blake3 /here").differences(prompt_digest(b, "blake3 /here"))


def test_a_prompt_that_vllm_computes_at_once_is_answered_with_why_it_was_not_sent() -> None:
    with new_world() as world:
        prefilled = world.prefill(world.prompt(10))
        prefilled.reads_cache = False
        until(lambda: prefilled.state == "over", world.step, "it hangs")
        assert prefilled.reply is not None
        assert "prompt_logprobs" in prefilled.reply["failure"]
        world.check_all_free()


def test_a_push_that_fails_on_one_worker_is_given_up_on_all() -> None:
    groups = HYBRID.groups
    scheduler = SchedulerSide(TOKENS, 2, groups)
    receivers = [{"rank": 0, "host": "127.0.0.1", "port": 1}]
    scheduler.add(Request("a", [1] * 9, {"attempt": "a", "receivers": receivers, "timeout_s": 9.0}))
    scheduler.take_orders(NOTHING)
    scheduler.heard(StepReport(Counter({"a": 1}), failed={"a": "one worker's agent is dead"}), [])
    assert scheduler.has_orders
    assert list(scheduler.take_orders(NOTHING).aborts) == ["a"]


def test_every_worker_hears_that_the_data_plane_of_one_is_over() -> None:
    """The proxy asks the first rank alone how the engine is."""
    with new_world() as world:
        engine, first = (
            world.prefiller,
            WorkerSide(HYBRID.of_rank(), world.prefiller.names, world.prefiller.memory, plane=None, inbox=None),
        )
        engine.step(7)
        assert not engine.worker.is_broken
        assert engine.plane is not None
        engine.plane.close()
        engine.scheduler.heard(engine.worker.take_report(), [])
        assert engine.scheduler.has_orders
        first.begin(engine.scheduler.take_orders(NOTHING))
        assert first.is_broken
        assert engine.worker.take_report() is None


def test_of_several_answers_one_loads_and_the_others_compute() -> None:
    with new_world() as world:
        prefilled = world.prefill(world.prompt(10))
        world.until_ready(prefilled)
        answers = [world.decode(prefilled, name) for name in ("first", "second", "third")]
        until(lambda: all(one.state == "over" for one in answers), world.step, "it hangs")
        assert [one.failed_load for one in answers] == [False] * 3
        assert [one.wrong for one in answers] == [[]] * 3
        world.check_all_free()


def test_an_answer_that_nobody_waits_for_any_more_gives_its_pages_back_though_another_was_asked() -> None:
    with new_world() as world:
        prefilled = world.prefill(world.prompt(10))
        world.until_ready(prefilled)
        first, second = (world.decode(prefilled, name) for name in ("first", "second"))
        world.decoder.end(first, is_whole=False)
        assert world.holding(prefilled) is Holding.READY
        until(lambda: second.state == "over", world.step, "it hangs")
        assert not second.failed_load
        world.check_all_free()


def test_what_the_decoder_has_is_not_sent_again() -> None:
    """Neither what its buffer remembers, nor what its vLLM has in its cache."""
    with new_world(PLAIN) as world:
        prompt, sent = world.prompt(26), []

        def land(write: MockWrite) -> Land:
            sent.append(write.num_bytes)
            return Land()

        def turn(num_tokens: int) -> int:
            sent.clear()
            prefilled = world.prefill(prompt[:num_tokens])
            world.until_ready(prefilled)
            decoded = world.decode(prefilled)
            until(lambda: decoded.state == "over", world.step, "no answer")
            assert decoded.wrong == []
            assert not decoded.failed_load
            return sum(sent) // PLAIN.of_rank().page_bytes

        world.agent.script = land
        assert turn(10) == 3
        assert turn(18) == 3, "two of its five pages lie in the buffer"
        world.decoder.remember(prompt, 22)
        assert turn(26) == 2, "five of its seven pages are in the decoder's cache"
        assert world.decoder.receiver.reservations.num_cached == 5
        world.decoder.cache.clear()
        world.check_all_free()


def test_unlike_names_for_blocks_are_told_once_with_the_way_out(caplog: pytest.LogCaptureFixture) -> None:
    with new_world(PLAIN) as world:

        def transfer() -> None:
            prefilled = world.prefill(world.prompt(10))
            world.until_ready(prefilled)
            decoded = world.decode(prefilled)
            until(lambda: decoded.state == "over", world.step, "no answer")
            assert decoded.wrong == []

        transfer()
        assert "PYTHONHASHSEED" not in caplog.text
        world.decoder.block_names = "named otherwise"
        transfer()
        transfer()
        assert caplog.text.count("PYTHONHASHSEED") == 1
        assert "named alike, and named otherwise here" in caplog.text


@pytest.mark.parametrize("num_cached", [0, 4, 6])
def test_an_answer_that_says_otherwise_what_was_not_sent_is_a_failed_load(num_cached: int) -> None:
    """Else pages would be copied to the places of others, or the worker would end."""
    with new_world(PLAIN) as world:
        prompt = world.prompt(26)
        world.decoder.remember(prompt, 22)
        prefilled = world.prefill(prompt)
        world.until_ready(prefilled)
        assert prefilled.reply is not None
        assert prefilled.reply["num_cached"] == 5
        prefilled.reply["num_cached"] = num_cached
        world.decoder.remember(prompt, 26)
        decoded = world.decode(prefilled)
        until(lambda: decoded.state == "over", world.step, "it hangs")
        assert decoded.wrong == []
        assert decoded.failed_load
        world.decoder.cache.clear()
        world.check_all_free()


def test_what_the_decoder_has_forgotten_meanwhile_is_computed_again() -> None:
    with new_world(PLAIN) as world:
        prompt = world.prompt(26)
        world.decoder.remember(prompt, 22)
        prefilled = world.prefill(prompt)
        world.until_ready(prefilled)
        assert prefilled.reply is not None
        assert prefilled.reply["num_cached"] == 5
        world.decoder.cache.clear()
        decoded = world.decode(prefilled)
        until(lambda: decoded.state == "over", world.step, "no answer")
        assert not decoded.failed_load
        world.check_all_free()


@pytest.mark.parametrize(
    ("seed", "num_ranks"),
    [*((seed, (1, 1)) for seed in range(SEED, SEED + 6)), (SEED, (1, 2)), (SEED, (2, 2))],
)
def test_whatever_happens_in_whatever_order_nothing_is_wrong_and_nothing_is_lost(
    seed: int, num_ranks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of any size, writes that land late, aborts and preemptions at any moment, blocks reused and poisoned."""
    monkeypatch.setattr(worker_side, "DRAIN_S", 0.02)
    dice = random.Random(seed)
    random.seed(seed)
    with new_world(num_ranks=num_ranks, pages=((1, 1), (2, 1), (1, 2))[seed % 3]) as world:
        writes: list[MockWrite] = []

        def sometimes_late(write: MockWrite) -> Fate:
            if dice.random() < 0.5:
                return Land()
            writes.append(write)
            return Hold()

        for agent in world.agents:
            agent.script = sometimes_late
        prefilled: list[Request] = []
        decoded: list[Request] = []
        for _ in range(400):
            for write in [write for write in writes if dice.random() < 0.2]:
                writes.remove(write)
                write.land()
            if len(world.prefiller.requests) < 4 and dice.random() < 0.3:
                prefilled.append(world.prefill(world.prompt(dice.randint(1, 30))))
            for one in [one for one in prefilled if one.state == "over"]:
                if one.reply is None or world.holding(one) is not Holding.READY:
                    continue
                if dice.random() < 0.3:
                    decoded += [world.decode(one, f"answer {i}") for i in range(dice.choice((1, 1, 1, 2)))]
                    prefilled.remove(one)
            for engine in (world.prefiller, world.decoder):
                for one in list(engine.requests.values()):
                    if dice.random() < 0.02:
                        engine.end(one, is_whole=False)
                    elif one.state == "running" and dice.random() < 0.02:
                        engine.preempt(one)
            world.step(dice.choice((1, 3, 7, 16)))
            time.sleep(0.003)  # what the two sides tell each other takes a moment
        for agent in world.agents:
            agent.script = lambda write: Land()

        def rest() -> bool:
            while writes:  # one may have been asked about just before
                writes.pop().land()
            for one in prefilled:
                if one.state == "over" and world.holding(one) is Holding.READY:  # as a proxy cancels it
                    world.decoder.inbox.release(one.kv_transfer_params["attempt"])  # type: ignore[union-attr]
            return not any(e.requests or e.kept for e in (world.prefiller, world.decoder))

        until(rest, world.step, f"seed {seed}: a request hangs")
        assert [one.wrong for one in decoded if one.wrong] == [], f"seed {seed}"
        assert sum(not one.failed_load for one in decoded) > 5, f"seed {seed}: nothing was tested"
        world.check_all_free()
