"""Counting prompts: exactly with a tokenizer, never too low without."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from pdproxy.config import ModelSettings, Settings
from pdproxy.errors import BodyTooLarge, ConfigError, InvalidRequest, QueueFull
from pdproxy.request import chat_template
from pdproxy.request.openai import CHAT, COMPLETIONS, GenerationRequest, parse
from pdproxy.request.tokens import ByteSizer, ModelSizers, TokenizerSizer, make_sizer, size_without_tokenizer
from tests.fakes.proxy_harness import proxy_in_front_of

HELLO = [{"role": "user", "content": "hi"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('no such role') }}{% endif %}"
    "<{{ m.role }}> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<go>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer that writes one special token in front, and a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0} | {letter: number for number, letter in enumerate(alphabet, 1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(5)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def sizer(model: Path) -> Iterator[TokenizerSizer]:
    sizer = TokenizerSizer(model)
    yield sizer
    sizer.close()


@pytest.fixture
def counting(model: Path) -> Iterator[TokenizerSizer]:
    """In front of engines that do not take ids."""
    sizer = TokenizerSizer(model, wants_ids=lambda: False)
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


async def test_two_first_chats_load_the_template_once(sizer: TokenizerSizer, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []
    met = threading.Event()

    def slow(path: Path) -> Any:
        loads.append("begun")
        if len(loads) > 1:
            met.set()
        met.wait(0.2)  # for the other one, who must not come
        return load(path)

    load = chat_template._load
    monkeypatch.setattr(chat_template, "_load", slow)
    hello = chat([{"role": "user", "content": "hi"}])
    first, second = await asyncio.gather(sizer.size(hello), sizer.size(hello))
    assert first == second
    assert loads == ["begun"]


async def test_chat_is_rendered(sizer: TokenizerSizer) -> None:
    size = await sizer.size(chat([{"role": "user", "content": "hi"}]))
    assert (size.tokens, size.is_exact) == (len("<user> hi <go>"), True)
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert (await sizer.size(chat([{"role": "user", "content": parts}]))).tokens == len("<user> h\ni <go>")
    quiet = await sizer.size(chat([{"role": "user", "content": "hi"}], add_generation_prompt=False))
    assert quiet.tokens == len("<user> hi ")


async def test_messages_that_the_template_refuses(sizer: TokenizerSizer) -> None:
    with pytest.raises(InvalidRequest, match="no such role") as caught:
        await sizer.size(chat([{"role": "nobody", "content": "hi"}]))
    assert caught.value.param == "messages"


async def test_what_would_be_rendered_otherwise_is_bounded(sizer: TokenizerSizer) -> None:
    assert not (await sizer.size(chat(HELLO, chat_template="{{ 1 }}"))).is_exact
    assert not (await sizer.size(chat(IMAGE))).is_exact


# ── without waiting ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_known_at_once(sizer: TokenizerSizer) -> None:
    for request in (completion(), completion(prompt=[1, 2]), completion(prompt=["a", "b"]), chat(IMAGE)):
        assert sizer.size_now(request) is not None
    assert sizer.size_now(completion(prompt="x" * 1000)) is None
    assert sizer.size_now(chat(HELLO)) is None


async def test_a_prompt_that_was_seen_is_known(sizer: TokenizerSizer) -> None:
    text, messages = await sizer.size(completion(prompt="x" * 1000)), await sizer.size(chat(HELLO))
    assert sizer.size_now(completion(prompt="x" * 1000, max_tokens=3, temperature=0.5)) == text
    assert sizer.size_now(chat(HELLO, max_tokens=3, temperature=0.5)) == messages


async def test_what_changes_the_prompt_makes_it_another(sizer: TokenizerSizer) -> None:
    await sizer.size(completion(prompt="x" * 1000))
    await sizer.size(chat(HELLO))
    assert sizer.size_now(completion(prompt="x" * 1000, add_special_tokens=False)) is None
    others: list[dict[str, Any]] = [
        {"tools": [{}]},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"a": 1}},
    ]
    assert all(sizer.size_now(chat(HELLO, **other)) is None for other in others)


async def test_what_is_another_text_tomorrow_is_not_remembered(sizer: TokenizerSizer) -> None:
    await sizer.size(chat(HELLO))
    sizer._template._loaded().chat_template = "{{ strftime_now('%d') }}" + TEMPLATE
    other = [{"role": "user", "content": "ho"}]
    await sizer.size(chat(other))
    assert sizer.size_now(chat(HELLO)) is not None
    assert sizer.size_now(chat(other)) is None


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
    sizer = TokenizerSizer(model, wants_ids=lambda: False, min_prompt_tokens=shortest)
    assert (await sizer.size(completion(prompt="x" * 1000))).is_exact is is_exact
    sizer.close()


async def test_an_engine_that_joins_gets_ids_of_what_was_counted_before(model: Path) -> None:
    engines: list[str] = []
    sizer = TokenizerSizer(model, wants_ids=lambda: bool(engines))
    request = completion(prompt="x" * 2000)
    assert (await sizer.size(request)).ids is None
    engines.append("lmcache")
    assert len((await sizer.size(request)).ids or ()) == 2001
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


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_are_never_too_few(text: str) -> None:
    request = parse(COMPLETIONS, json.dumps({"prompt": text}, ensure_ascii=False).encode())
    assert size_without_tokenizer(request).tokens >= len(text.encode())


async def test_without_a_tokenizer() -> None:
    sizer = ByteSizer()
    assert await sizer.size(completion(prompt=[5, 6])) == await sizer.size(completion(prompt=[[5, 6]]))
    size = await sizer.size(completion(prompt="äb"))
    assert (size.tokens, size.is_exact) == (len('"\\u00e4b"'), False)
    few, many = (chat([{"role": "user", "content": "hi"}] * n) for n in (1, 3))
    assert (await sizer.size(few)).tokens < (await sizer.size(many)).tokens


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model: .*tokenizer.json"):
        TokenizerSizer(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is a thread's on Linux only")
async def test_who_counts_lets_the_event_loop_go_first(model: Path) -> None:
    niceness: dict[int, int] = {}

    def wants_ids() -> bool:
        thread = threading.get_native_id()
        niceness[thread] = os.getpriority(os.PRIO_PROCESS, thread)
        return True

    sizer = TokenizerSizer(model, wants_ids=wants_ids)
    try:
        await sizer.size(completion(prompt="much to count " * 10_000))
    finally:
        sizer.close()
    ours = niceness.pop(threading.get_native_id())
    assert niceness
    assert all(each > ours or ours == 19 for each in niceness.values())
