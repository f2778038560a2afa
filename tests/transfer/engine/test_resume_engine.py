"""A real engine, both roles in one process, goes on with answers of its own that were cut: the same tokens follow."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")
from transformers import AutoTokenizer

from transfer.engine.config import EngineSettings
from transfer.engine.engine import Engine
from transfer.engine.server import build_app

pytestmark = pytest.mark.engine

PROMPT = list(range(10, 45))
CHUNK = 16


@dataclass
class LoopedEngine:
    """The engine on a loop of its own, which outlives the tests' loops."""

    runner: asyncio.Runner
    engine: Engine
    client: httpx.AsyncClient

    def post(self, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "return_token_ids": True} | fields
        response = self.runner.run(self.client.post("/v1/completions", json=body))
        assert response.status_code == 200, response.text
        return response

    def choice(self, **fields: Any) -> dict[str, Any]:
        choice: dict[str, Any] = self.post(**fields).json()["choices"][0]
        return choice

    def chunks(self, **fields: Any) -> list[dict[str, Any]]:
        blocks = self.post(stream=True, **fields).text.split("\n\n")
        return [json.loads(block.removeprefix("data: "))["choices"][0] for block in blocks if "{" in block]

    def by_transfer(self, shown: list[int], **fields: Any) -> dict[str, Any]:
        receivers = msgspec.to_builtins(self.engine.buffer_facts().receivers)
        params = {"attempt": uuid.uuid4().hex, "receivers": receivers, "timeout_s": 20.0} | resumed(shown)
        leg = {name: value for name, value in fields.items() if name != "max_tokens"}
        reply = self.post(**leg, kv_transfer_params=params).json()
        if "kv_transfer_params" not in reply:
            choice: dict[str, Any] = reply["choices"][0]
            return choice
        return self.choice(**fields, kv_transfer_params=reply["kv_transfer_params"])


def resumed(shown: list[int]) -> dict[str, Any]:
    return {"prompt_token_ids": [*PROMPT, *shown], "num_answer_tokens": len(shown)}


@pytest.fixture(scope="module")
def looped(tiny_model: Callable[..., Path]) -> Iterator[LoopedEngine]:
    folder = tiny_model(vocabulary="bytes")
    options: dict[str, Any] = {"kv_cache_size": 8 << 20, "pd_buffer_size": 4 << 20, "chunk_size": CHUNK}
    # float64, so that a prompt read in other pieces moves no draw to the next token
    settings = EngineSettings(
        role="both", model=folder, served_model_name="tiny", port=0, dtype="float64", threads=1, **options
    )
    with asyncio.Runner() as runner:
        engine = Engine(settings)
        runner.run(engine.start())
        app = build_app(engine, AutoTokenizer.from_pretrained(folder, local_files_only=True))
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine")
        yield LoopedEngine(runner, engine, client)
        runner.run(client.aclose())
        runner.run(engine.aclose())
    assert engine.buffer_facts().num_free == engine.buffer_facts().num_pages
    cache = engine.statistics()["cache_pages"]
    assert cache["free"] == cache["total"]


samplings = st.fixed_dictionaries(
    {"seed": st.integers(0, 1000)},
    optional={
        "temperature": st.sampled_from([0, 0.7, 1.5]),
        "top_p": st.just(0.9),
        "frequency_penalty": st.sampled_from([2.0, -2.0]),
        "presence_penalty": st.sampled_from([2.0, -1.0]),
        "logit_bias": st.just({"1": 7.0}),
        "min_tokens": st.integers(1, 12),
    },
)


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(sampling=samplings, cut=st.integers(0, 11), stop_at=st.none() | st.integers(0, 10))
def test_the_same_tokens_follow(looped: LoopedEngine, sampling: dict[str, Any], cut: int, stop_at: int | None) -> None:
    whole = looped.choice(**sampling)
    if stop_at is not None:  # two characters of the answer itself, so that the stop string is met
        sampling = sampling | {"stop": whole["text"][stop_at : stop_at + 2] or "\n"}
        whole = looped.choice(**sampling)
    chunks = looped.chunks(**sampling)
    before = chunks[: min(cut, len(chunks) - 1)]
    shown = [token_id for chunk in before for token_id in chunk["token_ids"]]
    text = "".join(chunk["text"] for chunk in before)
    alone = looped.choice(**sampling, kv_transfer_params=resumed(shown))
    for rest in (alone, looped.by_transfer(shown, **sampling)):
        assert shown + rest["token_ids"] == whole["token_ids"]
        assert text + rest["text"] == whole["text"]
        assert rest["finish_reason"] == whole["finish_reason"]


@pytest.mark.parametrize("num_shown", [1, CHUNK * 3 - len(PROMPT) - 1, CHUNK * 3 - len(PROMPT), 23])
def test_greedy_across_page_borders(looped: LoopedEngine, num_shown: int) -> None:
    fields = {"temperature": 0, "max_tokens": 24, "logprobs": 1}
    whole = looped.choice(**fields)
    shown = whole["token_ids"][:num_shown]
    for rest in (
        looped.choice(**fields, kv_transfer_params=resumed(shown)),
        looped.by_transfer(shown, **fields),
    ):
        assert shown + rest["token_ids"] == whole["token_ids"]
        assert whole["text"].endswith(rest["text"])
        num_scored = len(rest["logprobs"]["token_logprobs"])
        assert rest["logprobs"]["text_offset"] == whole["logprobs"]["text_offset"][-num_scored:]
        known = [score for score in rest["logprobs"]["token_logprobs"] if score is not None]
        assert known == pytest.approx(whole["logprobs"]["token_logprobs"][-len(known) :], abs=1e-4)
