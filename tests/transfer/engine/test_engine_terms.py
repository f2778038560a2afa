"""Two engines behind their HTTP addresses, over NIXL, when one leader of a fleet of proxies takes the place of another.

What must hold: an engine that has heard of a term reserves and fills no page for an attempt of a lower one.
"""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn

pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")

from tests.fakes.engine_pair import CHUNK, Pair, new_job
from tests.fakes.transfer_world import until
from transfer import wire
from transfer.engine.engine import Engine
from transfer.engine.server import build_app
from transfer.engine.tiny import make_tiny_tokenizer

pytestmark = pytest.mark.engine

TERM = "x-pdproxy-term"
JOB = new_job(3 * CHUNK)


class Legs:
    """What a proxy asks of the pair, each time as a leader of some term."""

    def __init__(self, pair: Pair, prefiller: httpx.AsyncClient, decoder: httpx.AsyncClient) -> None:
        self.pair, self.prefiller, self.decoder = pair, prefiller, decoder
        self.expected = pair.expected(JOB)

    async def prefill(self, term: object = None, prompt: list[int] = JOB.prompt_token_ids) -> httpx.Response:
        params = wire.PushParams(
            attempt=uuid.uuid4().hex,
            receivers=self.pair.decoder.buffer_facts().receivers,
            timeout_s=20.0,
            notify=self.pair.proxy.address,
        )
        body = self._body(self.prefiller, prompt=prompt, kv_transfer_params=msgspec.to_builtins(params))
        return await self.prefiller.post("/v1/completions", json=body, headers=_of(term))

    async def decode(self, prefilled: httpx.Response, term: object = None) -> httpx.Response:
        assert prefilled.status_code == 200
        body = self._body(self.decoder, kv_transfer_params=prefilled.json()["kv_transfer_params"])
        return await self.decoder.post("/v1/completions", json=body, headers=_of(term))

    async def alone(self, term: object = None) -> httpx.Response:
        return await self.decoder.post("/v1/completions", json=self._body(self.decoder), headers=_of(term))

    async def cancel(self, prefilled: httpx.Response) -> bool:
        body = {"attempt": prefilled.json()["kv_transfer_params"]["attempt"]}
        answer = await self.decoder.post("/kv_transfer/cancel", json=body, headers=_of(1))
        released: bool = answer.json()["released"]
        return released

    async def terms(self) -> list[int | None]:
        """The highest that each of the two has heard of."""
        return [(await one.get("/kv_buffer")).json()["term"] for one in (self.prefiller, self.decoder)]

    def check_answer(self, response: httpx.Response) -> None:
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["token_ids"] == self.expected

    def check_nothing_begun(self) -> None:
        pages = self.pair.decoder._receiver.reservations  # type: ignore[union-attr]
        assert (pages.num_free, pages.num_reserved, pages.num_queued) == (pages.num_pages, 0, 0)
        assert self.pair.prefiller.statistics()["pushes"] == 0

    def _body(self, client: httpx.AsyncClient, **more: Any) -> dict[str, Any]:
        engine = self.pair.prefiller if client is self.prefiller else self.pair.decoder
        fields = {"model": engine.model.name, "prompt": JOB.prompt_token_ids, "max_tokens": JOB.max_tokens}
        return fields | {"temperature": 0, "ignore_eos": True, "return_token_ids": True} | more


def _of(term: object) -> dict[str, str]:
    return {} if term is None else {TERM: str(term)}


def check_stale(response: httpx.Response, term: int, heard: int) -> None:
    assert response.status_code == 409, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("stale_term", TERM)
    assert error["message"] == (
        f"the attempt is of term {term}, and a leader of term {heard} has been heard of; ask for a new turn"
    )


@asynccontextmanager
async def at_http(engine: Engine, tokenizer: Any) -> AsyncIterator[httpx.AsyncClient]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(build_app(engine, tokenizer), lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        config.load()
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[listener])
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
                yield client
        finally:
            await server.shutdown(sockets=[listener])


