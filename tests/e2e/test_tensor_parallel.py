"""Engines of several tensor-parallel ranks, each a process of its own: their answers, and what becomes of all of them
when one dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import select
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.e2e.cluster import Cluster, Process, running
from tests.e2e.test_equality import CHUNK, Reference, complete, events_of, make_prompt

pytestmark = pytest.mark.engine

LENGTHS = (1, 2, CHUNK - 1, CHUNK + 1, 5 * CHUNK + 7)
NUM_TOKENS = 12
END_LIMIT_S = 20.0
ENGINE = ("--chunk-size", str(CHUNK), "--served-model-name", "tiny", "--threads", "1", "--dtype", "float32")
PROCESSES = ("--data-plane", "process")


def sized(size: int) -> tuple[str, ...]:
    return ("--tensor-parallel-size", str(size))


@pytest.mark.parametrize(
    ("family", "num_prefill_ranks", "num_decode_ranks"),
    [("llama", 1, 2), ("llama", 2, 1), ("gemma3", 2, 2), ("deepseek", 1, 2)],
)
async def test_tokens_equal_generate(
    family: str, num_prefill_ranks: int, num_decode_ranks: int, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Side by side and one by one, streamed and whole, read anew and from the prefix cache; the rest comes from the
    decoder alone."""
    rng = random.Random(7)  # fixed, as in `test_equality`: a near-tie that rounds the other way is no fault
    folder = tiny_model(family)
    reference = Reference(folder)
    prompts = [make_prompt(rng, length) for length in LENGTHS]
    async with running(
        folder,
        tmp_path,
        engine=ENGINE,
        prefill=(*sized(num_prefill_ranks), *(PROCESSES if family == "gemma3" else ())),
        decode=sized(num_decode_ranks),
    ) as cluster:
        facts = await cluster.get("decode-0", "/kv_buffer")
        assert [one["rank"] for one in facts["receivers"]] == list(range(num_decode_ranks))
        async with httpx.AsyncClient(base_url=cluster.proxy, timeout=120) as client:
            for stream in (False, True):
                answers = await asyncio.gather(*(complete(client, p, NUM_TOKENS, stream=stream) for p in prompts))
                for prompt, answer in zip(prompts, answers, strict=True):
                    assert answer == reference.tokens(prompt, NUM_TOKENS), len(prompt)
            body = {
                "model": "tiny",
                "prompt": prompts[-1],
                "n": 2,
                "max_tokens": NUM_TOKENS,
                "temperature": 0,
                "logprobs": 0,
            }
            reply = await client.post("/v1/completions", json=body)
            assert reply.headers["x-pdproxy-path"].startswith("local")
            told = [choice["logprobs"]["tokens"] for choice in reply.json()["choices"]]
            assert told == [reference.tokens(prompts[-1], NUM_TOKENS)] * 2
        assert (await cluster.statistics("decode-0"))["handoffs"] >= 2 * len(prompts)
        await cluster.settled()


