"""One replica's part in the election, with a store in memory and engines that nobody can reach."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pdproxy.config.settings import Settings
from pdproxy.errors import ConfigError
from pdproxy.fronts import messages, replica
from pdproxy.fronts.handshake import Lead, Peer
from pdproxy.fronts.link import Link
from pdproxy.fronts.link_server import LinkServer
from pdproxy.fronts.replica import Replica
from tests.fakes.calls import until
from tests.fakes.memory_store import MemoryStore, Shelf

TERM_S = 0.9
FLEET = '[[instances]]\nname = "p0"\nurl = "http://127.0.0.1:9"\nrole = "prefill"\n' + (
    '[[instances]]\nname = "d0"\nurl = "http://127.0.0.1:10"\nrole = "decode"\n'
)

Make = Callable[..., Replica]


class Fronts:
    """Remembers what fronts would be told."""

    def __init__(self) -> None:
        self.leads: list[messages.Lead] = []

    def follow(self, lead: messages.Lead) -> None:
        self.leads.append(lead)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf(time.monotonic)


@pytest.fixture
def store(shelf: Shelf) -> MemoryStore:
    return MemoryStore(shelf, timeout_s=TERM_S / 9)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: MemoryStore) -> Make:
    def make(**options: Any) -> Replica:
        monkeypatch.setattr(replica, "open_store", lambda url, fleet, timeout_s: store)
        (tmp_path / "fleet.toml").write_text(FLEET)
        given = {"config": tmp_path / "fleet.toml", "coordinator": "redis://127.0.0.1:1", "term_s": TERM_S, "port": 0}
        one = Replica(Settings(**given | {"replica_host": "127.0.0.1"} | options))
        one.elsewhere_at, one.operators = str(tmp_path / "elsewhere"), str(tmp_path / "operators")
        return one

    return make


@asynccontextmanager
async def at_work(one: Replica) -> AsyncIterator[Fronts]:
    fronts = Fronts()
    one.workers = fronts  # type: ignore[assignment]
    async with one.lifespan(one.app):
        yield fronts


async def linked(lead: messages.Lead) -> bool:
    """Whether a front that was told this is taken by the leader."""
    begun = asyncio.Event()
    link = Link(messages.FromLeader, front=Peer("f1", "x", 1), on_begin=lambda term: begun.set(), on_lapse=lambda: None)
    running = asyncio.create_task(link.run())
    link.follow(Lead(lead.term, lead.address, lead.secret, lead.ttl_s))
    try:
        async with asyncio.timeout(1.0):
            await begun.wait()
    except TimeoutError:
        return False
    finally:
        running.cancel()
    return True


async def test_a_replica_leads_with_the_secret_that_the_store_has(make: Make, shelf: Shelf, store: MemoryStore) -> None:
    """The store does not answer at first. Then who leads is known sooner than the secret, if that is asked later."""
    shelf.keep_secret("the fleet's")
    store.is_down = True
    async with at_work(make()) as fronts:
        await asyncio.sleep(0.1)
        store.is_down = False
        await until(lambda: bool(fronts.leads))
        assert fronts.leads[-1].secret == "the fleet's"
        assert await linked(fronts.leads[-1])


async def test_who_cannot_listen_leaves_the_lead_to_others(
    make: Make, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It campaigns again after a while."""
    listen = LinkServer.listen

    async def listen_in_vain(self: LinkServer, host: str, port: int) -> int:
        monkeypatch.setattr(LinkServer, "listen", listen)
        raise ConfigError("too many open files")

    monkeypatch.setattr(LinkServer, "listen", listen_in_vain)
    one = make()
    async with at_work(one) as fronts:
        await until(lambda: not one._election.is_candidate)
        await until(lambda: shelf.who_leads() is None)
        first = fronts.leads[-1].term
        await until(lambda: fronts.leads[-1].term > first)
        assert await linked(fronts.leads[-1])


async def test_the_lead_is_given_to_others_at_the_end(make: Make, shelf: Shelf) -> None:
    async with at_work(make()) as fronts:
        await until(lambda: bool(fronts.leads))
    assert shelf.who_leads() is None


async def test_a_file_that_was_broken_meanwhile_is_as_it_was(make: Make, tmp_path: Path) -> None:
    one = make()
    (tmp_path / "fleet.toml").write_text("[[instances]\nbroken")
    async with at_work(one):
        await until(lambda: one._term is not None)
        assert one._term is not None
        assert [instance.name for instance in one._term.proxy.pool.instances] == ["p0", "d0"]


async def test_an_engine_that_has_heard_of_a_higher_term_begins_another(make: Make) -> None:
    """All replicas and the store were started anew, and the clock of the store's machine was put back."""
    one = make()
    async with at_work(one) as fronts:
        await until(lambda: bool(fronts.leads))
        first = fronts.leads[-1].term
        one.note_term(first + 1000)
        await until(lambda: fronts.leads[-1].term > first)
        assert fronts.leads[-1].term > first + 1000
        assert await linked(fronts.leads[-1])


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_nobody_can_reach_is_refused(make: Make, host: str) -> None:
    with pytest.raises(ConfigError, match=r"^replica_host: "):
        make(replica_host=host)


def test_encryption_takes_all_three_files(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give all three"):
        make(replica_certfile=tmp_path / "cert.pem")
