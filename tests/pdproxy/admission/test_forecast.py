"""Demands whose way a guess chooses: it changes what they take, and neither who may go nor where there is room."""

from __future__ import annotations

from typing import Any

import pytest

from pdproxy.admission.account import Place
from pdproxy.admission.custody import Evidence
from pdproxy.admission.grant import Forecast, Grant
from pdproxy.admission.kernel import Kernel
from pdproxy.admission.line import Demand
from pdproxy.admission.room import Room
from tests.pdproxy.admission.test_alone import Fleet


class Guess:
    """Says what the test has it say, and remembers for whom."""

    def __init__(self, is_alone: bool = True) -> None:
        self.is_alone = is_alone
        self.asked: list[tuple[str, str]] = []

    def foresee(self, demand: Demand, owner: Place, peer: Place, now: float) -> Forecast:
        self.asked.append((owner.name, peer.name))
        return Forecast(1.5, self.is_alone)


def house_of(guess: Guess, *, owners: tuple[str, ...] = ("p0",), writers: tuple[str, ...] = ("d0",)) -> Fleet:
    house = Fleet(owners, writers)
    house.kernel._forecaster = guess
    for name in owners:
        house.open(name)
    return house


def grant_of(house: Fleet, **options: Any) -> Grant | None:
    grant = house.kernel.arrive(house.demand(**options), 0.0)
    house.kernel.check_integrity(0.0)
    return grant


def test_who_would_be_sooner_alone_is_bound_to_the_writer_without_pages() -> None:
    house = house_of(Guess())
    grant = grant_of(house)
    assert grant is not None
    assert (grant.owner.name, grant.peer.name, grant.leases) == ("d0", "d0", ())
    assert grant.forecast == Forecast(1.5, True)
    assert house.places["p0"].account is not None
    assert house.places["p0"].account.held == 0
    assert house.places["d0"].residency.tokens == 60


def test_who_would_not_takes_both() -> None:
    grant = grant_of(house_of(Guess(is_alone=False)))
    assert grant is not None
    assert (grant.owner.name, grant.peer.name, len(grant.leases)) == ("p0", "d0", 1)
    assert grant.forecast == Forecast(1.5, False)


def test_who_has_no_room_at_the_writer_waits_as_before() -> None:
    guess = Guess()
    house = house_of(guess)
    assert grant_of(house) is not None
    guess.asked.clear()
    waits = house.demand()
    assert house.kernel.arrive(waits, 0.0) is None
    assert (guess.asked, waits.lacks) == ([], "kv_cache")
    house.kernel.vacate(house.places["d0"], "a", 0.0)
    assert [one.grant.demand for one in house.news()] == [waits]  # type: ignore[union-attr]


def test_who_has_no_pages_waits_as_before_and_may_then_go_alone() -> None:
    guess = Guess(is_alone=False)
    house = house_of(guess)
    first = grant_of(house, pages=8, tokens=10)
    assert first is not None
    guess.is_alone = True
    waits = house.demand(pages=8, tokens=10)
    assert house.kernel.arrive(waits, 0.0) is None
    house.kernel.free(first.leases[0], Evidence.NEVER_SENT, 0.0)
    [granted] = house.news()
    assert (granted.grant.owner.name, granted.grant.leases) == ("d0", ())  # type: ignore[union-attr]


@pytest.mark.parametrize("why", ["may not serve alone", "canary", "goes on", "needs no pages", "owner on trial"])
def test_nobody_asks_where_there_is_no_choice(why: str) -> None:
    guess = Guess()
    house = house_of(guess)
    prefiller, decoder = house.places["p0"], house.places["d0"]
    options: dict[str, Any] = {}
    if why == "may not serve alone":
        decoder.serves_alone = False
    elif why == "canary":
        options["pair"] = (prefiller, decoder)
    elif why == "goes on":
        options["text_terms"] = decoder.revision.text_terms
    elif why == "needs no pages":
        options["pages"] = 0
    else:
        house.close("p0")
        house.kernel.open(prefiller, 0.0, trials=1)
    grant = grant_of(house, **options)
    assert grant is not None
    assert (grant.owner, grant.peer, grant.forecast, guess.asked) == (prefiller, decoder, None, [])


def test_the_tokens_of_a_prompt_count_where_it_is_read() -> None:
    bound: list[tuple[str, int]] = []

    class Seen(Place):
        def bound(self, attempt: str, num_tokens: int) -> None:
            bound.append((self.name, num_tokens))

    guess = Guess()
    kernel = Kernel(house_of(guess).chooser, forecaster=guess)
    for name, is_owner in (("p0", True), ("d0", False)):
        place = Seen(name, is_owner=is_owner, is_writer=not is_owner)
        place.serves_alone = True
        kernel.add(place)
        kernel.heard(place, "1", shape=is_owner, capacity=8 * is_owner, occupied=0, asked_at=0.0, now=0.0)
        kernel.open(place, 0.0)
    for guess.is_alone in (True, False):
        demand = Demand("a", None, lambda shape: int(bool(shape)), age=0.0, num_tokens=70, room=Room(70))
        assert kernel.arrive(demand, 0.0) is not None
    assert bound == [("d0", 70), ("p0", 70), ("d0", 0)]
