"""Counting prompts: exactly with a tokenizer, never too low without."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from pdproxy.errors import ConfigError, InvalidRequest
from pdproxy.request import tokens
from pdproxy.request.openai import CHAT, COMPLETIONS, GenerationRequest, parse
from pdproxy.request.tokens import ByteSizer, TokenizerSizer, size_without_tokenizer

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
def sizer(model: Path) -> Any:
    sizer = TokenizerSizer(model)
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

    load = tokens._load_template
    monkeypatch.setattr(tokens, "_load_template", slow)
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
    messages = [{"role": "user", "content": "hi"}]
    assert not (await sizer.size(chat(messages, chat_template="{{ 1 }}"))).is_exact
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]
    assert not (await sizer.size(chat(image))).is_exact


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
