"""Windowed models from one engine to another, over NIXL: what travels is what will be read, and the answer is the same.

The formulas are written out here, not taken from the library: a window of W needs a prompt's last W − 1 tokens, a chunk
of C what lies in the running one; blocks in front of that are null, the others travel whole. Whatever was not written
is NaN, so that one element read too many shows.
"""

from __future__ import annotations

import asyncio
import re
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq.asyncio
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")

from tests.fakes.transfer_world import Proxy
from transfer import logs, wire
from transfer.engine.__main__ import main
from transfer.engine.api import GenerationJob
from transfer.engine.config import EngineSettings
from transfer.engine.engine import Engine
from transfer.engine.paged_cache import observe_layout
from transfer.engine.sampling import SamplingParams
from transfer.errors import GeometryError, ReservationRefused

pytestmark = pytest.mark.engine

CHUNK = 4
WINDOWS = (3, CHUNK, 6, 10)
"""Smaller than a chunk, equal to it, larger; and no multiples of it."""
GREEDY = SamplingParams(temperature=0)
LAYER_BYTES = 2 * (16 + 16) * 8
"""Of a token in one layer: two heads of 16 elements, keys and values, float64."""
NAN = 0xFF


@dataclass(frozen=True)
class Shape:
    """How many layers keep everything, and how many only what is in a window."""

    num_full: int
    num_windowed: int
    is_chunked: bool = False

    def null_blocks(self, num_tokens: int, window: int, chunk: int) -> int:
        """In the windowed layers, in front of what will be read."""
        if self.is_chunked:
            return num_tokens // window * window // chunk
        return max(0, num_tokens - window + 1) // chunk

    def num_bytes(self, num_tokens: int, window: int, chunk: int) -> int:
        """What a prompt of so many tokens is when it travels."""
        num_blocks = -(-num_tokens // chunk)
        real = num_blocks - self.null_blocks(num_tokens, window, chunk)
        return (self.num_full * num_blocks + self.num_windowed * real) * chunk * LAYER_BYTES


SHAPES = {
    "gemma3": Shape(2, 4),
    "mistral": Shape(0, 4),
    "gpt_oss": Shape(2, 2),
    "llama4": Shape(3, 3, is_chunked=True),
}


@dataclass(frozen=True)
class Tiny:
    """A model in a folder, and as transformers runs it."""

    family: str
    window: int
    folder: Path
    model: Any


@dataclass
class Fed:
    """One forward pass of the decoder: the tokens fed, the sequence's tables, and the cache pages that are held."""

    position: int
    num_tokens: int
    tables: list[list[int | None]]
    num_held: int


class Pair:
    """A prefiller and a decoder, and the signals that the proxy would get."""

    def __init__(self, tiny: Tiny, chunk: int, prefiller: Engine, decoder: Engine) -> None:
        self.shape, self.window, self.chunk = SHAPES[tiny.family], tiny.window, chunk
        self.prefiller, self.decoder = prefiller, decoder
        self._model = tiny.model
        self._context = zmq.asyncio.Context()
        self._proxy = Proxy(self._context)
        self._num_bytes = 0
        self.fed: list[Fed] = []
        self._watch()

    def _watch(self) -> None:
        forward, pool = self.decoder._runner.forward, self.decoder._worker.scheduler.pool

        def watching(store: Any, tables: Any, position: int, token_ids: list[int], *rest: Any) -> torch.Tensor:
            self.fed.append(Fed(position, len(token_ids), [list(table) for table in tables], pool.num_held))
            return forward(store, tables, position, token_ids, *rest)

        self.decoder._runner.forward = watching  # type: ignore[method-assign]

    def expected(self, prompt: list[int], num_answer: int) -> list[int]:
        """By transformers alone."""
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            answer = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_answer, do_sample=False, eos_token_id=None
            )
        tokens: list[int] = answer[0, len(prompt) :].tolist()
        return tokens

    def poison(self) -> None:
        for engine in (self.prefiller, self.decoder):
            engine._store.buffer.pages.fill_(NAN)
        assert self.decoder._received is not None
        self.decoder._received.pages.fill_(NAN)

    def formula(self, num_tokens: int) -> int:
        return self.shape.num_bytes(num_tokens, self.window, self.chunk)

    async def answer(self, job: GenerationJob) -> tuple[list[int], int]:
        """The tokens that both legs write, and how many bytes have travelled for them."""
        attempt = uuid.uuid4().hex
        receivers = self.decoder.buffer_facts().receivers
        push = wire.PushParams(attempt=attempt, receivers=receivers, timeout_s=20, notify=self._proxy.address)
        async with self.prefiller.prefill(replace(job, push=push)) as prefill:
            first, num_pages = prefill.first_token.token_id, prefill.num_pages
            prefill.keep()
        handoff = wire.Handoff(
            attempt=attempt,
            prompt_token_ids=job.prompt_token_ids,
            first_token_id=first,
            num_pages=num_pages,
            num_answer_tokens=job.num_answer_tokens,
        )
        rest = await alone(self.decoder, replace(job, handoff=handoff))
        ready = await self._proxy.next(wire.KvReady, attempt)
        self._num_bytes += ready.num_bytes
        return [first, *rest], ready.num_bytes

    async def aclose(self) -> None:
        """Everything is given back, and nothing has travelled that no decoder was told of."""
        await asyncio.gather(*self.prefiller._background)
        assert self.prefiller.statistics()["pushed_bytes"] == self._num_bytes
        facts = self.decoder.buffer_facts()
        assert facts.num_free == facts.num_pages
        for engine in (self.prefiller, self.decoder):
            await engine.aclose()
            engine._worker.scheduler.check_integrity()
            assert engine._worker.scheduler.pool.num_held == 0
        self._proxy.close()
        self._context.term()


