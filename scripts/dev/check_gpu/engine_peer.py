"""A built-in engine that answers commands: `python -m scripts.dev.check_gpu.engine_peer DEVICE LIFETIME_S`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from scripts.dev.common.peer import Peer, run
from transfer import wire
from transfer.engine.api import GenerationJob
from transfer.engine.config import EngineSettings
from transfer.engine.engine import Engine
from transfer.engine.sampling import SamplingParams

CHUNK = 64
NUM_TOKENS = 16
TIMEOUT_S = 60.0


class EnginePeer(Peer):
    """An `EnginePeer` is one engine. Mutable state: `_engine`, started once and closed with the process."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    async def start(self, role: str, folder: str, data_plane: str = "thread") -> list[Any]:
        """Returns the endpoints at which the engine receives KV."""
        settings = {
            "role": role,
            "model": Path(folder),
            "device": self.device,
            "chunk_size": CHUNK,
            "port": 0,
            "data_plane": data_plane,
        }
        engine = Engine(EngineSettings.model_validate({**settings, "prefix_cache": False, "threads": 1}))
        await engine.start()
        self._engine = engine
        receivers: list[Any] = msgspec.to_builtins(engine.buffer_facts().receivers)
        return receivers

    async def prefill(self, prompt: list[int], receivers: list[Any], attempt: str) -> dict[str, Any]:
        """Reads the prompt and pushes its KV. Returns the handoff that the decoder is to be told."""
        endpoints = msgspec.convert(receivers, list[wire.Endpoint])
        push = wire.PushParams(attempt=attempt, receivers=endpoints, timeout_s=TIMEOUT_S)
        async with self.engine.prefill(_job(prompt, push=push)) as prefill:
            prefill.keep()
            handoff = wire.Handoff(
                attempt=attempt,
                prompt_token_ids=prompt,
                first_token_id=prefill.first_token.token_id,
                num_pages=prefill.num_pages,
            )
        told: dict[str, Any] = msgspec.to_builtins(handoff)
        return told

    async def decode(self, handoff: dict[str, Any]) -> list[int]:
        """Returns the answer that continues from pushed KV."""
        told = msgspec.convert(handoff, wire.Handoff)
        return [told.first_token_id, *await self._answer(_job(told.prompt_token_ids, handoff=told))]

    async def alone(self, prompt: list[int]) -> list[int]:
        """Returns the answer of this engine by itself."""
        return await self._answer(_job(prompt))

    async def statistics(self) -> dict[str, Any]:
        return self.engine.statistics()

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.aclose()

    async def _answer(self, job: GenerationJob) -> list[int]:
        async with self.engine.generate(job) as tokens:
            return [token.token_id async for token in tokens]


def _job(prompt: list[int], **parts: Any) -> GenerationJob:
    greedy = SamplingParams(temperature=0)
    return GenerationJob(request_id="check", prompt_token_ids=prompt, sampling=greedy, max_tokens=NUM_TOKENS, **parts)


def main(device: str, lifetime_s: str) -> None:
    run(lambda: EnginePeer(device), lifetime_s)


if __name__ == "__main__":
    main(*sys.argv[1:])
