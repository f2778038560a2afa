"""What `Store` promises, held against the store in memory, real servers of Redis and etcd, and a stand-in for
Kubernetes' API server."""

from __future__ import annotations

import asyncio
import itertools
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path

import httpx
import msgspec
import pytest
from anyio._backends._asyncio import SocketStream

from pdproxy.coordination.factory import open_store
from pdproxy.coordination.store import MAX_TERM, Leader, Member, Store
from pdproxy.errors import ConfigError, StoreUnavailable
from tests.fakes.kubernetes_api import NAMESPACE, kubeconfig
from tests.fakes.memory_store import MemoryStore, Shelf
from tests.helpers.store_process import Kind, StoreProcess

TIMEOUT_S = 3.0
SHORT_S = 0.3
TTL_S = {"memory": 0.15, "redis": 0.3, "etcd": 1.0, "kubernetes": 1.0}
REAL = ["redis", "etcd", "kubernetes"]
"""The shortest time to live that each counts exactly."""
LONG_S = 30.0
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, StoreProcess]]:
    """One server of each kind, started when it is first needed."""
    folder = tmp_path_factory.mktemp("stores")
    started: dict[str, StoreProcess] = {}

    class Servers(dict[str, StoreProcess]):
        def __missing__(self, kind: Kind) -> StoreProcess:
            server = StoreProcess(kind, folder / kind)
            server.start()
            started[kind] = self[kind] = server
            return server

    yield Servers()
    for server in started.values():
        server.kill()


class Place:
    """One fleet's store, opened as often as a test has replicas."""

    def __init__(self, kind: str, servers: dict[str, StoreProcess]) -> None:
        self.kind = kind
        self.fleet = f"fleet-{next(_numbers)}"
        self._servers = servers
        self._shelf = Shelf(time.monotonic)
        self._opened: list[Store] = []
        self.ttl_s = TTL_S[kind]

    @property
    def server(self) -> StoreProcess:
        return self._servers[self.kind]

    def open(self, *, timeout_s: float = TIMEOUT_S) -> Store:
        if self.kind == "memory":
            store: Store = MemoryStore(self._shelf, timeout_s=timeout_s)
        else:
            store = open_store(self.server.url, self.fleet, timeout_s=timeout_s)
        self._opened.append(store)
        return store

    async def aclose(self) -> None:
        for store in self._opened:
            await store.aclose()


@pytest.fixture(params=["memory", *REAL])
async def place(
    request: pytest.FixtureRequest, servers: dict[str, StoreProcess], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Place]:
    found = Place(request.param, servers)
    make_known(found, monkeypatch)
    yield found
    await found.aclose()


@pytest.fixture(params=REAL)
async def real(
    request: pytest.FixtureRequest, servers: dict[str, StoreProcess], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Place]:
    found = Place(request.param, servers)
    make_known(found, monkeypatch)
    yield found
    if not found.server.is_running:
        found.server.start()
    await found.aclose()


