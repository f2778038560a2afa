"""Two real vLLM engines swap their roles while clients ask. All answers are those of one vLLM, and none fails."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.vllm.clients import Clients
from tests.vllm.engines import Fleet
from tests.vllm.proxy import Proxy, serving
from tests.vllm.questions import Question, Said, ask_all, client_of, ids

ENGINES = ("single", "both-0", "both-1")
ALL_ENGINES = ENGINES
SEED = int(os.environ.get("PDPROXY_TEST_SEED", "7"))
NUM_SWAPS = 2
KEY = "operator"
WITHIN_S = 120.0
EXTERNAL = "external_kv_transfer"

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1000), pytest.mark.asyncio(loop_scope="function")]


class Asking(Clients):
    """`expected` has the right answers."""

    def __init__(self, proxy: Proxy, questions: list[Question], expected: list[Said]) -> None:
        super().__init__(proxy, questions)
        self._expected = expected
        self.served: Counter[tuple[str, ...]] = Counter()
        """How many answers came by which path, prefiller and decoder."""

    async def _ask(self, number: int) -> None:
        reply = await self._client.post("/v1/completions", json=self._questions[number].arguments)
        way = tuple(reply.headers.get(f"x-pdproxy-{what}", "") for what in ("path", "prefiller", "decoder"))
        self.served[way] += 1
        if reply.status_code != 200:
            self.wrong.append(f"question {number} by {way}: HTTP {reply.status_code} {reply.text[:300]}")
        elif (text := reply.json()["choices"][0]["text"]) != self._expected[number].text:
            self.wrong.append(f"question {number} by {way}: {text!r}")

    async def ask_more(self, num_answers: int, *way: str) -> None:
        """Until so many more answers have come, in this way where one is given."""
        before = self._count(way)
        async with asyncio.timeout(WITHIN_S):
            while self._count(way) < before + num_answers:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    def _count(self, way: tuple[str, ...]) -> int:
        return self.served[way] if way else self.served.total()


async def change(proxy: Proxy, name: str, role: str) -> dict[str, Any]:
    """Has an instance change its role, and returns its status when it has done so."""
    async with httpx.AsyncClient(base_url=proxy.url, headers={"authorization": f"Bearer {KEY}"}, timeout=30) as client:
        answer = await client.post(f"/admin/instances/{name}/role", json={"role": role})
    assert answer.status_code == 202, answer.text
    async with asyncio.timeout(WITHIN_S):
        while True:
            told = next(one for one in (await proxy.status())["fleet"] if one["name"] == name and "leaving" not in one)
            last: dict[str, Any] = told.get("role_change", {})
            assert last.get("phase") != "failed", told
            if last.get("phase") == "done" and last["to"] == role and told["state"] == "ready":
                return told
            await asyncio.sleep(0.2)


async def test_roles_are_swapped_under_traffic(using: Fleet, say: Callable[[str], None]) -> None:
    dice = random.Random(SEED)
    questions = [Question(ids(dice, dice.randint(40, 700)), max_tokens=dice.randint(2, 40)) for _ in range(24)]
    async with client_of(using["single"].url) as single:
        expected = await ask_all(single, questions, at_once=4)
    using["single"].freeze()
    urls = [using[name].url for name in ("both-0", "both-1")]
    async with (
        serving(using, urls[:1], urls[1:], "--admin-key", KEY) as proxy,
        Asking(proxy, questions, expected) as clients,
    ):
        prefiller, decoder = "prefill-0", "decode-0"  # as they are named in the beginning
        await clients.ask_more(6, "disaggregated", prefiller, decoder)
        for _ in range(NUM_SWAPS):
            assert (await change(proxy, prefiller, "decode"))["role"] == "decode"
            await clients.ask_more(4)
            assert (await change(proxy, decoder, "prefill"))["role"] == "prefill"
            prefiller, decoder = decoder, prefiller
            await clients.ask_more(6, "disaggregated", prefiller, decoder)
    say(f"seed {SEED}: {dict(clients.served)}")
    assert not clients.wrong, clients.wrong[:3]
    for name in ("both-0", "both-1"):
        assert await using[name].value("vllm:prompt_tokens_by_source_total", source=EXTERNAL) > 0
        assert await using[name].value("vllm:nixl_num_failed_transfers_total") == 0
        await using[name].becomes_idle(within_s=5)
