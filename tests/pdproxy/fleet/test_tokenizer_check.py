"""Every engine's tokenizer is compared with the proxy's before the proxy's ids are trusted."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from pdproxy.engines.http.base import EngineBroken
from pdproxy.fleet.tokenizer_check import MAX_TRIES, SAMPLE
from pdproxy.openai.request import CHAT
from pdproxy.tokens.tokenizer import FastTokenizer
from tests.fakes.fake_engine import FakeEngine, error_reply
from tests.fakes.proxy_harness import Harness, proxy_in_front_of

TEXT = "In 1984 and 2001 it was 12345 degrees"


class ThroughTransformers:
    """The tokenizer in a folder as engines build it."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))

    def ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model that says it is Qwen2's, whose numbers its own file cuts into groups of three digits. transformers
    puts Qwen2's way in place of that: digit by digit."""
    folder = tmp_path_factory.mktemp("qwen2-like")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<|endoftext|>", *alphabet, "12", "123", "19", "198", "20", "200"]
    merges = [("1", "2"), ("12", "3"), ("1", "9"), ("19", "8"), ("2", "0"), ("20", "0")]
    tokenizer = Tokenizer(models.BPE(vocab={piece: id_ for id_, piece in enumerate(pieces)}, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>", "model_max_length": 4096}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return folder


def told(house: Harness) -> list[dict[str, Any]]:
    """What the status page says of each engine's tokenizer."""
    return [one["tokenizer"] for one in house.proxy.pool.status()]


def ids_sent(house: Harness) -> list[int] | None:
    """With the last prefill leg."""
    ids: list[int] | None = house.prefiller.generations()[-1].body["kv_transfer_params"].get("prompt_token_ids")
    return ids


def test_the_two_do_differ(folder: Path) -> None:
    ours, theirs = FastTokenizer(folder), ThroughTransformers(folder)
    for text in (TEXT, SAMPLE):
        assert len(ours.ids(text, add_special_tokens=True)) < len(theirs.ids(text, add_special_tokens=True))


async def test_no_ids_are_sent_to_engines_that_tokenize_differently(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [FakeEngine("prefill"), FakeEngine("decode", num_pages=256)]
    for engine in engines:
        engine.tokenizer = ThroughTransformers(folder)
    with caplog.at_level(logging.WARNING):
        async with proxy_in_front_of(engines[:1], engines[1:], model=folder) as house:
            assert [one["agrees"] for one in told(house)] == [False, False]
            assert "tokens, the proxy's" in told(house)[0]["why"]
            assert "prefill-0: of a sample text" in caplog.text
            assert (await house.post(prompt=TEXT)).headers["x-pdproxy-path"] == "disaggregated"
            assert ids_sent(house) is None
            assert house.prefiller.bodies("/tokenize") == [], "its bound is small"
            await house.post(prompt=TEXT * 40)
            assert ids_sent(house) == engines[0].tokenizer.ids(TEXT * 40, add_special_tokens=True)


async def test_ids_are_sent_to_engines_that_agree(folder: Path) -> None:
    async with proxy_in_front_of(model=folder) as house:
        assert told(house) == [{"agrees": True, "why": ""}] * 2
        await house.post(prompt=TEXT)
        assert ids_sent(house) == FastTokenizer(folder).ids(TEXT, add_special_tokens=True)


async def test_one_that_joins_later_is_enough(folder: Path) -> None:
    """And it is compared anew, as a new process."""
    async with proxy_in_front_of(model=folder) as house:
        engine = house.prefiller
        engine.tokenizer, engine.epoch = ThroughTransformers(folder), "second"
        await house.proxy.probe.look(house.proxy.pool.instances[0])
        assert house.proxy.pool.is_ready
        assert [one["agrees"] for one in told(house)] == [False, True]
        await house.post(prompt=TEXT)
        assert ids_sent(house) is None


async def test_a_proxy_without_a_tokenizer_says_so() -> None:
    async with proxy_in_front_of() as house:
        assert told(house) == [{"agrees": None, "why": "the proxy has no tokenizer of its model"}] * 2


async def test_without_the_endpoint_the_usage_of_an_answer_is_compared(folder: Path) -> None:
    """The fakes count words: as the proxy does, where a word is a token."""
    engines = [FakeEngine("prefill"), FakeEngine("decode")]
    for engine in engines:
        engine.fail_at["/tokenize"] = error_reply(404, "not here")
    async with proxy_in_front_of(engines[:1], engines[1:], model=folder) as house:
        assert [one["agrees"] for one in told(house)] == [False, False]
        assert "makes" in told(house)[0]["why"]


@pytest.mark.parametrize("failure", [EngineBroken("gone"), error_reply(500, "oh")])
async def test_an_engine_that_cannot_be_compared_gets_ready_without_ids(folder: Path, failure: Any) -> None:
    engine = FakeEngine("prefill")
    engine.fail_at["tokenize" if isinstance(failure, Exception) else "/tokenize"] = failure
    async with proxy_in_front_of([engine], model=folder) as house:
        assert told(house)[0]["agrees"] is None
        assert "could not be compared" in told(house)[0]["why"]
        for _ in range(MAX_TRIES + 2):
            await house.proxy.probe.look(house.proxy.pool.instances[0])
        assert len(engine.bodies("/tokenize")) <= 2 * MAX_TRIES
        await house.post(prompt=TEXT)
        assert ids_sent(house) is None


async def test_an_engine_that_does_not_answer_delays_nobody_for_long(folder: Path) -> None:
    engine = FakeEngine("prefill")
    engine.hang_at.add("tokenize")
    async with proxy_in_front_of([engine], model=folder, probe_timeout_s=0.05) as house:
        assert told(house)[0] == {"agrees": None, "why": "its tokenizer could not be compared: it took too long"}


async def test_what_a_template_adds_is_measured() -> None:
    """With a system prompt of 1,000 tokens no chat has a small bound."""
    engine = FakeEngine("prefill")
    engine.read_ids = lambda body: [1] * (1000 + len(body.get("messages", "")))  # type: ignore[method-assign]
    async with proxy_in_front_of([engine]) as house:
        await house.post(CHAT, messages=[{"role": "user", "content": "hi"}])
        assert len(engine.bodies("/tokenize")) == 1
