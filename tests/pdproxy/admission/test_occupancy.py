"""What a built-in decoder says of its PD buffer is what its receiver holds, whatever state an attempt is in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")

from pdproxy.engines.builtin import BuiltinAdapter
from pdproxy.engines.info import EngineInfo
from tests.fakes.engine_pair import Pair, engine_pairs
from transfer.engine.engine import Engine
from transfer.memory.reservations import Reservation, Reservations

pytestmark = pytest.mark.engine

NUM_PAGES = 8
CARDS = b'{"data":[{"id":"m"}]}'


@pytest.fixture
async def decoder(tiny_model: Callable[..., Path]) -> AsyncIterator[Engine]:
    """A started decoder, whose table of attempts a test drives without a prefiller."""
    async with engine_pairs() as make:
        pair: Pair = await make(tiny_model(), buffer_pages=NUM_PAGES)
        yield pair.decoder
        table = table_of(pair.decoder)
        for reservation in table.all():
            end(table, reservation.attempt)


def table_of(decoder: Engine) -> Reservations:
    assert decoder._receiver is not None
    return decoder._receiver.reservations


def ask(table: Reservations, attempt: str, num_pages: int, *, ranks: int = 1, keys: tuple[bytes, ...] = ()) -> None:
    wanted = Reservation(
        attempt=attempt,
        num_pages=num_pages,
        num_tokens=num_pages,
        num_now=num_pages,
        expires_at=1e9,
        notify=None,
        expected=frozenset(range(ranks)),
        keys=keys,
    )
    for rank in range(ranks):
        table.request(wanted, rank, b"writer %d of %s" % (rank, attempt.encode()))
    table.pump()


def end(table: Reservations, attempt: str) -> None:
    """Whatever state it is in, it gives its pages back."""
    reservation = table.get(attempt)
    if reservation is not None and reservation.holding.value == "taken":
        table.consume(attempt)
    table.withdraw(attempt, "over")
    if reservation is not None:
        for rank in reservation.writers:
            table.writes_ended(attempt, rank)


def queued(table: Reservations) -> None:
    ask(table, "first", 6)
    ask(table, "a", 3)


def reserved(table: Reservations) -> None:
    ask(table, "a", 3)


def filling(table: Reservations) -> None:
    """One of its two writers is done."""
    ask(table, "a", 3, ranks=2)
    table.writes_done("a", 0)


def ready(table: Reservations) -> None:
    ask(table, "a", 3)
    table.writes_done("a")


def pinned(table: Reservations) -> None:
    """The engine reads it, so nobody can take its pages away."""
    ready(table)
    table.take("a")


def quarantined(table: Reservations) -> None:
    reserved(table)
    table.withdraw("a", "cancelled")


def shared(table: Reservations) -> None:
    """Two attempts have the same two chunks here."""
    for attempt in ("a", "b"):
        ask(table, attempt, 3, keys=(b"x", b"y", b""))
        table.writes_done(attempt)


def cached(table: Reservations) -> None:
    """Nobody holds the pages, and their bytes are kept for prompts to come."""
    ask(table, "a", 3, keys=(b"x", b"y", b"z"))
    table.writes_done("a")
    table.take("a")
    table.consume("a")
    assert table.statistics()["idle"] == 3


@pytest.mark.parametrize(
    ("bring", "occupied", "reserved_pages", "quarantined_pages", "waiting"),
    [
        (queued, 6, 6, 0, 1),
        (reserved, 3, 3, 0, 0),
        (filling, 3, 3, 0, 0),
        (ready, 3, 0, 0, 0),
        (pinned, 3, 0, 0, 0),
        (quarantined, 3, 0, 3, 0),
        (shared, 4, 0, 0, 0),
        (cached, 0, 0, 0, 0),
    ],
)
async def test_it_tells_what_it_holds(
    decoder: Engine,
    bring: Callable[[Reservations], None],
    occupied: int,
    reserved_pages: int,
    quarantined_pages: int,
    waiting: int,
) -> None:
    table = table_of(decoder)
    bring(table)
    told = decoder.buffer_facts()
    assert (told.num_pages, told.num_free) == (NUM_PAGES, NUM_PAGES - occupied)
    assert (told.num_reserved, told.num_quarantined) == (reserved_pages, quarantined_pages)
    assert (told.num_queued, told.num_reservations_waited) == (waiting, waiting)
    assert decoder.statistics()["num_reservations_waited"] == waiting
    assert as_read(decoder).num_occupied == occupied == len(pages_held(table))


async def test_an_end_of_any_kind_gives_everything_back(decoder: Engine) -> None:
    table = table_of(decoder)
    for bring in (queued, filling, ready, pinned, quarantined):
        bring(table)
        for reservation in table.all():
            end(table, reservation.attempt)
        told = decoder.buffer_facts()
        assert (as_read(decoder).num_occupied, told.num_reserved, told.num_queued) == (0, 0, 0), bring.__name__


async def test_a_prefiller_tells_of_no_buffer(tiny_model: Callable[..., Path]) -> None:
    async with engine_pairs() as make:
        pair: Pair = await make(tiny_model())
        assert as_read(pair.prefiller).num_occupied is None


def as_read(engine: Engine) -> EngineInfo:
    told = msgspec.json.encode(engine.buffer_facts())
    return BuiltinAdapter().read_facts({"/kv_buffer": told, "/v1/models": CARDS})


def pages_held(table: Reservations) -> set[int]:
    """By what the attempts themselves say: an attempt in quarantine keeps only the pages that it wrote."""
    held: set[int] = set()
    for reservation in table.all():
        held.update(reservation.own_pages if reservation.holding.value == "quarantined" else reservation.pages)
    return held
