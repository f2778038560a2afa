"""What several sources find, and the fleets that follow it."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from pdproxy.assemble import assemble
from pdproxy.config.settings import Settings, load
from pdproxy.discovery.discovery import Discovery, Tell
from pdproxy.errors import ConfigError
from pdproxy.fleet.roster import Entry
from tests.fakes.calls import until
from tests.fakes.fleet import settings


class Scripted:
    """A source that tells what it is told."""

    def __init__(self) -> None:
        self.is_running = asyncio.Event()
        self.fails = asyncio.Event()
        self._tell: Tell | None = None
        self.complaints: list[str] = []

    async def run(self, tell: Tell) -> None:
        self._tell = tell
        self.is_running.set()
        await self.fails.wait()

    def tell(self, *names: str) -> None:
        assert self._tell is not None
        self._tell(Entry(settings(name, "prefill" if name[0] == "p" else "decode")) for name in names)


def options(**more: object) -> Settings:
    return Settings(port=0, proxy_port=0, prefill=("http://p:1",), decode=("http://d:1",), canary=False, **more)  # type: ignore[arg-type]


async def test_a_fleet_begins_with_what_was_found_before() -> None:
    """A replica that begins to lead knows the instances at once. Those that are given come first."""
    source = Scripted()
    discovery = Discovery([source])
    looking = asyncio.ensure_future(discovery.run())
    await source.is_running.wait()
    source.tell("p1", "p", "d1")
    given = [settings("p", "prefill", url="http://elsewhere:1"), settings("d9", "decode", url="http://d1:1/")]
    proxy = assemble(options(), fleet=given, discovery=discovery)
    assert [one.name for one in proxy.pool.instances] == ["p", "d9", "p1"]
    app = proxy.app
    async with app.router.lifespan_context(app):
        await until(lambda: bool(discovery._rosters))
        source.tell("p2", "d2")
        assert {one.name for one in proxy.pool.instances} == {"p", "d9", "p2", "d2"}, "within the same turn"
    source.tell()
    assert {one.name for one in proxy.pool.instances} == {"p", "d9", "p2", "d2"}, "it leads no more"
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)


async def test_an_engine_that_was_found_is_an_instance_for_each_of_its_ranks() -> None:
    source = Scripted()
    discovery = Discovery([source])
    looking = asyncio.ensure_future(discovery.run())
    await source.is_running.wait()
    assert source._tell is not None
    whole = settings("p1", "prefill").model_copy(update={"engine": "vllm_nixl", "data_parallel_size": 2})
    source._tell([Entry(whole, incarnation="uid")])
    assert [(one.name, one.settings.place, one.incarnation) for one in discovery.found] == [
        (f"p1/{rank}", (whole.url, rank), "uid") for rank in (0, 1)
    ]
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)


async def test_a_role_of_which_nobody_was_found_is_named() -> None:
    """An operator who looks at /ready learns what is missing, also where nobody is there who could be called down."""
    source = Scripted()
    discovery = Discovery([source])
    looking = asyncio.ensure_future(discovery.run())
    await source.is_running.wait()
    proxy = assemble(options(), fleet=[], discovery=discovery)
    async with (
        proxy.app.router.lifespan_context(proxy.app),
        httpx.AsyncClient(transport=httpx.ASGITransport(proxy.app), base_url="http://proxy") as client,
    ):
        await until(lambda: bool(discovery._rosters))
        for names, missing in (([], ["prefill", "decode"]), (["p1"], ["decode"]), (["p1", "d1"], [])):
            source.tell(*names)
            said = (await client.get("/ready")).json()["error"]["message"]
            assert [role for role in ("prefill", "decode") if f"no {role} instance is known" in said] == missing
            assert all(f"{name} (" in said for name in names)
        source.complaints.append("dns+http://d:1: d has no address")
        assert ": dns+http://d:1: d has no address; p1 (" in (await client.get("/ready")).json()["error"]["message"]
        found = {"found": 2, "complaints": source.complaints}
        assert (await client.get("/status")).json()["discovery"] == found
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)


async def test_sources_stand_beside_each_other() -> None:
    first, second = Scripted(), Scripted()
    discovery = Discovery([first, second])
    looking = asyncio.ensure_future(discovery.run())
    await asyncio.gather(first.is_running.wait(), second.is_running.wait())
    second.tell("p1", "d1")
    first.tell("p2")
    assert [one.name for one in discovery.found] == ["p2", "p1", "d1"]
    first.tell()
    assert [one.name for one in discovery.found] == ["p1", "d1"]
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)


async def test_what_cannot_be_done_yet_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdproxy.discovery.discovery.AGAIN_S", 0.02)
    source = Scripted()
    discovery = Discovery([source])
    looking = asyncio.ensure_future(discovery.run())
    await source.is_running.wait()
    proxy = assemble(options(), fleet=[settings("d1", url="http://other:1")], discovery=discovery)
    app = proxy.app
    async with app.router.lifespan_context(app):
        await until(lambda: bool(discovery._rosters))
        source.tell("d1", "p1")
        assert {one.name for one in proxy.pool.instances} == {"d1", "p1"}
        proxy.membership.remove("d1", force=True)
        await until(lambda: [one.url for one in proxy.pool.instances if one.name == "d1"] == ["http://d1:1"])
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)


async def test_a_source_that_meets_a_bug_ends_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pdproxy.discovery.discovery.AFTER_BUG_S", 0.02)

    class Broken(Scripted):
        num_runs = 0

        async def run(self, tell: Tell) -> None:
            self.num_runs += 1
            if self.num_runs == 2:
                raise ValueError("a bug")
            await super().run(tell)
            raise TypeError("another")

    broken, other = Broken(), Scripted()
    discovery = Discovery([broken, other])
    looking = asyncio.ensure_future(discovery.run())
    await asyncio.gather(broken.is_running.wait(), other.is_running.wait())
    broken.tell("p1")
    other.tell("d1")
    broken.fails.set()
    await until(lambda: broken.num_runs == 3)
    assert [one.name for one in discovery.found] == ["p1", "d1"]
    broken.tell("p2")
    assert [one.name for one in discovery.found] == ["p2", "d1"]
    assert "met a bug" in caplog.text
    assert not looking.done()
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--discover", "kubernetes", "--prefill-selector", "a=b"], "decode_selector: needed with discover"),
        (["--discover", "nomad"], "discover: Input should be 'kubernetes'"),
        (["--discover", "kubernetes", "--discover-preset", "ray"], "discover_preset"),
        (["--prefill", "http://p:1"], "no decode instance is configured"),
        (["--prefill", "dns+http://p:1"], "no decode instance is configured"),
    ],
)
def test_mistakes(arguments: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        assemble(load(arguments))
