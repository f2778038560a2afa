"""Serves requests through the engine of docs/adding-an-engine.md, once the page's changes have been made.

`test_adding_an_engine` starts it in a copy of the sources. Any `AssertionError` is the page's fault.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pdproxy
from tests.fakes.fake_engine import WORDS
from tests.fakes.fake_ticket import FakeTicket
from tests.fakes.proxy_harness import proxy_in_front_of


async def serve_one() -> None:
    async with proxy_in_front_of([FakeTicket("prefill")], [FakeTicket("decode")]) as harness:
        answer = await harness.post(stream=True)
        assert answer.status == 200, answer
        assert answer.text() == "".join(WORDS)
        assert answer.headers["x-pdproxy-path"] == "disaggregated"
        (leg,) = harness.decoder.generations()
        assert leg.body["kv_transfer_params"]["ticket"].startswith("ticket-")


async def leave_between_the_legs() -> None:
    """The client goes away while the prefiller holds pages for the decoder, which has not fetched them."""
    async with proxy_in_front_of([FakeTicket("prefill")], [FakeTicket("decode")]) as harness:
        harness.decoder.hang_at.add("decode")
        call = harness.call(stream=True)
        await harness.decoder.reached("decode")
        assert harness.held == harness.prefiller.num_occupied == 1
        call.leave()
        await call.ended()
        await harness.settled()
        assert harness.prefiller.bodies("/kv/drop")
        assert harness.held == harness.prefiller.num_occupied == 0


async def give_no_ticket() -> None:
    async with proxy_in_front_of([FakeTicket("prefill")], [FakeTicket("decode")], retries=0) as harness:
        harness.prefiller.gives_tickets = False
        answer = await harness.post(stream=True)
        assert answer.status == 502
        assert answer.error["code"] == "kv_not_handed_over"


if __name__ == "__main__":
    for story in (serve_one, leave_between_the_legs, give_no_ticket):
        asyncio.run(story())
    print(Path(pdproxy.__file__).parent)