def make_known(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts into the environment where the cluster is, whose address is no part of the store's URL."""
    if place.kind == "kubernetes":
        pytest.importorskip("lightkube")
        for name, value in place.server.environment.items():
            monkeypatch.setenv(name, value)


async def hold(store: Store, member: str, *, seen: int = 0, ttl_s: float = LONG_S) -> Leader:
    return await store.hold(member, f"{member}:1", seen=seen, ttl_s=ttl_s)


async def until_true(question: Callable[[], Awaitable[bool]], limit_s: float = 6.0) -> None:
    limit = time.monotonic() + limit_s
    while not await question():
        assert time.monotonic() < limit
        await asyncio.sleep(0.02)


# ── who leads ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_first_leads_and_everybody_is_told_so(place: Place) -> None:
    one, two = place.open(), place.open()
    assert await one.look() is None
    before = int(time.time() * 1000)
    leader = await hold(one, "a")
    assert leader.member == "a"
    assert leader.address == "a:1"
    assert leader.term >= before, "a store that knows no term begins at the Unix time, in ms"
    assert await hold(two, "b") == leader == await two.look() == await hold(one, "a")


async def test_terms_grow_across_releases_and_past_what_was_seen(place: Place) -> None:
    one, two = place.open(), place.open()
    first = await hold(one, "a")
    await one.release(first)
    assert await two.look() is None
    second = await hold(two, "b")
    assert second.term > first.term
    await two.release(second)
    third = await hold(one, "a", seen=second.term + 1000)
    assert third.term > second.term + 1000
    await one.release(third)
    assert (await hold(one, "a")).term > third.term


async def test_a_stale_leaders_release_changes_nothing(place: Place) -> None:
    one, two = place.open(), place.open()
    old = await hold(one, "a")
    await one.release(old)
    leader = await hold(two, "b")
    await one.release(old)
    await one.release(Leader(leader.term, "a", "a:1"))
    assert await one.look() == leader
    again = Leader(old.term, "b", "b:1")
    await two.release(again)
    assert await one.look() == leader, "a member's older lead is not its present one"


async def test_a_lead_that_is_renewed_goes_on_and_one_that_is_not_ends_but_never_early(place: Place) -> None:
    one, two, ttl_s = place.open(), place.open(), place.ttl_s
    await one.enter(stays := Member("z", "z:1", "stays"), LONG_S)
    sent, num_renewed = time.monotonic(), 0
    leader = await hold(one, "a", ttl_s=ttl_s)
    while num_renewed < 2:
        await asyncio.sleep(0.6 * ttl_s)
        last, sent = sent, time.monotonic()
        renewed = await hold(one, "a", ttl_s=ttl_s)
        if time.monotonic() - last < ttl_s:
            assert renewed == leader
            num_renewed += 1
        else:  # on a busy machine it may be another one: all begins anew, with more time
            ttl_s, num_renewed = 2 * ttl_s, 0
            await one.enter(stays, LONG_S)
            sent, leader = time.monotonic(), await hold(one, "a", ttl_s=ttl_s)
        await one.enter(Member("a", "a:1", "first"), ttl_s)
    while (other := await hold(two, "b", ttl_s=LONG_S)) == leader:
        assert len(await two.members()) == 2 or time.monotonic() - sent >= ttl_s
        assert time.monotonic() - sent < ttl_s + 4
        await asyncio.sleep(0.02)
    assert time.monotonic() - sent >= ttl_s
    assert other.term > leader.term
    assert await hold(one, "a") == other

    async def is_alone() -> bool:
        return await two.members() == [stays]

    await until_true(is_alone)


async def test_two_candidates_race_and_one_leads(place: Place) -> None:
    one, two = place.open(), place.open()
    term, winners = 0, set()
    for number in range(50):
        order = [hold(one, "a"), hold(two, "b")]
        answers = await asyncio.gather(*(order if number % 2 else order[::-1]))
        assert answers[0] == answers[1], "both were told of one leader"
        assert answers[0].term > term
        term = answers[0].term
        winners.add(answers[0].member)
        await asyncio.gather(one.release(answers[0]), two.release(answers[0]))
    assert winners == {"a", "b"}


async def test_a_lead_is_renewed_by_whatever_connection_its_member_has(place: Place) -> None:
    one, two, ttl_s = place.open(), place.open(), place.ttl_s
    leader = await hold(one, "a", ttl_s=ttl_s)
    assert await hold(two, "a", ttl_s=LONG_S) == leader
    await asyncio.sleep(ttl_s + 0.8 * (place.kind == "etcd"))
    assert await one.look() == leader, "its time is the longer one now"
    assert await hold(one, "a", ttl_s=ttl_s) == leader


@pytest.mark.parametrize("seen", [-1, MAX_TERM])
async def test_a_term_that_none_can_follow_is_refused(place: Place, seen: int) -> None:
    with pytest.raises(ValueError, match="no term can follow"):
        await hold(place.open(), "a", seen=seen)


# ── who is there ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_members_enter_and_leave(place: Place) -> None:
    one, two = place.open(), place.open()
    members = [Member(f"id-{number}", f"10.0.0.{number}:1", "größer") for number in range(3)]
    for member in reversed(members):
        await one.enter(member, LONG_S)
    await one.enter(members[0], LONG_S)
    assert await two.members() == members
    await two.leave("id-1")
    await two.leave("id-1")
    assert await one.members() == [members[0], members[2]]
    await one.enter(members[1], LONG_S)
    assert await one.members() == members


async def test_there_is_one_secret(place: Place) -> None:
    stores = [place.open() for _ in range(8)]
    proposals = [f"secret-{number}" for number in range(8)]
    said = await asyncio.gather(*(store.secret(one) for store, one in zip(stores, proposals, strict=True)))
    assert len(set(said)) == 1
    assert said[0] in proposals
    assert await stores[0].secret("another") == said[0]


async def test_fleets_do_not_see_each_other(real: Place) -> None:
    one = real.open()
    leader = await hold(one, "a")
    await one.enter(Member("a", "a:1", "a"), LONG_S)
    real.fleet += "x"  # its keys begin with the other's name
    other = real.open()
    assert await other.look() is None
    assert await other.members() == []
    assert (await hold(other, "b")).member == "b"
    assert await one.look() == leader


# ── servers that fail ───────────────────────────────────────────────────────────────────────────────────────────


def every_call(store: Store) -> list[Callable[[], Awaitable[object]]]:
    return [
        lambda: hold(store, "a"),
        store.look,
        lambda: store.release(Leader(1, "a", "a:1")),
        lambda: store.enter(Member("a", "a:1", "a"), LONG_S),
        lambda: store.leave("b"),
        store.members,
        lambda: store.secret("late"),
    ]


async def test_a_frozen_server_holds_nobody_up_and_its_late_answers_are_nobodys(real: Place) -> None:
    patient, store = real.open(), real.open(timeout_s=SHORT_S)
    leader, secret = await hold(store, "a"), await store.secret("s")
    real.server.freeze()
    try:
        began = time.monotonic()
        failures = await asyncio.gather(*(call() for call in every_call(store)), return_exceptions=True)
        assert time.monotonic() - began < SHORT_S + 0.5
        assert [type(failure) for failure in failures] == [StoreUnavailable] * len(failures)
    finally:
        real.server.thaw()
    await patient.look()  # it has caught up
    assert await store.look() == leader
    assert await store.secret("other") == secret
    assert await hold(store, "b") == leader


async def test_a_server_that_is_down_is_said_to_be_at_once(real: Place) -> None:
    store = real.open(timeout_s=10)
    await store.look()
    real.server.kill()
    for call in every_call(store):
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="cannot be used"):
            await call()
        assert time.monotonic() - began < 2


