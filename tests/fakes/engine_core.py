"""An engine core that follows a script: which tokens come, where it hangs, where it fails. It keeps count of loans."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from transfer.engine.api import GenerationJob, ModelFacts
from transfer.engine.sampling import SampledToken
from transfer.wire import BufferFacts, Endpoint

Script = Callable[[GenerationJob], Iterable[SampledToken]]

ENTERING = -1
"""The point before the core accepts a job; `n ≥ 0` is the point before it yields its n-th token."""


class ScriptedCore:
    """Implements `EngineCore`. State: `jobs` seen, `num_lent` blocks not left yet, `kept` and `dropped` attempts.

    `hang_at` names the point at which every job waits for ever (`reached` tells that one does); `fail_at` the
    points at which it raises instead.
    """

    def __init__(
        self,
        script: Script,
        *,
        eos_token_ids: frozenset[int] = frozenset({1}),
        role: str = "decode",
        max_model_len: int = 256,
        num_cached_tokens: int = 0,
    ) -> None:
        self.model = ModelFacts(name="tiny", max_model_len=max_model_len, vocab_size=512, eos_token_ids=eos_token_ids)
        self.script = script
        self.role = role
        self.num_cached_tokens = num_cached_tokens
        self.terms: list[int] = []
        self.hang_at: int | None = None
        self.fail_at: dict[int, Exception] = {}
        self.healthy = True
        self.jobs: list[GenerationJob] = []
        self.num_lent = 0
        self.kept: list[str] = []
        self.dropped: list[str] = []
        self.cancelled: list[str] = []
        self.ended_senders: list[str] = []
        self.reached = asyncio.Event()

    def generate(self, job: GenerationJob) -> ScriptedGeneration:
        return ScriptedGeneration(self, job)

    def prefill(self, job: GenerationJob) -> ScriptedPrefill:
        return ScriptedPrefill(self, job)

    async def cancel(self, attempt: str) -> bool:
        self.cancelled.append(attempt)
        return True

    async def refresh(self) -> None:
        """There is one process."""

    async def sender_ended(self, epoch: str) -> bool:
        self.ended_senders.append(epoch)
        return True

    def hear_term(self, term: int) -> None:
        self.terms.append(term)

    def buffer_facts(self) -> BufferFacts:
        return BufferFacts(
            epoch="epoch-1",
            role=self.role,
            model="fingerprint",
            dtype="float32",
            chunk_size=16,
            bytes_per_token=64,
            page_bytes=1024,
            num_pages=8,
            num_free=8,
            num_quarantined=0,
            max_model_len=self.model.max_model_len,
            receivers=[Endpoint(rank=0, host="127.0.0.1", port=7300)],
        )

    def fault(self) -> str | None:
        return None if self.healthy else "its thread has ended"

    def statistics(self) -> dict[str, Any]:
        return {"num_lent": self.num_lent}

    async def at(self, point: int) -> None:
        """Hang or fail here, if the script says so."""
        if point == self.hang_at:
            self.reached.set()
            await asyncio.Event().wait()
        if point in self.fail_at:
            raise self.fail_at[point]


class ScriptedGeneration:
    def __init__(self, core: ScriptedCore, job: GenerationJob) -> None:
        self._core = core
        self._job = job
        self._script = enumerate(core.script(job))

    @property
    def num_cached_tokens(self) -> int:
        return self._core.num_cached_tokens

    async def __aenter__(self) -> ScriptedGeneration:
        self._core.jobs.append(self._job)
        await self._core.at(ENTERING)
        self._core.num_lent += 1
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._core.num_lent -= 1

    def __aiter__(self) -> AsyncIterator[SampledToken]:
        return self

    async def __anext__(self) -> SampledToken:
        for point, token in self._script:
            await self._core.at(point)
            return token
        raise StopAsyncIteration


class ScriptedPrefill:
    """Its first token is the script's first."""

    num_pages = 3

    def __init__(self, core: ScriptedCore, job: GenerationJob) -> None:
        assert job.push is not None
        self._core = core
        self._job = job
        self._attempt = job.push.attempt
        self.first_token: SampledToken = next(iter(core.script(job)))

    @property
    def num_cached_tokens(self) -> int:
        return self._core.num_cached_tokens

    async def __aenter__(self) -> ScriptedPrefill:
        self._core.jobs.append(self._job)
        try:
            await self._core.at(ENTERING)
        except BaseException:
            self._core.dropped.append(self._attempt)
            raise
        self._core.num_lent += 1
        return self

    def keep(self) -> None:
        self._core.kept.append(self._attempt)

    async def __aexit__(self, *exc_info: object) -> None:
        self._core.num_lent -= 1
        if self._attempt not in self._core.kept:
            self._core.dropped.append(self._attempt)
