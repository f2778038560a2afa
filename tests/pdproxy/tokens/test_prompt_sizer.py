"""Counting prompts: exactly with a tokenizer, never too low without."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from pdproxy.config.instances import ModelSettings
from pdproxy.config.settings import Settings
from pdproxy.errors import BodyTooLarge, ConfigError, EngineReply, NotCounted, QueueFull
from pdproxy.openai.request import CHAT, COMPLETIONS, GenerationRequest, parse
from pdproxy.tokens.bounds import ChatFrame, size_without_tokenizer
from pdproxy.tokens.prompt_size import PromptSize
from pdproxy.tokens.prompt_sizer import ByteSizer, ModelSizers, NoEngines, TokenizerSizer, make_sizer
from tests.fakes.proxy_harness import proxy_in_front_of

HELLO = [{"role": "user", "content": "hi"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]


class Told(NoEngines):
    """Engines that tell `size` of every prompt, and count how often they are asked."""

    def __init__(self, size: PromptSize | None = None, **traits: Any) -> None:
        self.told, self.num_asked = size, 0
        self.traits = {"agree": True, "take_ids": False, "need_length": True, "need_ids": False, "wants_ids": False}
        self.traits |= {"have_plenty": False} | traits

    def agree(self, model: str | None) -> bool:
        return bool(self.traits["agree"])

    def take_ids(self, model: str | None) -> bool:
        return bool(self.traits["take_ids"])

    def frame(self, model: str | None) -> ChatFrame:
        return ChatFrame(tokens=20, message_tokens=4)

    def need_length(self, request: GenerationRequest) -> bool:
        return bool(self.traits["need_length"])

    def have_plenty(self, model: str | None, num_tokens: int) -> bool:
        return bool(self.traits["have_plenty"])

    def need_ids(self, request: GenerationRequest) -> bool:
        return bool(self.traits["need_ids"])

    def wants_ids(self, request: GenerationRequest) -> bool:
        return bool(self.traits["wants_ids"])

    async def count(self, request: GenerationRequest, headers: Mapping[str, str]) -> PromptSize | None:
        self.num_asked += 1
        if self.traits.get("refusal"):
            raise EngineReply(400, b"the template refuses")
        return self.told


THREE = PromptSize(tokens=3, is_exact=True, ids=[1, 2, 3])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer that writes one special token in front."""
    folder = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0} | {letter: number for number, letter in enumerate(alphabet, 1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(5)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def sizer(model: Path) -> Iterator[TokenizerSizer]:
    sizer = TokenizerSizer(model)
    yield sizer
    sizer.close()


@pytest.fixture
def counting(model: Path) -> Iterator[TokenizerSizer]:
    """In front of engines that do not take ids."""
    sizer = TokenizerSizer(model, engines=Told())
    yield sizer
    sizer.close()


def completion(**fields: Any) -> GenerationRequest:
    return parse(COMPLETIONS, json.dumps({"prompt": "abc"} | fields).encode())


def chat(messages: list[dict[str, Any]], **fields: Any) -> GenerationRequest:
    return parse(CHAT, json.dumps({"messages": messages} | fields).encode())


async def test_text(sizer: TokenizerSizer) -> None:
    size = await sizer.size(completion(prompt="abcdefg"))
    assert (size.tokens, size.is_exact) == (8, True)
    assert size.ids is not None
    assert (len(size.ids), size.ids[0]) == (8, 0)
    assert (await sizer.size(completion(prompt="abc", add_special_tokens=False))).tokens == 3
    assert (await sizer.size(completion(prompt=["abc"]))).tokens == 4


async def test_long_text_is_counted_in_a_thread_and_not_truncated(sizer: TokenizerSizer) -> None:
    assert (await sizer.size(completion(prompt="x" * 50_000))).tokens == 50_001


async def test_ids_are_counted_and_not_sent_twice(sizer: TokenizerSizer) -> None:
    size = await sizer.size(completion(prompt=[1, 2, 3]))
    assert (size.tokens, size.is_exact, size.ids) == (3, True, None)


# ── without waiting ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_known_at_once(sizer: TokenizerSizer) -> None:
    for request in (completion(), completion(prompt=[1, 2]), completion(prompt=["a", "b"]), chat(IMAGE)):
        assert sizer.size_now(request) is not None
    assert sizer.size_now(completion(prompt="x" * 1000)) is None


async def test_a_prompt_that_was_seen_is_known(sizer: TokenizerSizer) -> None:
    text = await sizer.size(completion(prompt="x" * 1000))
    assert sizer.size_now(completion(prompt="x" * 1000, max_tokens=3, temperature=0.5)) == text
    assert sizer.size_now(completion(prompt="x" * 1000, add_special_tokens=False)) is None


async def test_a_small_prompt_is_bounded_where_nobody_takes_its_ids(counting: TokenizerSizer) -> None:
    bound = counting.size_now(completion(prompt="x" * 1000))
    assert bound is not None
    assert (bound.tokens, bound.is_exact) == (1002, False)
    counted = await counting.size(completion(prompt="x" * 2000))
    assert (counted.tokens, counted.is_exact, counted.ids) == (2001, True, None)
    assert (await counting.size(completion(prompt="x" * 2000, add_special_tokens=False))).tokens == 2000


@pytest.mark.parametrize(("shortest", "is_exact"), [(0, False), (500, True), (2000, False)])
async def test_but_counted_where_its_length_decides(model: Path, shortest: int, is_exact: bool) -> None:
    """1002 tokens are more than 500, but are the exact ones? Less than 2000 they are for certain."""
    sizer = TokenizerSizer(model, engines=Told(), min_prompt_tokens=shortest)
    assert (await sizer.size(completion(prompt="x" * 1000))).is_exact is is_exact
    sizer.close()


async def test_an_engine_that_joins_gets_ids_of_what_was_counted_before(model: Path) -> None:
    engines = Told()
    sizer = TokenizerSizer(model, engines=engines)
    request = completion(prompt="x" * 2000)
    assert (await sizer.size(request)).ids is None
    engines.traits["take_ids"] = True
    assert len((await sizer.size(request)).ids or ()) == 2001
    sizer.close()


# ── engines are asked ───────────────────────────────────────────────────────────────────────────────────────────────

TOOLS = [{"type": "function", "function": {"name": "rain", "parameters": {"type": "object"}}}]
LONG = [{"role": "user", "content": "x" * 2000}]


@pytest.mark.parametrize(
    "request_",
    [chat(HELLO), chat(HELLO, tools=[], response_format=None), chat([{"role": "user", "content": "\u4f60" * 99}])],
    ids=["short", "with empty fields", "of other letters"],
)
async def test_a_short_chat_costs_no_call(request_: GenerationRequest) -> None:
    engines = Told(THREE)
    size = ByteSizer(engines=engines).size_now(request_)
    assert size is not None
    assert (size.is_exact, size.tokens) == (False, size_without_tokenizer(request_, ChatFrame(20, 4)).tokens)
    assert engines.num_asked == 0


CALL = {"id": "1", "type": "function", "function": {"name": "rain", "arguments": "{}"}}


@pytest.mark.parametrize(
    "request_",
    [
        chat(LONG),
        chat(HELLO, tools=TOOLS),
        chat(HELLO, documents=[{"text": "x"}]),
        chat(HELLO, reasoning_effort="low"),
        chat(HELLO, chat_template="{{ 1 }}"),
        chat(HELLO, chat_template_kwargs={"chat_template": "{{ 1 }}"}),
        chat([*HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL]}]),
        chat([{"role": "user", "content": "hi", "more": "than is known here"}]),
        chat([{"role": "user", "content": "\ufdfa" * 99}]),
        completion(prompt="x" * 2000),
    ],
)
async def test_what_has_no_small_bound_is_asked_for(request_: GenerationRequest) -> None:
    engines = Told(THREE)
    sizer = ByteSizer(engines=engines)
    assert sizer.size_now(request_) is None
    assert await sizer.size(request_) == THREE
    assert engines.num_asked == 1


