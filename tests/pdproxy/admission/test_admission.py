"""The asyncio shell around the kernel: what its timers do, and what it tells of a place."""

from __future__ import annotations

import asyncio

import pytest

from pdproxy.admission.account import Place
from pdproxy.admission.admission import Admission, AdmissionStatistics
from pdproxy.admission.kernel import Kernel
from pdproxy.admission.line import Demand
from pdproxy.errors import QueueTimeout
from tests.fakes.fleet import Clock
from tests.pdproxy.admission.test_kernel import First


def house_of(capacity: int, clock: Clock) -> tuple[Admission, Place]:
    """One owner, with one peer that has no account."""
    admission = Admission(Kernel(First()), clock=clock)
    owner, peer = Place("o", is_owner=True), Place("p", is_owner=False)
    for place, pages in ((owner, capacity), (peer, 0)):
        admission.add(place)
        admission.heard(place, "1", shape=None, capacity=pages, occupied=None, asked_at=0.0)
        admission.open(place)
    return admission, owner


def demand(pages: int, **options: object) -> Demand:
    return Demand("a", None, lambda shape: pages, age=0.0, **options)


async def test_a_timer_that_is_early_by_the_admissions_clock_opens_a_place_all_the_same() -> None:
    clock = Clock()
    admission, owner = house_of(4, clock)
    admission.close(owner, until=clock() + 0.01)
    asked = demand(2)
    assert admission.bind_now(asked) is None
    async with asyncio.timeout(5):
        grant = await admission.wait(asked)
    assert grant.owner is owner


async def test_whoever_looks_finds_those_open_whose_time_has_come() -> None:
    clock = Clock()
    admission, owner = house_of(4, clock)
    admission.close(owner, until=clock() + 1.0)
    assert admission.open_places(None).owners == []
    clock.advance(1.0)
    assert admission.open_places(None).owners == [owner]


async def test_a_deadline_counts_although_the_admissions_clock_lags_behind_the_timer() -> None:
    clock = Clock()
    admission, _ = house_of(4, clock)
    admission.bind_now(demand(4))
    late = demand(1, deadline=clock() + 0.01)
    assert admission.bind_now(late) is None
    with pytest.raises(QueueTimeout):
        await admission.wait(late)
    assert admission.num_waiting == 0


def test_a_place_that_was_never_heard_has_nothing() -> None:
    admission = Admission(Kernel(First()), clock=Clock())
    place = Place("o", is_owner=True)
    admission.add(place)
    told = admission.statistics(place)
    numbers = {name: getattr(told, name) for name in AdmissionStatistics.__slots__ if name not in ("name", "occupied")}
    assert told.name == "o"
    assert told.occupied is None
    assert set(numbers.values()) == {0}
