"""The leader's end by itself: what fronts are told, in which order, and what becomes of those who wait."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from pdproxy.admission.admission import Admission
from pdproxy.config.values import Role
from pdproxy.engines.factory import TAKE_IDS
from pdproxy.fleet.instance import Instance
from pdproxy.fleet.pool import Pool
from pdproxy.fleet.token_counts import TokenCounts
from pdproxy.fronts import messages
from pdproxy.fronts.hub import Hub, Session
from pdproxy.orchestrator.reaper import Reaper
from tests.fakes.fleet import facts, make_admission, make_instance, make_ready


async def look(instance: Instance) -> None:
    """Nobody is looked at here."""


class Leader:
    """A hub in front of one prefiller and decoders of these sizes."""

    def __init__(self, sizes: Sequence[int] = (4,), **options: Any) -> None:
        self.admission: Admission = make_admission(**options)
        self.pool = Pool(self.admission)
        reaper = Reaper(self.admission, call_timeout_s=1.0, look=look)
        self.hub = Hub(self.pool, self.admission, reaper, TokenCounts(self.pool, take_ids=TAKE_IDS))
        self.pool.on_membership = self.hub.follow
        self.prefiller = make_ready(self.join("p0", "prefill"))
        self.decoders = [make_ready(self.join(f"d{n}"), num_pages=size) for n, size in enumerate(sizes)]

    def join(self, name: str, role: Role = "decode") -> Instance:
        instance = make_instance(name, role, admission=self.admission)
        self.pool.add(instance)
        return instance

    def front(self) -> tuple[Session, list[Any]]:
        """One more front, and what it is told."""
        told: list[Any] = []
        return self.hub.open(told.append), told

    def number(self, decoder: Instance) -> int:
        return self.hub.numbers[decoder.shape]


def ask(attempt: str, sizes: dict[int, int | None]) -> messages.Ask:
    return messages.Ask(attempt, None, sizes, 0.0, None, 0, (), None, False, None, None)


def granted(told: list[Any]) -> list[str]:
    return [one.attempt for one in told if isinstance(one, messages.Granted)]


async def test_a_front_that_has_gone_is_granted_nothing() -> None:
    """Its large request leaves the line, and the pages that were saved up for it would do for its small one."""
    leader = Leader(max_overtakes=0)
    (first, _), (second, told) = leader.front(), leader.front()
    number = leader.number(leader.decoders[0])
    first.ask(ask("running", {number: 3}))
    second.ask(ask("large", {number: 4}))
    second.ask(ask("small", {number: 1}))
    assert not granted(told)
    second.close()
    assert leader.decoders[0].held == 3
    first.close()
    assert not leader.admission.num_waiting


async def test_a_front_hears_why_before_it_hears_of_a_grant() -> None:
    leader = Leader()
    front, told = leader.front()
    leader.decoders[0].drain()
    front.ask(ask("waits", {leader.number(leader.decoders[0]): 1}))
    await asyncio.sleep(0)
    told.clear()
    leader.decoders[0].resume()
    kinds = [type(one) for one in told]
    assert kinds == [messages.State, messages.Granted], kinds
    front.close()


async def test_an_instance_that_comes_and_goes_in_one_turn_is_not_told_of() -> None:
    """Fronts would keep it for ever, and the next one of its name would be one too many."""
    leader = Leader()
    _, told = leader.front()
    leader.join("brief")
    leader.pool.take_out("brief")
    await asyncio.sleep(0)
    joined = [one for one in told if isinstance(one, messages.Joined)]
    assert len(joined) == 2, joined


async def test_shapes_are_forgotten_with_their_last_instance() -> None:
    """Each start of an engine may find room for another number of pages."""
    leader = Leader()
    leader.front()
    for count in range(20):
        leader.decoders[0].heard(facts("decode", num_pages=5 + count, epoch=f"start {count}"))
        await asyncio.sleep(0)
    assert len(leader.hub.numbers) <= 3, leader.hub.numbers


async def test_nothing_is_saved_up_for_a_request_that_turns_out_not_to_fit() -> None:
    """Two decoders: what is saved up for a request at one of them is for others again when it can go to the other
    alone."""
    leader = Leader((4, 10), max_overtakes=0)
    front, told = leader.front()
    here, there = map(leader.number, leader.decoders)
    front.ask(ask("fills there", {here: None, there: 10}))
    front.ask(ask("is here", {here: 1, there: None}))
    front.ask(ask("large", {here: 4, there: 8}))
    front.ask(ask("small", {here: 1, there: None}))
    assert granted(told) == ["fills there", "is here"]
    front.resize(messages.Resize("large", {here: None}))
    assert granted(told) == ["fills there", "is here", "small"]
    front.close()