@pytest.mark.parametrize(
    ("request_", "options", "is_asked"),
    [
        (completion(prompt="x" * 5000), {}, False),
        (chat(LONG), {}, False),
        (completion(prompt="x" * 5000), {"min_prompt_tokens": 100}, True),
        (chat(HELLO, tools=TOOLS), {}, True),
    ],
)
async def test_while_there_is_plenty_a_bound_will_do_unless_it_decides_or_is_none(
    request_: GenerationRequest, options: dict[str, int], is_asked: bool
) -> None:
    sizer = ByteSizer(engines=Told(THREE, have_plenty=True), **options)
    assert (sizer.size_now(request_) is None) is is_asked
    assert ByteSizer(engines=Told(THREE, have_plenty=True, need_ids=True)).size_now(request_) is None


async def test_a_chat_whose_length_decides_is_asked_for() -> None:
    engines = Told(THREE)
    assert (await ByteSizer(engines=engines, min_prompt_tokens=30).size(chat(HELLO))).is_exact
    assert not (await ByteSizer(engines=engines, min_prompt_tokens=500).size(chat(HELLO))).is_exact


async def test_nobody_is_asked_where_no_pages_are_counted() -> None:
    engines = Told(THREE, need_length=False)
    sizer = ByteSizer(engines=engines)
    for request in (chat(LONG), chat(HELLO, tools=TOOLS), completion(prompt="x" * 2000), chat(IMAGE)):
        assert sizer.size_now(request) is not None