async def alone(engine: Engine, job: GenerationJob) -> list[int]:
    async with engine.generate(job) as running:
        return [token.token_id async for token in running]


def new_job(prompt: list[int], max_tokens: int, sampling: SamplingParams = GREEDY) -> GenerationJob:
    return GenerationJob(request_id="r", prompt_token_ids=prompt, sampling=sampling, max_tokens=max_tokens)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Different from the first token on, mostly: what was sent for one is of no use to another."""
    tokens: list[int] = torch.randint(
        6, 500, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)
    ).tolist()
    return tokens


NewPair = Callable[..., Awaitable[Pair]]


@pytest.fixture(scope="module")
def tiny_of(tiny_model: Callable[..., Path]) -> Callable[[str, int], Tiny]:
    @cache
    def make(family: str, window: int) -> Tiny:
        folder = tiny_model(family, window=window)
        return Tiny(family, window, folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval())

    return make


@pytest.fixture
async def new_pair(tiny_of: Callable[[str, int], Tiny]) -> AsyncIterator[NewPair]:
    pairs: list[Pair] = []

    async def make(
        family: str, window: int, *, chunk: int = CHUNK, layers_per_write: int | None = None, **decoder: Any
    ) -> Pair:
        tiny = tiny_of(family, window)
        common: dict[str, Any] = {
            "model": tiny.folder, "port": 0, "dtype": "float64", "threads": 1, "chunk_size": chunk,
            "kv_cache_size": "8MiB",
        }  # fmt: skip
        engines = [
            Engine(EngineSettings(role="prefill", layers_per_write=layers_per_write, **common)),
            Engine(EngineSettings(role="decode", **common | {"pd_buffer_size": "4MiB"} | decoder)),
        ]
        for engine in engines:
            await engine.start()
        pairs.append(Pair(tiny, chunk, *engines))
        return pairs[-1]

    yield make
    for pair in pairs:
        await pair.aclose()


def lengths_around(window: int, chunk: int) -> list[int]:
    """Everything up to three chunks and three windows, and two tokens more."""
    return list(range(1, 3 * max(window, chunk) + 3))


@pytest.mark.parametrize(
    ("family", "window", "layers_per_write"),
    [
        pytest.param(family, window, (1, 2, None)[(f + w) % 3], id=f"{family}-{window}")
        for f, family in enumerate(SHAPES)
        for w, window in enumerate(WINDOWS)
    ],
)
async def test_every_length_around_windows_and_blocks(
    new_pair: NewPair, family: str, window: int, layers_per_write: int | None
) -> None:
    pair = await new_pair(family, window, layers_per_write=layers_per_write)
    for length in lengths_around(window, CHUNK):
        prompt, num_answer = prompt_of(length), 3 + length % 4
        pair.poison()
        pair.fed.clear()
        tokens, num_bytes = await pair.answer(new_job(prompt, num_answer))
        assert tokens == pair.expected(prompt, num_answer), length
        assert num_bytes == pair.formula(length), length
        check_what_the_decoder_did(pair, length, num_answer)


def check_what_the_decoder_did(pair: Pair, num_prompt: int, num_answer: int) -> None:
    """It read no prompt, took exactly the pages that are read, and kept them until the end."""
    assert [(fed.position, fed.num_tokens) for fed in pair.fed] == [
        (num_prompt + i, 1) for i in range(num_answer - 1)
    ]  # the last token is told, not fed
    before = pair.fed[0]
    num_blocks = -(-num_prompt // pair.chunk)
    num_all_blocks = -(-(num_prompt + num_answer - 1) // pair.chunk)
    widest = -(-(pair.window - 1) // pair.chunk) + 1
    null = pair.shape.null_blocks(num_prompt, pair.window, pair.chunk)
    for table, group in zip(before.tables, pair.decoder._runner.layout.kv.groups, strict=True):
        first = 0 if group.window is None else null
        assert [page is None for page in table] == [True] * first + [False] * (num_all_blocks - first)
        arrived = table[first:num_blocks]
        assert len(set(arrived)) == len(arrived)
        most = num_all_blocks if group.window is None else widest
        assert len(set(table[first:])) == min(num_all_blocks - first, most)
    held = [page for table in before.tables for page in set(table) if page is not None]
    assert before.num_held == len(held) == len(set(held))
    assert all((fed.tables, fed.num_held) == (before.tables, before.num_held) for fed in pair.fed)


@pytest.mark.parametrize(
    ("family", "window", "chunk", "layers_per_write", "lengths"),
    [
        ("mistral", 384, 256, None, (255, 257, 384, 640)),  # where 256 KiB are two layers of the four
        ("gpt_oss", 24, 16, None, (15, 16, 17, 22, 23, 24, 25, 26, 48, 71)),
        ("gemma3", 32, 16, 1, (30, 31, 32, 33, 34, 47, 48, 49, 79, 80, 81)),  # a multiple of the chunk
        ("llama4", 32, 16, 2, (30, 31, 32, 33, 34, 48, 63, 64, 65, 66)),
    ],
)
async def test_larger_chunks(
    new_pair: NewPair, family: str, window: int, chunk: int, layers_per_write: int | None, lengths: tuple[int, ...]
) -> None:
    pair = await new_pair(family, window, chunk=chunk, layers_per_write=layers_per_write)
    for length in lengths:
        prompt = prompt_of(length)
        pair.poison()
        pair.fed.clear()
        assert await pair.answer(new_job(prompt, 4)) == (pair.expected(prompt, 4), pair.formula(length)), length
        check_what_the_decoder_did(pair, length, 4)


@pytest.mark.parametrize("family", SHAPES)
async def test_an_answer_that_goes_through_many_windows(new_pair: NewPair, family: str) -> None:
    pair = await new_pair(family, 6)
    for length in (1, 5, 6, 12, 19):
        prompt = prompt_of(length)
        pair.poison()
        pair.fed.clear()
        tokens, _ = await pair.answer(new_job(prompt, 30))
        assert tokens == pair.expected(prompt, 30), length
        check_what_the_decoder_did(pair, length, 30)


@pytest.mark.parametrize("family", SHAPES)
async def test_resumed_and_drawn_answers_go_on_as_in_one_engine(new_pair: NewPair, family: str) -> None:
    """Cut before, at and behind block and window borders; greedy, and drawn with a seed."""
    pair = await new_pair(family, 6)
    drawn = SamplingParams(temperature=1.3, top_p=0.95, seed=11, frequency_penalty=0.5)
    prompt = prompt_of(9)
    greedy_tokens, drawn_tokens = pair.expected(prompt, 14), await alone(pair.decoder, new_job(prompt, 14, drawn))
    assert drawn_tokens != greedy_tokens
    for sampling, tokens in ((GREEDY, greedy_tokens), (drawn, drawn_tokens)):
        for num_shown in (0, 2, 3, 4, 8, 9):
            job = new_job(prompt + tokens[:num_shown], 14, sampling)
            rest, _ = await pair.answer(replace(job, num_answer_tokens=num_shown))
            assert tokens[:num_shown] + rest == tokens, (sampling, num_shown)


@pytest.mark.parametrize("family", SHAPES)
async def test_what_is_there_already_does_not_travel_again(new_pair: NewPair, family: str) -> None:
    """Full layers' chunks are those of any prompt that begins alike; a window's tail is that of the same prompt."""
    pair = await new_pair(family, 6)
    prompt = prompt_of(16)
    longer = prompt + prompt_of(3, seed=1)
    full_chunk = pair.shape.num_full * CHUNK * LAYER_BYTES
    open_block = CHUNK * LAYER_BYTES * (pair.shape.num_full + pair.shape.num_windowed)
    for tokens, num_bytes in [
        (prompt, pair.formula(16)),
        (longer, pair.formula(19) - 4 * full_chunk),
        (prompt, 0),
        (longer, open_block),
    ]:
        assert await pair.answer(new_job(tokens, 8)) == (pair.expected(tokens, 8), num_bytes)


@pytest.mark.parametrize("family", SHAPES)
async def test_many_at_once_through_a_buffer_and_a_cache_for_a_few(new_pair: NewPair, family: str) -> None:
    shape = SHAPES[family]
    page = CHUNK * LAYER_BYTES * (shape.num_full or shape.num_windowed)
    most = shape.num_bytes(21, 6, CHUNK)
    pair = await new_pair(family, 6, pd_buffer_size=most + page, kv_cache_size=3 * most)
    prompts = [prompt_of(length, seed=2) for length in range(3, 22, 2)]
    answers = await asyncio.gather(*(pair.answer(new_job(prompt, 8)) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == (pair.expected(prompt, 8), pair.formula(len(prompt)))


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
async def test_the_buffer_holds_what_travels_and_no_page_less(new_pair: NewPair, family: str) -> None:
    """40 tokens are ten chunks; a buffer for their windows' tails alone takes them, with one page less it cannot."""
    shape = SHAPES[family]
    page = CHUNK * LAYER_BYTES * (shape.num_full or shape.num_windowed)
    exact = await new_pair(family, 6, pd_buffer_size=shape.num_bytes(40, 6, CHUNK))
    prompt = prompt_of(40)
    assert (await exact.answer(new_job(prompt, 4)))[0] == exact.expected(prompt, 4)
    smaller = await new_pair(family, 6, pd_buffer_size=shape.num_bytes(40, 6, CHUNK) - page, windowed=False)
    with pytest.raises(ReservationRefused):
        await smaller.answer(new_job(prompt, 4))