async def test_clients_that_leave_free_every_rank(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """In a buffer for a few of them, in every phase; those that stay get their answers, and nothing is held at the end:
    the decoder tells the pages of its worst rank."""
    rng = random.Random(11)
    folder = tiny_model()
    reference = Reference(folder)
    page_bytes = 4 * 2 * 16 * 2 * 4 * CHUNK // 2  # 4 layers, 2 heads of 16, keys and values, float32; half on a rank
    small = ("--pd-buffer-size", str(12 * page_bytes))
    async with running(folder, tmp_path, engine=ENGINE, prefill=sized(2), decode=(*sized(2), *small)) as cluster:
        facts = await cluster.get("decode-0", "/kv_buffer")
        assert (facts["num_pages"], facts["page_bytes"]) == (12, page_bytes)

        async def leave(client: httpx.AsyncClient, after_s: float) -> None:
            body = {"model": "tiny", "prompt": make_prompt(rng, 600), "max_tokens": 2000, "stream": True}
            with contextlib.suppress(TimeoutError):
                async with (
                    asyncio.timeout(after_s),
                    client.stream("POST", "/v1/completions", json=body) as reply,
                ):
                    await reply.aread()
                    raise AssertionError("it stayed to the end")

        async with httpx.AsyncClient(base_url=cluster.proxy, timeout=120) as client:
            prompts = [make_prompt(rng, rng.randrange(1, 700)) for _ in range(8)]
            stay = [complete(client, prompt, NUM_TOKENS, stream=bool(i % 2)) for i, prompt in enumerate(prompts)]
            answers, _ = await asyncio.gather(
                asyncio.gather(*stay), asyncio.gather(*(leave(client, 0.05 * number) for number in range(1, 25)))
            )
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer == reference.tokens(prompt, NUM_TOKENS), len(prompt)
        await cluster.settled()


def ranks_of(engine: Process) -> list[int]:
    """The processes of its ranks, in order: its own, and its children."""
    children = Path(f"/proc/{engine.pid}/task/{engine.pid}/children").read_text().split()
    return [engine.pid, *map(int, children)]


def has_ended(pidfd: int, limit_s: float) -> bool:
    """Whether the process ends within so many seconds."""
    return bool(select.select([pidfd], [], [], limit_s)[0])


async def gone(engine: Process, pidfds: list[int]) -> int:
    """Wait until the engine and all of its ranks are gone, `END_LIMIT_S` at most. The engine's exit status."""
    status = await asyncio.to_thread(engine.child.wait, END_LIMIT_S)
    for pidfd in pidfds:
        assert await asyncio.to_thread(has_ended, pidfd, 1.0)
        os.close(pidfd)
    return status


async def ask(cluster: Cluster, prompt: list[int], num_tokens: int, begun: asyncio.Event) -> tuple[int, str]:
    """Status and text of a streamed answer; `begun` is set once there is some of it."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True}
    text = ""
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{cluster.proxy}/v1/completions", json=body) as reply,
    ):
        async for piece in reply.aiter_text():
            text += piece
            begun.set()
        return reply.status_code, text


@pytest.mark.parametrize("index", [0, 1])
async def test_a_decoders_rank_is_killed_in_the_middle_of_an_answer(
    index: int, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """With rank 0 all others end, one that stands still too; with another rank, rank 0, which says why."""
    async with running(tiny_model(), tmp_path, engine=ENGINE, decode=sized(2)) as cluster:
        engine = cluster.processes.pop("decode-0")
        ranks = ranks_of(engine)
        pidfds = [os.pidfd_open(pid) for pid in ranks]
        assert len(ranks) == 2
        begun = asyncio.Event()
        answer = asyncio.create_task(ask(cluster, [20] * 100, 4000, begun))
        await begun.wait()
        if index == 0:
            os.kill(ranks[1], signal.SIGSTOP)
        os.kill(ranks[index], signal.SIGKILL)
        status = await gone(engine, pidfds)
        _, text = await answer
        assert '"error"' in text
        assert "[DONE]" not in text
        if index == 1:
            assert status == 1
            assert f"rank 1 of this engine (process {ranks[1]}) is gone: killed by SIGKILL" in engine.log.read_text()


async def test_a_prefillers_rank_is_killed_while_it_reads(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Another prefiller reads the prompt; the client sees nothing but the answer."""
    async with running(
        tiny_model(), tmp_path, engine=ENGINE, prefill=sized(2), num_prefillers=2, decode=("--max-model-len", "4096")
    ) as cluster:
        await both_ready(cluster)
        reference = Reference(cluster.model)
        prompt = make_prompt(random.Random(7), 3000)
        answer = asyncio.create_task(ask(cluster, prompt, NUM_TOKENS, asyncio.Event()))
        engine = await reading(cluster)
        ranks = ranks_of(engine)
        pidfds = [os.pidfd_open(pid) for pid in ranks]
        os.kill(ranks[1], signal.SIGKILL)
        assert await gone(engine, pidfds) == 1
        status, text = await answer
        assert status == 200, text
        assert "".join(reference.tokens(prompt, NUM_TOKENS)) == text_of(text)
        del cluster.processes[engine.name]
        await cluster.settled()


async def both_ready(cluster: Cluster) -> None:
    while [one["state"] for one in (await cluster.get("proxy", "/status"))["fleet"]] != ["ready"] * 3:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def reading(cluster: Cluster) -> Process:
    """The prefiller that has a request."""
    while True:
        for name in ("prefill-0", "prefill-1"):
            if (await cluster.statistics(name))["sequences"]["prefilling"]:
                return cluster.processes[name]


def text_of(stream: str) -> str:
    return "".join(choice["text"] for event in events_of(stream) for choice in event["choices"])