async def test_ids_that_are_needed_are_asked_for() -> None:
    sizer = ByteSizer(engines=Told(THREE, need_ids=True))
    assert (await sizer.size(chat(HELLO))).ids == [1, 2, 3]
    assert await sizer.ids(chat(HELLO)) == [1, 2, 3]
    assert await sizer.ids(chat(IMAGE)) is None


async def test_a_refusal_is_the_clients() -> None:
    sizer = ByteSizer(engines=Told(refusal=True))
    with pytest.raises(EngineReply, match="400"):
        await sizer.size(chat(HELLO, tools=TOOLS))
    assert await sizer.ids(chat(HELLO)) is None


async def test_where_nobody_tells_a_bound_will_do_or_an_error_says_so() -> None:
    sizer = ByteSizer(engines=Told())
    assert not (await sizer.size(chat(LONG))).is_exact
    with pytest.raises(NotCounted) as caught:
        await sizer.size(chat(HELLO, tools=TOOLS))
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (503, "prompt_not_counted", 1.0)
    alone = ByteSizer(engines=Told(need_ids=True))
    assert not (await alone.size(chat(HELLO, tools=TOOLS))).is_exact


async def test_a_tokenizer_that_engines_do_not_share_counts_nothing(model: Path) -> None:
    engines = Told(THREE, agree=False, take_ids=True)
    sizer = TokenizerSizer(model, engines=engines)
    short = await sizer.size(completion(prompt="abc"))
    assert (short.is_exact, short.ids) == (False, None)
    assert await sizer.size(completion(prompt="x" * 2000)) == THREE
    sizer.close()


async def test_a_client_has_no_program_run_here(model: Path) -> None:
    """Two such bodies once held both threads that count for ever."""
    endless = "{% for a in range(99999999) %}{% for b in range(99999999) %}{% endfor %}{% endfor %}"
    sizer = TokenizerSizer(model, engines=Told(need_length=False))
    for _ in range(3):
        assert sizer.size_now(chat(HELLO, chat_template_kwargs={"chat_template": endless})) is not None
    assert sizer._threads._threads == set()
    sizer.close()


# ── limits ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Gate:
    """Threads that come to count wait here, those of long texts only."""

    def __init__(self, sizer: TokenizerSizer, monkeypatch: pytest.MonkeyPatch, longer_than: int = 0) -> None:
        self.arrived, self.opened = threading.Semaphore(0), threading.Event()
        ids = sizer._tokenizer.ids

        def gated(text: str, *, add_special_tokens: bool) -> list[int]:
            if len(text) > longer_than:
                self.arrived.release()
                self.opened.wait(10)
            return ids(text, add_special_tokens=add_special_tokens)

        monkeypatch.setattr(sizer._tokenizer, "ids", gated)


async def test_no_more_waits_than_memory_allows(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizer = TokenizerSizer(model, max_waiting_bytes=5000)
    gate = Gate(sizer, monkeypatch)
    counted = [asyncio.create_task(sizer.size(completion(prompt=f"{i}" + "x" * 2000))) for i in range(2)]
    await asyncio.to_thread(gate.arrived.acquire)
    with pytest.raises(QueueFull) as caught:
        await sizer.size(completion(prompt="y" * 2000))
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1.0)
    counted[1].cancel()
    await asyncio.wait([counted[1]])
    third = asyncio.create_task(sizer.size(completion(prompt="y" * 2000)))
    gate.opened.set()
    assert (await counted[0]).tokens == 2002
    assert (await third).tokens == 2001
    sizer.close()


@pytest.mark.parametrize("told", [THREE, None])
async def test_a_thread_that_does_not_end_is_not_waited_for(
    model: Path, monkeypatch: pytest.MonkeyPatch, told: PromptSize | None
) -> None:
    """The others go on: by an engine's word, else by a bound."""
    sizer = TokenizerSizer(model, engines=Told(told, take_ids=True), count_s=0.05)
    gate = Gate(sizer, monkeypatch)
    requests = [completion(prompt=f"{number}" + "x" * 2000) for number in range(5)]
    sizes = await asyncio.gather(*(sizer.size(request) for request in requests))
    expected = [told or size_without_tokenizer(request) for request in requests]
    assert [(size.tokens, size.is_exact) for size in sizes] == [(size.tokens, size.is_exact) for size in expected]
    gate.opened.set()
    assert sizer._num_waiting_bytes == 0
    sizer.close()


