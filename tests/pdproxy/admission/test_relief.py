"""Demands that wait for room where answers are written: a guess may have one of the other side write the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pdproxy.admission.account import Place
from pdproxy.admission.grant import Forecast, Granted
from pdproxy.admission.kernel import PLACES_PER_LOOK
from pdproxy.admission.line import Demand
from pdproxy.admission.room import KvCache
from tests.pdproxy.admission.test_alone import Fleet

AT_ONCE = Forecast(0.2, True)


class Relief:
    """Says what the test has it say, and remembers among whom."""

    def __init__(self) -> None:
        self.says = False
        self.asked: list[tuple[list[str], list[str]]] = []
        self.behind: list[int] = []

    def foresee(self, demand: Demand, owner: Place, peer: Place, now: float) -> None:
        return None

    def relieve(
        self, demand: Demand, num_behind: int, readers: Sequence[Place], writers: Sequence[Place], now: float
    ) -> tuple[Place, Forecast] | None:
        self.behind.append(num_behind)
        self.asked.append(([one.name for one in readers], [one.name for one in writers]))
        return (readers[0], AT_ONCE) if self.says else None


class House(Fleet):
    """Two prefillers with room for 200 tokens, and a decoder with room for 100, of which 60 are taken."""

    def __init__(self, guess: Relief) -> None:
        super().__init__(("p0", "p1"), ("d0",))
        self.guess = guess
        self.kernel._forecaster = guess
        for name in ("p0", "p1"):
            self.hear(name, KvCache(200))
            self.open(name)
        assert self.kernel.arrive(self.demand(), 0.0) is not None

    def hear(self, name: str, cache: KvCache) -> None:
        place = self.places[name]
        epoch, shape = f"epoch of {name}", place.is_owner
        options: dict[str, Any] = {"capacity": 8 * shape, "occupied": 0, "revision": place.revision}
        self.kernel.heard(place, epoch, shape=shape, asked_at=0.0, now=0.0, cache=cache, **options)

    def named(self, attempt: str, **options: Any) -> Demand:
        demand = self.demand(**options)
        demand.attempt = attempt
        return demand

    def granted(self) -> list[tuple[str, str, str, int]]:
        """Who was granted, by whom it is served, and how many leases it took."""
        grants = [one.grant for one in self.news() if isinstance(one, Granted)]
        return [(one.demand.attempt, one.owner.name, one.peer.name, len(one.leases)) for one in grants]


@pytest.fixture
def house() -> House:
    return House(Relief())


def test_who_has_no_room_at_any_decoder_is_served_by_a_prefiller_alone(house: House) -> None:
    house.guess.says = True
    assert house.kernel.arrive(house.named("b"), 0.0) is None, "it is in line, and an effect says the rest"
    assert house.granted() == [("b", "p0", "p0", 0)]
    assert house.guess.asked == [(["p0", "p1"], ["d0"])]
    prefiller = house.places["p0"]
    assert prefiller.residency.tokens == 60
    assert prefiller.account is not None
    assert prefiller.account.held == 1, "that of the one which the decoder serves"
    house.kernel.vacate(prefiller, "b", 0.0)
    assert prefiller.residency.tokens == 0


def test_who_is_not_advised_waits_as_before_and_is_asked_about_again(house: House) -> None:
    waits = house.named("b")
    assert house.kernel.arrive(waits, 0.0) is None
    assert (house.granted(), waits.lacks) == ([], "kv_cache")
    house.hear("d0", KvCache(100))
    assert len(house.guess.asked) == 2
    house.guess.says = True
    house.hear("d0", KvCache(100))
    assert house.granted() == [("b", "p0", "p0", 0)]


def test_only_the_first_in_line_goes(house: House) -> None:
    first, second = house.named("b"), house.named("c", tokens=50)
    for one in (first, second):
        assert house.kernel.arrive(one, 0.0) is None
    assert house.guess.behind == [0, 1]
    house.guess.says = True
    house.kernel.cancel(house.named("nobody"), 0.0)  # nothing has happened
    assert house.granted() == []
    house.hear("d0", KvCache(100))
    assert [one[0] for one in house.granted()] == ["b", "c"]


def test_a_decoder_with_room_is_taken_first(house: House) -> None:
    house.guess.says = True
    grant = house.kernel.arrive(house.named("b", tokens=30), 0.0)
    assert grant is not None
    assert (grant.owner.name, grant.peer.name, house.guess.asked) == ("p0", "d0", [])


def test_who_lacks_pages_and_not_room_waits_for_pages(house: House) -> None:
    house.guess.says = True
    for name, pages in (("x", 8), ("y", 7)):
        assert house.kernel.arrive(house.named(name, pages=pages, tokens=1), 0.0) is not None
    assert house.kernel.arrive(house.named("b", tokens=1), 0.0) is None
    assert (house.granted(), house.guess.asked) == ([], [])


def test_in_a_large_fleet_it_is_asked_after_several_changes(house: House) -> None:
    """It looks at all of it. Here that is three times as many places as it may look at for one change."""
    for number in range(3 * PLACES_PER_LOOK):
        house.add(f"q{number}", True, "m")
        house.open(f"q{number}")
    assert house.kernel.arrive(house.named("b"), 0.0) is None
    for _ in range(8):
        house.hear("d0", KvCache(100))
    assert len(house.guess.asked) == 3, "of nine changes"
    house.guess.says = True
    for _ in range(4):
        house.hear("d0", KvCache(100))
    assert [one[0] for one in house.granted()] == ["b"]


def test_nobody_is_sent_back_to_where_it_failed(house: House) -> None:
    house.guess.says = True
    assert house.kernel.arrive(house.named("b", avoid=frozenset({"p0"})), 0.0) is None
    assert house.granted() == [("b", "p1", "p1", 0)]


@pytest.mark.parametrize(
    "why", ["may not serve alone", "on trial", "has no room", "does not tell its memory", "goes on", "avoids", "canary"]
)
def test_nobody_is_asked_where_there_is_no_choice(house: House, why: str) -> None:
    house.guess.says = True
    options: dict[str, Any] = {}
    for name in ("p0", "p1"):
        place = house.places[name]
        if why == "may not serve alone":
            place.serves_alone = False
        elif why == "on trial":
            house.kernel.open(place, 0.0, trials=3)
        elif why == "has no room":
            house.kernel.reside(place, "other", house.demand(tokens=150).room)
        elif why == "does not tell its memory":
            house.hear(name, KvCache())
        elif why == "goes on":
            options["text_terms"] = place.revision.text_terms
        elif why == "avoids":
            options["avoid"] = frozenset({"p0", "p1"})
        else:
            options["pair"] = (place, house.places["d0"])
    assert house.kernel.arrive(house.named("b", **options), 0.0) is None
    assert (house.granted(), house.guess.asked) == ([], [])