@pytest.fixture
async def new_legs(new_pair: Callable[..., Any], tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    tokenizer = make_tiny_tokenizer(tmp_path, "bytes")
    async with AsyncExitStack() as stack:

        async def make(**options: Any) -> Legs:
            pair = await new_pair(**options)
            clients = [await stack.enter_async_context(at_http(e, tokenizer)) for e in (pair.prefiller, pair.decoder)]
            return Legs(pair, *clients)

        yield make


async def test_a_look_that_tells_a_term_keeps_out_what_is_older(new_legs: Callable[..., Any]) -> None:
    """A leg that waited at its prefiller comes after the answer to the look, and finds nothing that it may take."""
    legs = await new_legs()
    facts = (await legs.decoder.get("/kv_buffer?term=8")).json()
    assert (facts["term"], facts["num_reserved"]) == (8, 0)
    check_stale(await legs.prefill(7), 7, 8)
    legs.check_nothing_begun()
    legs.check_answer(await legs.decode(await legs.prefill(8), 8))


@pytest.mark.parametrize("query", ["term=0", "term=-1", "term=x", "term=", "term=1&term=2", f"term={'9' * 5000}"])
async def test_a_look_with_what_is_no_term_is_refused(new_legs: Callable[..., Any], query: str) -> None:
    legs = await new_legs()
    answer = await legs.decoder.get(f"/kv_buffer?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "term")
    assert await legs.terms() == [None, None]


async def test_a_decoder_reserves_nothing_for_a_prefiller_that_has_heard_less(new_legs: Callable[..., Any]) -> None:
    """The prefiller learns of the later leader by the decoder's refusal, which comes to it from its data plane's own
    process."""
    legs = await new_legs(prefill={"data_plane": "process"})
    legs.check_answer(await legs.decode(await legs.prefill(7), 7))
    assert (await legs.alone(8)).status_code == 200
    assert await legs.terms() == [7, 8]
    pushed = legs.pair.prefiller.statistics()["pushed_pages"]
    check_stale(await legs.prefill(7), 7, 8)
    legs.check_nothing_begun()
    assert legs.pair.prefiller.statistics()["pushed_pages"] == pushed
    assert await legs.terms() == [8, 8]
    legs.check_answer(await legs.decode(await legs.prefill(8), 8))


async def test_an_engine_begins_nothing_of_a_lower_term_than_it_has_heard_of(new_legs: Callable[..., Any]) -> None:
    """Neither leg, and none that is served by one engine alone. What has no term is served as ever."""
    legs = await new_legs()
    assert await legs.terms() == [None, None]
    legs.check_answer(await legs.decode(await legs.prefill(8), 8))
    assert await legs.terms() == [8, 8]
    generations = legs.pair.decoder.statistics()["generations"]
    prefills = legs.pair.prefiller.statistics()["prefills"]
    for answer in (await legs.prefill(7), await legs.alone(7)):
        check_stale(answer, 7, 8)
    legs.check_nothing_begun()
    assert legs.pair.prefiller.statistics()["prefills"] == prefills
    assert legs.pair.decoder.statistics()["generations"] == generations
    legs.check_answer(await legs.decode(await legs.prefill()))
    legs.check_answer(await legs.alone())
    legs.check_answer(await legs.decode(await legs.prefill(9), 9))
    assert await legs.terms() == [9, 9]


async def test_a_prefiller_pushes_nothing_to_a_decoder_that_has_heard_less(new_legs: Callable[..., Any]) -> None:
    legs = await new_legs()
    answer = await legs.prefiller.post("/v1/completions", json=legs._body(legs.prefiller), headers=_of(8))
    assert answer.status_code == 200
    check_stale(await legs.prefill(7), 7, 8)
    legs.check_nothing_begun()
    assert await legs.terms() == [8, None]


async def test_an_attempt_that_the_next_leader_was_told_of_is_served(new_legs: Callable[..., Any]) -> None:
    """Its prefill leg was sent under the leader before."""
    legs = await new_legs()
    prefilled = await legs.prefill(7)
    legs.check_answer(await legs.decode(prefilled, 8))
    assert await legs.terms() == [7, 8]


async def test_a_decode_leg_of_a_replaced_leader_is_refused_and_its_pages_come_back(
    new_legs: Callable[..., Any],
) -> None:
    """By the call that lets them go, whoever makes it in whatever term; or, asked anew by a leader of today, they are
    decoded after all."""
    legs = await new_legs()
    dropped, kept = await legs.prefill(7), await legs.prefill(7)
    assert (await legs.alone(8)).status_code == 200
    for prefilled in (dropped, kept):
        check_stale(await legs.decode(prefilled, 7), 7, 8)
    await asyncio.gather(*legs.pair.prefiller._background)
    assert await legs.cancel(dropped)
    legs.check_answer(await legs.decode(kept, 8))
    await legs.pair.all_is_back()


async def test_a_prefill_that_waits_for_pages_is_refused_when_another_leads(new_legs: Callable[..., Any]) -> None:
    legs = await new_legs(buffer_pages=3)
    first = await legs.prefill(7)
    waiting = asyncio.create_task(legs.prefill(7, new_job(3 * CHUNK, seed=1).prompt_token_ids))
    await until(lambda: legs.pair.decoder.buffer_facts().num_queued == 1)
    assert (await legs.alone(8)).status_code == 200
    check_stale(await waiting, 7, 8)
    assert legs.pair.decoder.buffer_facts().num_queued == 0
    legs.check_answer(await legs.decode(first, 8))


async def test_a_term_that_is_none_is_refused_by_the_name_of_its_header(new_legs: Callable[..., Any]) -> None:
    legs = await new_legs()
    wrong = [b"0", b"-1", b"+1", b"1.0", b"", b"eight", b"%d" % 2**63, b"1" * 5000, "\u0663".encode()]
    for headers in [*([(TERM.encode(), value)] for value in wrong), [(TERM, "7"), (TERM, "7")]]:
        for client in (legs.prefiller, legs.decoder):
            answer = await client.post("/v1/completions", json=legs._body(client), headers=headers)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, TERM), headers
    assert await legs.terms() == [None, None]
    legs.check_answer(await legs.decode(await legs.prefill(2**63 - 1), 2**63 - 1))