async def test_one_prompt_may_be_larger_than_that(model: Path) -> None:
    sizer = TokenizerSizer(model, max_waiting_bytes=1)
    assert (await sizer.size(completion(prompt="y" * 2000))).tokens == 2001
    sizer.close()


async def test_a_short_prompt_does_not_wait_behind_long_ones(
    sizer: TokenizerSizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(sizer, monkeypatch, longer_than=50_000)
    long = [asyncio.create_task(sizer.size(completion(prompt=f"{i}" + "x" * 100_000))) for i in range(3)]
    await asyncio.to_thread(gate.arrived.acquire)
    assert (await sizer.size(completion(prompt="x" * 2000))).tokens == 2001
    assert not any(task.done() for task in long)
    gate.opened.set()
    assert [(await task).tokens for task in long] == [100_002] * 3


@pytest.mark.parametrize("request_", [completion(prompt="x" * 99), completion(prompt=[1] * 50), chat(HELLO * 9)])
def test_a_prompt_over_the_limit_is_refused_by_name(model: Path, request_: GenerationRequest) -> None:
    exact = TokenizerSizer(model, max_bytes=100)
    for sizer in (ByteSizer(100), exact, ModelSizers({}, exact)):
        with pytest.raises(BodyTooLarge, match="max_prompt_bytes") as caught:
            sizer.size_now(request_)
        assert (caught.value.param, caught.value.code) == (request_.prompt_field, "prompt_too_large")
        assert sizer.size_now(completion(prompt="x" * 98)) is not None
        assert sizer.size_now(chat([{"role": "user", "content": [{"type": "image_url", "x": "y" * 99}]}])) is not None
    exact.close()


async def test_the_limit_on_prompts_is_an_option() -> None:
    async with proxy_in_front_of(max_prompt_bytes=100) as house:
        answer = await house.post(prompt="x" * 99)
        assert (answer.status, answer.error["param"], answer.error["code"]) == (413, "prompt", "prompt_too_large")
        assert house.prefiller.generations() == []
        assert (await house.post(prompt="x" * 90)).status == 200


def test_the_sizer_that_the_options_ask_for(model: Path, tmp_path: Path) -> None:
    assert isinstance(make_sizer(Settings()), ByteSizer)
    sizer = make_sizer(Settings(models=(ModelSettings(name="m", path=model), ModelSettings(name="n", path=tmp_path))))
    sizes = [sizer.size_now(completion(model=name)) for name in ("m", "n", "o")]
    assert [size and (size.tokens, size.is_exact) for size in sizes] == [(4, True), (5, False), (5, False)]
    sizer.close()
    with pytest.raises(ConfigError, match="no folder"):
        make_sizer(Settings(model=tmp_path / "none"))


# ── without a tokenizer ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_without_a_tokenizer() -> None:
    sizer = ByteSizer()
    for prompt in ([5, 6], [[5, 6]]):
        size = await sizer.size(completion(prompt=prompt))
        assert (size.tokens, size.is_exact) == (2, True)
    size = await sizer.size(completion(prompt="äb"))
    assert (size.tokens, size.is_exact) == (len('"\\u00e4b"'), False)
    few, many = (chat([{"role": "user", "content": "hi"}] * n) for n in (1, 3))
    assert (await sizer.size(few)).tokens < (await sizer.size(many)).tokens


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model: .*tokenizer.json"):
        TokenizerSizer(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is a thread's on Linux only")
async def test_who_counts_lets_the_event_loop_go_first(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    niceness: dict[int, int] = {}

    def take_ids(model: str | None) -> bool:
        thread = threading.get_native_id()
        niceness[thread] = os.getpriority(os.PRIO_PROCESS, thread)
        return True

    engines = Told()
    monkeypatch.setattr(engines, "take_ids", take_ids)
    sizer = TokenizerSizer(model, engines=engines)
    try:
        await sizer.size(completion(prompt="much to count " * 10_000))
    finally:
        sizer.close()
    ours = niceness.pop(threading.get_native_id())
    assert niceness
    assert all(each > ours or ours == 19 for each in niceness.values())
