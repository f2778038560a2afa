"""A prefiller and a decoder, each a process, against one engine: token for token the same answers."""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path
from typing import Any

from scripts.dev.check_gpu.lanes import put_lanes
from scripts.dev.check_gpu.outcome import Found, StepFailed
from scripts.dev.common.child import Child, child_group

MODULE = "scripts.dev.check_gpu.engine_peer"
CHUNK, NUM_TOKENS = 64, 16
LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7, 1000)
LIFETIME_S = 300.0


async def one_and_one(
    device: str, prefiller_on: str, families: tuple[str, ...], seed: int, *, data_plane: str = "thread"
) -> Found:
    """Compares every family's answers through two processes with those of the decoder alone. The prefiller pushes from
    `data_plane`: ``thread`` or ``process``. Under ``UCX_PROTO_INFO=y`` the lanes of what pushed are found too."""
    pushed: dict[str, int] = {}
    lanes: dict[str, None] = {}
    for family in families:
        with tempfile.TemporaryDirectory(prefix="check-gpu-") as folder:
            rng = random.Random(seed)
            pushed[family], taken = await _family(family, folder, device, prefiller_on, rng, data_plane)
            lanes.update(dict.fromkeys(taken))
    total = sum(pushed.values())
    line = f"{len(LENGTHS)} prompts each of {', '.join(families)}: the same tokens, {total / 1e6:.1f} MB of KV pushed"
    facts = {"seed": seed, "data_plane": data_plane, "lengths": LENGTHS, "pushed_bytes": pushed, "lanes": list(lanes)}
    return Found(line, facts)


async def _family(
    family: str, folder: str, device: str, prefiller_on: str, rng: random.Random, data_plane: str
) -> tuple[int, list[str]]:
    """Returns the bytes that were pushed, and over which lanes. Raises `StepFailed` for a token that differs, or a
    prompt that was read twice."""
    from transformers.utils.logging import disable_progress_bar

    from transfer.engine.tiny import make_tiny_model

    disable_progress_bar()
    await asyncio.to_thread(make_tiny_model, Path(folder), family=family, seed=0)
    async with child_group() as children:
        prefiller = await children.start("prefill engine", MODULE, prefiller_on, LIFETIME_S)
        decoder = await children.start("decode engine", MODULE, device, LIFETIME_S)
        _, receivers = await asyncio.gather(
            prefiller.ask("start", "prefill", folder, data_plane), decoder.ask("start", "decode", folder)
        )
        for number, length in enumerate(LENGTHS):
            prompt = [rng.randrange(10, 500) for _ in range(length)]
            await _compare(prefiller, decoder, prompt, receivers, f"{family}-{number}")
        statistics = await prefiller.ask("statistics")
        # The engine's own writes, of its lane check, are not those of its data plane's process.
        own = prefiller.pid if data_plane == "process" else None
        return int(statistics["pushed_bytes"]), put_lanes(prefiller.said(), but_of=own)


async def _compare(prefiller: Child, decoder: Child, prompt: list[int], receivers: list[Any], attempt: str) -> None:
    fed = (await decoder.ask("statistics"))["tokens_fed"]
    handoff = await prefiller.ask("prefill", prompt, receivers, attempt)
    through_two = await decoder.ask("decode", handoff)
    fed = (await decoder.ask("statistics"))["tokens_fed"] - fed
    if fed >= len(through_two):
        raise StepFailed(f"{attempt}: the decoder read {fed} tokens for an answer of {len(through_two)}")
    by_one = await decoder.ask("alone", prompt)
    if through_two != by_one:
        raise StepFailed(f"{attempt}, {len(prompt)} tokens: {through_two} through two processes, {by_one} by one")