async def test_a_connection_that_closes_in_the_moment_in_which_it_is_written_to(
    real: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With uvloop that is a RuntimeError, which no library for stores expects."""
    store = real.open()

    def closed(self: object, *data: object, **named: object) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.StreamWriter, "write", closed)
        patch.setattr(asyncio.StreamWriter, "writelines", closed)
        patch.setattr(SocketStream, "send", closed)
        for call in every_call(store):
            with pytest.raises(StoreUnavailable, match="the handler is closed"):
                await call()
    assert await store.look() is None


async def test_a_server_restarted_with_its_data_goes_on(real: Place) -> None:
    store, other = real.open(), real.open()
    leader, secret = await hold(store, "a"), await store.secret("s")
    await store.enter(Member("a", "a:1", "a"), LONG_S)
    real.server.kill()
    real.server.start()
    assert await hold(other, "b") == leader
    assert await hold(store, "a") == leader
    assert await store.secret("other") == secret
    assert [member.id for member in await other.members()] == ["a"]
    await store.release(leader)
    assert (await hold(other, "b")).term > leader.term


async def test_a_server_restarted_empty_gets_its_terms_from_those_who_saw_them(real: Place) -> None:
    store = real.open()
    leader = await hold(store, "a", seen=int(time.time() * 1000) + 1_000_000)
    await store.enter(Member("a", "a:1", "a"), LONG_S)
    assert await store.secret("s") == "s"
    real.server.kill()
    real.server.start(forget=True)
    assert await store.look() is None
    assert await store.members() == []
    again = await hold(store, "a", seen=leader.term)
    assert again.term > leader.term
    await store.enter(Member("a", "a:1", "a"), LONG_S)
    assert len(await store.members()) == 1
    assert await store.secret("new") == "new"


async def test_a_promoted_redis_never_gives_a_term_again(tmp_path: Path) -> None:
    """What has reached the replica stays. What has not is lost, and then two may lead at once, under unlike terms."""
    with (
        StoreProcess("redis", tmp_path / "primary") as primary,
        StoreProcess("redis", tmp_path / "replica", replica_of=primary) as replica,
    ):
        before, after = (open_store(server.url, "f", timeout_s=TIMEOUT_S) for server in (primary, replica))
        leader = await hold(before, "a")

        async def has_arrived() -> bool:
            return await after.look() == leader

        await until_true(has_arrived)
        with pytest.raises(StoreUnavailable, match="read only"):
            await hold(after, "b")
        replica.promote()  # while the primary, cut off, still answers some
        await before.release(leader)
        lost = await hold(before, "b", seen=leader.term)
        primary.kill()
        assert await hold(after, "c", seen=lost.term) == leader, "the release has not reached it"
        await after.release(leader)
        told = await hold(after, "c", seen=lost.term)
        assert told.term > lost.term > leader.term
        await before.aclose()
        await after.aclose()


async def test_what_others_wrote_under_the_keys_is_named(real: Place) -> None:
    for name in ("leader", "members/x" if real.kind == "etcd" else "members", "secret", "term"):
        real.fleet = f"fleet-{next(_numbers)}"
        write_foreign(real, name)
        store = real.open()
        asks = {"leader": store.look, "secret": lambda s=store: s.secret("s"), "term": lambda s=store: hold(s, "a")}
        with pytest.raises(StoreUnavailable, match="no pdproxy of this release wrote; remove it") as raised:
            await asks.get(name, store.members)()  # type: ignore[operator]
        assert real.fleet in raised.value.message
        if name == "leader":
            with pytest.raises(StoreUnavailable, match="no pdproxy"):
                await hold(store, "a")


def write_foreign(place: Place, name: str) -> None:
    if place.kind == "redis":
        words = f"pdproxy:{{{place.fleet}}}:{name}"
        said = place.server.command(f"SADD {words} x" if name != "term" else f"SET {words} 1e999")
        assert not said.startswith(b"-")
    elif place.kind == "kubernetes":
        which = "members" if name == "members" else "leader"
        spec = {"holderIdentity": "somebody", "leaseDurationSeconds": 15} if name == "leader" else {}
        told = {} if name == "leader" else {f"pdproxy.coordination/{name}": "" if name == "secret" else "\xff"}
        meta = {"name": f"pdproxy-{which}-{place.fleet}", "annotations": told}
        url = f"http://127.0.0.1:{place.server.port}/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
        assert httpx.post(url, json={"metadata": meta, "spec": spec}).status_code == 201
    else:
        content = {"key": f"pdproxy/{place.fleet}/{name}".encode(), "value": b"\xff"}
        reply = httpx.post(f"http{place.server.url[4:]}/v3/kv/put", content=msgspec.json.encode(content))
        assert reply.status_code == 200


@pytest.mark.parametrize("scheme", REAL)
@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nwelcome!\n", b"+WHAT\r\n" * 9])
async def test_a_server_of_another_kind_is_an_error(
    scheme: str, says: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(says)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, f"http://127.0.0.1:{port}")))
    url = scheme if scheme == "kubernetes" else f"{scheme}://127.0.0.1:{port}"
    store = open_store(url, "f", timeout_s=TIMEOUT_S)
    for call in every_call(store):
        if call == store.look or "hold" in repr(call) or says == b"":
            with pytest.raises(StoreUnavailable):
                await call()
    await store.aclose()
    server.close()


# ── etcd's endpoints, users ─────────────────────────────────────────────────────────────────────────────────────


async def test_one_of_several_endpoints_is_enough(servers: dict[str, StoreProcess]) -> None:
    server = servers["etcd"]
    silent = socket.create_server(("127.0.0.1", 0))  # takes connections and says nothing
    hosts = f"127.0.0.1:1,127.0.0.1:{silent.getsockname()[1]},127.0.0.1:{server.port}"
    store = open_store(f"etcd://{hosts}", "endpoints", timeout_s=1.5)
    began = time.monotonic()
    leader = await hold(store, "a")
    assert time.monotonic() - began < 1.5
    began = time.monotonic()
    assert await hold(store, "a") == leader
    assert time.monotonic() - began < 0.4, "the endpoint that answered is asked first"
    await store.aclose()
    silent.close()


async def test_etcd_asks_for_a_user_and_a_token_that_has_lapsed_is_replaced(tmp_path: Path) -> None:
    with StoreProcess("etcd", tmp_path / "etcd") as server:
        address = f"127.0.0.1:{server.port}"
        add_user(address, "p@ss/w:rd")
        store = open_store(f"etcd://root:p%40ss%2Fw%3Ard@{address}", "f", timeout_s=TIMEOUT_S)
        leader = await hold(store, "a")
        add_another_user(address, "p@ss/w:rd")  # no token of before that is taken any more
        assert await hold(store, "a") == leader
        store._token = "lapsed.1"  # type: ignore[attr-defined]
        assert await hold(store, "a") == leader
        for url in (f"etcd://root:wrong-word@{address}", f"etcd://{address}"):
            refused = open_store(url, "f", timeout_s=TIMEOUT_S)
            with pytest.raises(StoreUnavailable) as raised:
                await hold(refused, "b")
            assert "wrong-word" not in raised.value.message
            await refused.aclose()
        await store.aclose()


def add_user(address: str, password: str) -> None:
    for path, content in (
        ("user/add", {"name": "root", "password": password}),
        ("role/add", {"name": "root"}),
        ("user/grant", {"user": "root", "role": "root"}),
        ("enable", {}),
    ):
        assert httpx.post(f"http://{address}/v3/auth/{path}", json=content).status_code == 200


def add_another_user(address: str, password: str) -> None:
    said = httpx.post(f"http://{address}/v3/auth/authenticate", json={"name": "root", "password": password}).json()
    headers = {"authorization": said["token"]}
    another = {"name": "another", "password": "word"}
    assert httpx.post(f"http://{address}/v3/auth/user/add", json=another, headers=headers).status_code == 200


async def test_a_redis_password_is_used_and_not_told(tmp_path: Path) -> None:
    with StoreProcess("redis", tmp_path / "redis") as server:
        assert server.command("CONFIG SET requirepass p@ss") == b"+OK"
        store = open_store(f"redis://:p%40ss@127.0.0.1:{server.port}/0", "f", timeout_s=TIMEOUT_S)
        assert (await hold(store, "a")).member == "a"
        refused = open_store(f"redis://:wrong-word@127.0.0.1:{server.port}/0", "f", timeout_s=TIMEOUT_S)
        with pytest.raises(StoreUnavailable) as raised:
            await hold(refused, "b")
        assert "wrong-word" not in raised.value.message
        await store.aclose()
        await refused.aclose()


# ── URLs ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("zookeeper://:secret@host", "it must begin with one of redis://"),
        ("host:2379", "it must begin with one of redis://"),
        ("redis", "it must begin with one of redis://"),
        ("redis://host:port", "cannot be used"),
        ("redis://host/0?socket_timeout=soon", "cannot be used"),
        ("etcd://", "a host is missing"),
        ("etcd://a,,b", "a host is missing"),
        ("etcd://a:99999", "cannot be used"),
        ("etcd://a/0", "nothing may follow the hosts"),
        ("etcd://a?ca=/file", "has the option 'ca'"),
        ("etcds://a?insecure=1", "has the option 'insecure'"),
        ("etcds://a?ca=/no/such/file", "No such file"),
    ],
)
async def test_a_url_that_cannot_be_used_is_a_configuration_error(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"^coordinator: ") as raised:
        open_store(url, "f", timeout_s=1)
    assert says in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [("redis://host", "redis", "redis"), ("kubernetes://llm/pdproxy", "lightkube", "kubernetes")],
)
async def test_a_missing_package_is_named_with_its_extra(
    url: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Missing(MetaPathFinder):
        def find_spec(self, fullname: str, path: object, target: object = None) -> None:
            if fullname == package:
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    for name in [*sys.modules]:
        if name.split(".")[0] == package or name == f"pdproxy.coordination.{package}_store":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(ConfigError, match=rf"^coordinator: .*pip install 'pdproxy\[{extra}\]'"):
        open_store(url, "f", timeout_s=1)


async def test_a_fleet_name_that_breaks_keys_is_refused() -> None:
    for name in ("", "a}b", "a/b", "-a", "ä"):
        with pytest.raises(ConfigError, match=r"^fleet_name: "):
            open_store("redis://host", name, timeout_s=1)
