"""Places that serve demands alone: what becomes of those who wait when that begins and ends, and what it costs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from pdproxy.admission.account import Place
from pdproxy.admission.grant import Granted, Refused
from pdproxy.admission.kernel import Kernel
from pdproxy.admission.line import Demand
from pdproxy.admission.revision import Revision
from pdproxy.admission.room import KvCache, Room
from pdproxy.errors import NeverFits
from tests.pdproxy.admission.test_kernel import First

LARGE = 99
"""More pages than any owner has."""


class Counting(First):
    """Counts how often one of several places was picked."""

    def __init__(self) -> None:
        self.num_picked = 0

    def pick(self, lineup: list[Place], demand: Demand) -> Place:
        self.num_picked += 1
        return super().pick(lineup, demand)


class Fleet:
    """Owners of eight pages, which are closed, and writers with room for 100 tokens, which are open."""

    def __init__(self, owners: Sequence[str] = ("p0",), writers: Sequence[str] = ("d0",), model: str = "m") -> None:
        self.chooser = Counting()
        self.kernel = Kernel(self.chooser)
        self.places: dict[str, Place] = {}
        for name in (*owners, *writers):
            self.add(name, name in owners, model)
        for name in writers:
            self.open(name)

    def add(self, name: str, is_owner: bool, model: str, revision: Revision | None = None) -> Place:
        place = Place(name, is_owner=is_owner, is_writer=not is_owner, models=frozenset({model}))
        place.serves_alone, place.is_expected = True, False
        self.places[name] = place
        self.kernel.add(place)
        self.kernel.heard(
            place,
            f"epoch of {name}",
            shape=is_owner,
            capacity=8 if is_owner else 0,
            occupied=0,
            asked_at=0.0,
            now=0.0,
            cache=KvCache(None if is_owner else 100),
            revision=revision or Revision({"dtype": "bf16"}),
        )
        return place

    def open(self, name: str) -> None:
        self.kernel.open(self.places[name], 0.0)

    def close(self, name: str) -> None:
        self.kernel.close(self.places[name], 0.0)

    def demand(self, pages: int = 1, tokens: int = 60, **options: object) -> Demand:
        def size(shape: Hashable) -> int:
            return pages if shape else 0

        return Demand("a", "m", size, age=0.0, room=Room(tokens), **options)  # type: ignore[arg-type]

    def news(self) -> list[Granted | Refused]:
        found = [effect for effect in self.kernel.effects if isinstance(effect, Granted | Refused)]
        self.kernel.effects.clear()
        self.kernel.check_integrity(0.0)
        return found


def test_who_fits_no_pair_is_refused_when_places_of_another_model_came_between() -> None:
    house = Fleet()
    house.add("q0", True, "other")
    house.open("q0")
    assert house.kernel.arrive(house.demand(), 0.0) is not None
    assert house.kernel.arrive(house.demand(LARGE), 0.0) is None
    house.close("q0")  # what is known of the open places is forgotten
    house.open("p0")
    assert [type(one.error) for one in house.news() if isinstance(one, Refused)] == [NeverFits]


def test_who_fits_no_pair_is_refused_when_a_pair_is_there_after_nobody_was() -> None:
    house = Fleet()
    assert house.kernel.arrive(house.demand(), 0.0) is not None
    waits = house.demand(LARGE)
    assert house.kernel.arrive(waits, 0.0) is None
    house.close("d0")
    house.places["p0"].serves_alone = False
    house.open("p0")
    house.open("d0")
    assert [type(one.error) for one in house.news() if isinstance(one, Refused)] == [NeverFits]
    assert not waits.is_waiting


def test_an_answer_is_continued_by_one_that_serves_alone_where_no_counterpart_is_known() -> None:
    house = Fleet(owners=(), writers=("d0", "d1"))
    terms = house.places["d0"].revision.text_terms
    for _ in range(2):
        assert house.kernel.arrive(house.demand(), 0.0) is not None
    goes_on = house.demand(text_terms=terms)
    assert house.kernel.arrive(goes_on, 0.0) is None
    house.kernel.vacate(house.places["d1"], "a", 0.0)
    house.kernel.vacate(house.places["d0"], "a", 0.0)
    assert [one.grant.demand for one in house.news() if isinstance(one, Granted)] == [goes_on]


def test_a_demand_that_one_place_may_serve_alone_is_picked_for_without_a_look_at_all() -> None:
    house = Fleet(writers=[f"d{number}" for number in range(50)])
    looked: list[str] = []
    has_room = house.kernel._has_room
    try:
        house.kernel._has_room = lambda demand, place: looked.append(place.name) or has_room(demand, place)  # type: ignore
        assert house.kernel.arrive(house.demand(), 0.0) is not None
    finally:
        del house.kernel._has_room
    assert len(looked) == 1


def test_who_waits_is_not_looked_at_for_places_that_are_closed() -> None:
    house = Fleet(owners=[f"p{number}" for number in range(20)])
    assert house.kernel.arrive(house.demand(), 0.0) is not None
    for _ in range(50):
        assert house.kernel.arrive(house.demand(), 0.0) is None
    looked: list[str] = []
    could_use = house.kernel._could_use
    try:
        house.kernel._could_use = (  # type: ignore[method-assign]
            lambda demand, place, now: looked.append(place.name) or could_use(demand, place, now)  # type: ignore[func-returns-value]
        )
        house.close("d0")
        house.open("d0")
    finally:
        del house.kernel._could_use
    assert len(looked) < 20


def test_who_waits_for_a_kv_cache_is_not_looked_at_when_pages_of_an_owner_come_back() -> None:
    house = Fleet(owners=[f"p{number}" for number in range(20)])
    for number in range(20):
        house.open(f"p{number}")
    grant = house.kernel.arrive(house.demand(), 0.0)
    assert grant is not None
    for _ in range(50):
        assert house.kernel.arrive(house.demand(), 0.0) is None
    house.kernel.open_places("m")
    before = house.chooser.num_picked
    house.kernel.shrink(grant.leases[0], 0, 0.0)
    assert house.chooser.num_picked == before
    house.kernel.vacate(house.places["d0"], "a", 0.0)
    assert len(house.news()) == 1
