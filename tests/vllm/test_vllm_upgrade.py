"""A fleet of real vLLM engines is upgraded one by one to other weights and larger blocks, while clients ask.

Two revisions serve side by side in between. Nothing of what NixlConnector would be handed across them means anything:
vLLM refuses it, and an answer of both would be neither one's.
"""

from __future__ import annotations

import asyncio
import json
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

SEED = 11
OLD = ("prefill-0", "decode-0", "prefill-1", "decode-1")
NEXT = "next-"
ALL_ENGINES: tuple[str, ...] = ()
"""They are started in turn: all together would take too much memory."""
KEY = "upgrade"
WITHIN_S = 120.0

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1000)]


class Asking(Clients):
    """`expected` has the right answers, of the old revision and of the next one."""

    def __init__(self, proxy: Proxy, questions: list[Question], expected: dict[bool, list[Said]]) -> None:
        super().__init__(proxy, questions)
        self._expected = expected
        self.served: Counter[str] = Counter()

    async def _ask(self, number: int) -> None:
        question = self._questions[number]
        reply = await self._client.post("/v1/completions", json=question.arguments)
        pair = [reply.headers.get(f"x-pdproxy-{role}", "") for role in ("prefiller", "decoder")]
        self.served.update(pair)
        is_next = [name.startswith(NEXT) for name in pair]
        if reply.status_code != 200 or "" in pair or is_next[0] is not is_next[1]:
            self.wrong.append(f"question {number} at {pair}: HTTP {reply.status_code} {reply.text[:300]}")
        elif (text := _text(reply.text, is_stream=question.stream)) != self._expected[is_next[0]][number].text:
            self.wrong.append(f"question {number} at {pair}: {text!r}")

    async def ask_more(self, num_answers: int) -> None:
        before = self.served.total()
        while self.served.total() < before + 2 * num_answers:  # noqa: ASYNC110 (each counts at both of its engines)
            await asyncio.sleep(0.1)


def _text(body: str, *, is_stream: bool) -> str:
    lines = [line.removeprefix("data: ") for line in body.splitlines()] if is_stream else [body]
    chunks = [json.loads(line) for line in lines if line.startswith("{")]
    return "".join(choice["text"] or "" for chunk in chunks for choice in chunk["choices"])


class Operator:
    """Whoever upgrades the fleet, by the proxy's admin API."""

    def __init__(self, fleet: Fleet, proxy: Proxy) -> None:
        self._fleet = fleet
        self._proxy = proxy
        self._client = httpx.AsyncClient(base_url=proxy.url, headers={"authorization": f"Bearer {KEY}"}, timeout=30)
        self.waited: list[str] = []
        """The new instances that were seen to wait for a counterpart."""

    async def __aenter__(self) -> Operator:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def replace(self, name: str) -> None:
        """Adds the next one, and takes the old one out when nothing is under way there any more."""
        engine = self._fleet[NEXT + name]
        engine.thaw()
        added = {"name": engine.name, "role": name.partition("-")[0], "url": engine.url, "engine": "vllm_nixl"}
        assert (await self._client.post("/admin/instances", json=added)).is_success
        told = await self._until(engine.name, lambda one: one["state"] == "ready" or "of its revision" in one["why"])
        if told["state"] != "ready":
            self.waited.append(engine.name)
        assert (await self._client.post(f"/admin/instances/{name}/drain")).is_success
        async with asyncio.timeout(WITHIN_S):
            while not (await self._client.delete(f"/admin/instances/{name}")).is_success:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        await asyncio.to_thread(self._fleet.kill, name)

    async def becomes_ready(self, name: str) -> None:
        await self._until(name, lambda one: one["state"] == "ready")

    async def _until(self, name: str, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        told: dict[str, Any] = {}
        async with asyncio.timeout(WITHIN_S):
            while not told or not is_so(told):
                await asyncio.sleep(0.2)
                told = next(one for one in (await self._proxy.status())["fleet"] if one["name"] == name)
        return told


async def test_an_upgrade_one_by_one_under_load(fleet: Fleet, say: Callable[[str], None]) -> None:
    dice = random.Random(SEED)
    questions = [Question(ids(dice, 20 + 37 * n), max_tokens=8, stream=bool(n % 2)) for n in range(6)]
    fleet.use("single", f"{NEXT}single")
    expected = {}
    for is_next, name in ((False, "single"), (True, f"{NEXT}single")):
        async with client_of(fleet[name].url) as client:
            expected[is_next] = await ask_all(client, questions, 1)
        fleet.kill(name)
    assert not set(expected[False]) & set(expected[True]), "the revisions answer alike"

    fleet.use(*OLD, *(NEXT + name for name in OLD))
    fleet.use(*OLD)
    urls = [[fleet[name].url for name in OLD if name.startswith(role)] for role in ("prefill", "decode")]
    async with (
        serving(fleet, *urls, "--admin-key", KEY, "--retries", "0") as proxy,
        Operator(fleet, proxy) as operator,
    ):
        async with Asking(proxy, questions, expected) as clients:
            await clients.ask_more(6)
            for name in OLD:
                await operator.replace(name)
                await clients.ask_more(2)
            for name in OLD:
                await operator.becomes_ready(NEXT + name)
            before = Counter(clients.served)
            clients.served.clear()
            async with asyncio.timeout(WITHIN_S):
                while len(clients.served) < len(OLD):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        say(f"seed {SEED}: served meanwhile by {dict(before)}, then by {dict(clients.served)}")
        assert clients.wrong == [], f"{len(clients.wrong)} wrong (seed {SEED}), the first: {clients.wrong[0]}"
        assert set(clients.served) == {NEXT + name for name in OLD}
        assert operator.waited == [f"{NEXT}prefill-0"], "alone it waits for a counterpart"
