"""Two engines in one process, a prefiller and a decoder, over NIXL; and what `generate` of transformers answers."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import zmq.asyncio
from transformers import AutoModelForCausalLM

from tests.fakes.transfer_world import Proxy, until
from transfer import wire
from transfer.engine.api import GenerationJob
from transfer.engine.config import EngineSettings
from transfer.engine.engine import Engine
from transfer.engine.sampling import SamplingParams

CHUNK = 4
LAYER_BYTES = 2 * (16 + 16) * 8
"""Of a token in one layer: two heads of 16 elements, keys and values, float64."""
WINDOWED = ("gemma3", "mistral", "gpt_oss", "llama4")
"""Families of tiny models whose layers, or some of them, see no further than a window."""
LAYERS_PER_PAGE = {"llama": 4, "gemma3": 2, "mistral": 4, "llama4": 3}


@cache
def reference(folder: Path) -> Any:
    """The model as transformers runs it, which nobody changes."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


@dataclass
class Leg:
    """A prompt that is being pushed, and what the prefiller said of it."""

    job: GenerationJob
    handoff: wire.Handoff


class Pair:
    """A prefiller, a decoder with a small PD buffer, and the proxy's ear."""

    def __init__(self, folder: Path, prefiller: Engine, decoder: Engine) -> None:
        self.prefiller, self.decoder = prefiller, decoder
        self._model = reference(folder)
        self._context = zmq.asyncio.Context()
        self.proxy = Proxy(self._context)

    def expected(self, job: GenerationJob) -> list[int]:
        """By transformers alone."""
        ids = torch.tensor([job.prompt_token_ids])
        with torch.inference_mode():
            answer = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=job.max_tokens,
                do_sample=False,
                eos_token_id=None,
            )
        tokens: list[int] = answer[0, ids.shape[1] :].tolist()
        return tokens

    async def prefill(
        self, job: GenerationJob, *, timeout_s: float = 30.0, keep: bool = True, give_up_at: asyncio.Event | None = None
    ) -> Leg:
        """Without `keep` it is given up: at once, or at `give_up_at`, if that comes within ten seconds."""
        attempt = uuid.uuid4().hex
        receivers = self.decoder.buffer_facts().receivers
        push = wire.PushParams(attempt=attempt, receivers=receivers, timeout_s=timeout_s, notify=self.proxy.address)
        async with self.prefiller.prefill(replace(job, push=push)) as prefill:
            first, num_pages = prefill.first_token.token_id, prefill.num_pages
            if keep:
                prefill.keep()
            elif give_up_at is not None:
                await asyncio.wait_for(give_up_at.wait(), 10)
        ids = job.prompt_token_ids
        return Leg(job, wire.Handoff(attempt=attempt, prompt_token_ids=ids, first_token_id=first, num_pages=num_pages))

    async def decode(self, leg: Leg) -> list[int]:
        rest = await alone(self.decoder, replace(leg.job, handoff=leg.handoff))
        return [leg.handoff.first_token_id, *rest]

    async def answer(self, job: GenerationJob) -> list[int]:
        return await self.decode(await self.prefill(job))

    @asynccontextmanager
    async def cache_taken(self, num_pages: int) -> AsyncIterator[None]:
        """Somebody holds so many pages of the decoder's cache."""
        async with self.decoder.generate(new_job(2, num_pages * CHUNK - 2)) as running:
            await anext(aiter(running))
            assert await self.on_worker(lambda: num_used(self.decoder)) == num_pages
            yield

    @property
    def scheduler(self) -> Any:
        return self.decoder._worker.scheduler

    @property
    def num_taken(self) -> int:
        """Pages of the windowed attempt that have been copied into the cache."""
        return sum(r.num_taken for r in self.decoder._receiver.reservations._attempts.values())  # type: ignore[union-attr]

    async def on_worker(self, question: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self.decoder._worker.call(question))

    async def all_is_back(self) -> None:
        """Everywhere, within a moment; and it adds up."""
        await asyncio.gather(*self.prefiller._background)
        facts = self.decoder.buffer_facts
        await until(lambda: facts().num_free == facts().num_pages)
        for engine in (self.prefiller, self.decoder):
            worker = engine._worker
            await asyncio.wrap_future(worker.call(worker.scheduler.check_integrity))
            assert num_used(engine) == 0
            assert not any(worker.scheduler.counts.values())

    async def aclose(self) -> None:
        try:
            await self.all_is_back()
        finally:
            for engine in (self.prefiller, self.decoder):
                await engine.aclose()
            self.proxy.close()
            self._context.term()


def num_used(engine: Engine) -> int:
    """Cache pages that somebody holds; what is only kept for prompts to come is free."""
    scheduler = engine._worker.scheduler
    return scheduler.pool.num_pages - scheduler.store.num_available


async def alone(engine: Engine, job: GenerationJob) -> list[int]:
    async with engine.generate(job) as running:
        return [token.token_id async for token in running]


def new_job(num_prompt: int, max_tokens: int = 6, seed: int = 0) -> GenerationJob:
    generator = torch.Generator().manual_seed(1000 * seed + num_prompt)
    prompt = torch.randint(6, 500, (num_prompt,), generator=generator).tolist()
    return GenerationJob(
        request_id="r", prompt_token_ids=prompt, sampling=SamplingParams(temperature=0), max_tokens=max_tokens
    )


@asynccontextmanager
async def engine_pairs() -> AsyncIterator[Callable[..., Any]]:
    """`await make(folder, page_bytes=…, buffer_pages=…, cache_pages=…, **decoder)`; all is given back at the end."""
    async with AsyncExitStack() as stack:

        async def make(
            folder: Path,
            *,
            page_bytes: int = CHUNK * LAYER_BYTES * 4,
            buffer_pages: int = 100,
            cache_pages: int = 100,
            prefill_pages: int = 500,
            prefill: dict[str, Any] | None = None,
            **decoder: Any,
        ) -> Pair:
            common: dict[str, Any] = {"model": folder, "port": 0, "dtype": "float64", "threads": 1, "chunk_size": CHUNK}
            sizes = {"pd_buffer_size": buffer_pages * page_bytes, "kv_cache_size": cache_pages * page_bytes}
            engines = [
                Engine(
                    EngineSettings(role="prefill", kv_cache_size=prefill_pages * page_bytes, **common, **prefill or {})
                ),
                Engine(EngineSettings(role="decode", **common, **sizes, **decoder)),
            ]
            for engine in engines:
                await engine.start()
            pair = Pair(folder, *engines)
            stack.push_async_callback(pair.aclose)
            return pair

        yield make