@pytest.mark.parametrize("family", SHAPES)
async def test_through_a_buffer_that_is_smaller(new_pair: NewPair, family: str) -> None:
    """Two pages of it: the same bytes travel, into the same pages of the cache, held as before from the prompt on."""
    shape = SHAPES[family]
    page = CHUNK * LAYER_BYTES * (shape.num_full or shape.num_windowed)
    pair = await new_pair(family, 10, layers_per_write=1, pd_buffer_size=2 * page)
    for length in (3, 9, 10, 13, 19, 20, 21, 40):
        prompt = prompt_of(length)
        pair.poison()
        pair.fed.clear()
        assert await pair.answer(new_job(prompt, 8)) == (pair.expected(prompt, 8), pair.formula(length)), length
        check_what_the_decoder_did(pair, length, 8)


_SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 8, "mamba_n_groups": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "mamba2", "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1}, "LinearAttention"),
        ({"model_type": "falcon_h1"} | _MAMBA, "LinearAttentionAndFullAttention"),
        ({"model_type": "bamba", "attn_layer_indices": [1]} | _MAMBA, "LinearAttention"),
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 2}, "LinearAttention"),
        ({"model_type": "rwkv", "attention_hidden_size": 32}, "no keys and values"),
        (
            {"model_type": "minimax", "layer_types": ["linear_attention", "full_attention"] * 2}
            | {"num_local_experts": 2, "num_experts_per_tok": 1},
            "MiniMaxForCausalLM takes no cache that could be paged: .* own",
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_a_state_that_cannot_be_paged_is_refused(config: dict[str, Any], reason: str) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**_SMALL | config)).eval()
    with pytest.raises(GeometryError, match=reason):
        observe_layout(model, CHUNK)


def test_an_engine_for_such_a_model_ends_with_one_line(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model("qwen3_next")
    told: list[str] = []
    monkeypatch.setattr(logs, "configure", lambda level: None)
    monkeypatch.setattr(logs, "writers", lambda: [SimpleNamespace(tell=told.append)])
    monkeypatch.setattr(sys, "argv", ["engine", "--role", "decode", "--model", str(folder), "--port", "0"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert re.fullmatch(r"error: layer 0 keeps its state in a .*; the built-in engine pages .* only", "".join(told))
    assert ended.value.code == 1
