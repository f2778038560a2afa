"""What an engine says of its memory: how long a sequence may be, how much a job needs, what its pages are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")

from transfer.engine.api import GenerationJob, JobTooLarge
from transfer.engine.config import EngineSettings
from transfer.engine.engine import Engine
from transfer.engine.sampling import SamplingParams
from transfer.errors import GeometryError, IntegrityError

CHUNK = 16
PAGE = CHUNK * 2 * 2 * (16 + 16) * 4
"""Bytes: two layers of two heads, float32."""


@pytest.fixture(scope="module")
def gemma3(tiny_model: Callable[..., Path]) -> Path:
    """Two full layers and four windowed ones (64 tokens): three page groups of two layers."""
    return tiny_model("gemma3")


def new_engine(model: Path, cache_pages: int, **more: Any) -> Engine:
    options: dict[str, Any] = {"kv_cache_size": cache_pages * PAGE, "chunk_size": CHUNK, "threads": 1} | more
    return Engine(EngineSettings(role="prefill", model=model, port=0, **options))


def test_a_cache_without_a_page_for_each_group_is_refused(gemma3: Path) -> None:
    with pytest.raises(GeometryError, match="room for 2 pages; one chunk of this model needs 3"):
        new_engine(gemma3, 2)


@pytest.mark.parametrize(
    ("cache_pages", "expected"),
    [(3, CHUNK), (14, 4 * CHUNK), (15, 5 * CHUNK), (16, 6 * CHUNK), (20, 10 * CHUNK)],
)
def test_the_longest_sequence_is_what_the_cache_holds(gemma3: Path, cache_pages: int, expected: int) -> None:
    """From the fifth block on only the full layers' group grows: a window of 64 and a chunk touch five blocks."""
    assert new_engine(gemma3, cache_pages).model.max_model_len == expected


def test_the_page_groups_are_told(gemma3: Path) -> None:
    facts = new_engine(gemma3, 20).buffer_facts()
    assert [(g.kind, g.num_layers, g.window) for g in facts.groups] == [
        ("full", 2, None), ("sliding", 2, 64), ("sliding", 2, 64),
    ]  # fmt: skip
    assert (facts.page_bytes, facts.bytes_per_token, facts.windowed) == (PAGE, 3 * PAGE // CHUNK, False)


async def test_a_job_too_large_is_told_in_pages_of_all_groups(gemma3: Path) -> None:
    job = GenerationJob(
        request_id="r", prompt_token_ids=[7] * 200, sampling=SamplingParams(temperature=0), max_tokens=10
    )
    with pytest.raises(JobTooLarge, match="need 24 pages of KV cache, this engine has 20"):
        async with new_engine(gemma3, 20).generate(job):
            pass


async def test_what_the_scheduler_will_not_have_is_an_error_and_no_silence(
    gemma3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(sequence: object) -> None:
        raise IntegrityError("the books are wrong")

    engine = new_engine(gemma3, 20)
    monkeypatch.setattr(engine._worker.scheduler, "add", broken)
    engine._worker.start()
    job = GenerationJob(request_id="r", prompt_token_ids=[7], sampling=SamplingParams(temperature=0), max_tokens=2)
    try:
        async with asyncio.timeout(5):
            with pytest.raises(IntegrityError, match="the books are wrong"):
                async with engine.generate(job) as tokens:
                    _ = [token async for token in tokens]
    finally:
        engine._worker.close()
