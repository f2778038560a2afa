"""Models with windowed layers through real processes: only the tails of those layers take slots, and only they travel.

The buffer is too small for the whole prompt of all layers; what is larger still is refused, so nothing is served in
another way unseen.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.e2e.cluster import Cluster, running
from tests.e2e.test_equality import Reference, complete, make_prompt

pytestmark = pytest.mark.engine

CHUNK, WINDOW, NUM_TOKENS = 16, 64, 20
NUM_PAGES = 30
SHAPES = {"gpt_oss": (2, "sliding"), "llama4": (3, "chunked")}
"""Layers of either kind, of two heads of 16 elements each; and the kind that is windowed."""


def pages_of(kind: str, num_tokens: int) -> int:
    """Of both groups: every block of the full layers, and of the windowed ones those that will be read."""
    skipped = num_tokens // WINDOW * WINDOW if kind == "chunked" else max(0, num_tokens - WINDOW + 1)
    num_blocks = -(-num_tokens // CHUNK)
    return 2 * num_blocks - skipped // CHUNK


async def totals(cluster: Cluster) -> list[int]:
    """Slots granted and returned, pages and bytes pushed, tokens fed to the decoder."""
    (ledger,) = (await cluster.get("proxy", "/status"))["ledger"].values()
    pushed, decoder = await cluster.statistics("prefill-0"), await cluster.statistics("decode-0")
    slots = [ledger["granted"], ledger["returned"]]
    return [*slots, pushed["pushed_pages"], pushed["pushed_bytes"], decoder["tokens_fed"]]


@pytest.mark.parametrize("family", SHAPES)
async def test_only_the_tails_of_windowed_layers_take_slots(
    family: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    num_layers, kind = SHAPES[family]
    page_bytes = num_layers * CHUNK * 2 * (16 + 16) * 4
    folder = tiny_model(family)
    reference = Reference(folder)
    rng = random.Random(7)  # fixed: a near-tie that float32 rounds the other way is no fault
    engine = ("--chunk-size", str(CHUNK), "--served-model-name", "tiny")
    decode = ("--pd-buffer-size", str(NUM_PAGES * page_bytes))
    proxy = ("--chunk-size", str(CHUNK), "--oversized", "refuse")
    lengths = (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 400)
    assert pages_of(kind, 400) <= NUM_PAGES < 2 * -(-400 // CHUNK)

    async with running(folder, tmp_path, engine=engine, decode=decode, proxy=proxy) as cluster:
        facts = await cluster.get("decode-0", "/kv_buffer")
        assert [(g["kind"], g["num_layers"], g.get("window")) for g in facts["groups"]] == [
            ("full", num_layers, None), (kind, num_layers, WINDOW),
        ]  # fmt: skip
        assert (facts["num_pages"], facts["page_bytes"]) == (NUM_PAGES, page_bytes)
        await cluster.settled()
        before = await totals(cluster)
        async with httpx.AsyncClient(base_url=cluster.proxy, timeout=120) as client:
            for length in lengths:
                prompt = make_prompt(rng, length)
                answer = await complete(client, prompt, NUM_TOKENS, stream=False)
                assert answer == reference.tokens(prompt, NUM_TOKENS), length
            body = {"model": "tiny", "prompt": make_prompt(rng, 480), "max_tokens": 4}
            refused = await client.post("/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert f"{pages_of(kind, 480)}" in refused.json()["error"]["message"]
        await cluster.settled()
        num_pages = sum(pages_of(kind, length) for length in lengths)
        num_fed = len(lengths) * (NUM_TOKENS - 1)
        moved = [after - earlier for after, earlier in zip(await totals(cluster), before, strict=True)]
        assert moved == [num_pages, num_pages, num_pages, num_pages * page_bytes, num_fed]
