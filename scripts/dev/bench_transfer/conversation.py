"""The measurement counts what the turns of chats send: two engines, several chats side by side, with and without a
prefix cache.

It counts and does not time: the figures depend on the conversation and on the memory, and not on the machine. The PD
buffer has room for one prompt and a little, so that it has forgotten a chat when its next turn comes, as under load.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from scripts.dev.bench_transfer.plan import KIB
from transfer.engine.api import GenerationJob
from transfer.engine.config import EngineSettings
from transfer.engine.engine import Engine
from transfer.engine.sampling import SamplingParams
from transfer.engine.tiny import VOCABULARY_SIZE, make_tiny_model
from transfer.wire import Handoff, PushParams

CHUNK_SIZE = 16
MAX_MODEL_LEN = 1024
PD_PAGES = MAX_MODEL_LEN // CHUNK_SIZE + 8
CACHE_PAGES = 512
NUM_CHATS, NUM_TURNS = 4, 6
SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 400, 48, 40
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Turn:
    """A `Turn` is one turn of every chat together. `cached_pages` are those that the decoder had in its KV cache."""

    turn: int
    prompt_tokens: int
    prompt_pages: int
    sent_pages: int
    sent_bytes: int
    cached_pages: int


async def measure_conversation(seed: int) -> dict[str, Any]:
    """Returns, JSON-ready, the turns ``with`` and ``without`` a prefix cache at the decoder, turn by turn. Raises
    `TransferError`."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(folder)
        turns = {name: await _converse(model, seed, name == "with") for name in ("with", "without")}
    return {"chats": NUM_CHATS, **{name: [asdict(turn) for turn in found] for name, found in turns.items()}}


def conversation_lines(found: dict[str, Any]) -> list[str]:
    """Formats for people what `measure_conversation` found."""
    lines = [f"{found['chats']} chats side by side; pages (and KiB) sent with and without the decoder's prefix cache:"]
    for ours, without in zip(found["with"], found["without"], strict=True):
        lines.append(
            f"turn {ours['turn']}: {ours['prompt_pages']:4} pages of prompt, sent {ours['sent_pages']:4} "
            f"({ours['sent_bytes'] // KIB}) with, {without['sent_pages']:4} ({without['sent_bytes'] // KIB}) without"
        )
    return lines


async def _converse(model: Path, seed: int, has_prefix_cache: bool) -> list[Turn]:
    luck = random.Random(seed)
    chats = [_tokens(luck, SYSTEM_TOKENS) for _ in range(NUM_CHATS)]
    turns = []
    async with _engines(model, has_prefix_cache) as (prefiller, decoder):
        before = _counts(prefiller, decoder)
        for turn in range(1, NUM_TURNS + 1):
            for chat in chats:
                chat += _tokens(luck, QUESTION_TOKENS)
            num_tokens = sum(map(len, chats))
            num_pages = sum(-(-len(chat) // CHUNK_SIZE) for chat in chats)
            for chat in chats:
                chat += await _answer(prefiller, decoder, chat)
            now = _counts(prefiller, decoder)
            turns.append(Turn(turn, num_tokens, num_pages, *(b - a for a, b in zip(before, now, strict=True))))
            before = now
    return turns


@asynccontextmanager
async def _engines(model: Path, has_prefix_cache: bool) -> AsyncIterator[tuple[Engine, Engine]]:
    common: dict[str, Any] = {"model": model, "port": 0, "chunk_size": CHUNK_SIZE, "max_model_len": MAX_MODEL_LEN}
    prefiller = Engine(EngineSettings(role="prefill", **common))
    page_bytes = prefiller.buffer_facts().page_bytes
    sizes: dict[str, Any] = {"pd_buffer_size": PD_PAGES * page_bytes, "kv_cache_size": CACHE_PAGES * page_bytes}
    decoder = Engine(EngineSettings(role="decode", prefix_cache=has_prefix_cache, **sizes, **common))
    try:
        await prefiller.start()
        await decoder.start()
        yield prefiller, decoder
    finally:
        await prefiller.aclose()
        await decoder.aclose()


async def _answer(prefiller: Engine, decoder: Engine, prompt: list[int]) -> list[int]:
    """Returns the answer to `prompt`, when everything that was sent for it has been counted."""
    attempt = uuid.uuid4().hex
    job = GenerationJob(
        request_id=attempt,
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(temperature=0),
        max_tokens=ANSWER_TOKENS,
    )
    push = PushParams(attempt=attempt, receivers=decoder.buffer_facts().receivers, timeout_s=TIMEOUT_S, notify=None)
    async with prefiller.prefill(replace(job, push=push)) as prefill:
        first, num_pages = prefill.first_token.token_id, prefill.num_pages
        prefill.keep()
    handoff = Handoff(attempt=attempt, prompt_token_ids=list(prompt), first_token_id=first, num_pages=num_pages)
    async with decoder.generate(replace(job, handoff=handoff)) as running:
        answer = [first, *[token.token_id async for token in running]]
    while prefiller.statistics()["pushes"]:  # noqa: ASYNC110, the push ends behind its request
        await asyncio.sleep(0.001)
    return answer


def _counts(prefiller: Engine, decoder: Engine) -> tuple[int, int, int]:
    sent = prefiller.statistics()
    return sent["pushed_pages"], sent["pushed_bytes"], decoder.statistics()["cached_pages"]


def _tokens(luck: random.Random, count: int) -> list[int]:
    return [luck.randrange(6, VOCABULARY_SIZE) for _ in range(count)]
