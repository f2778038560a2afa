"""The store in Leases, against a stand-in of the API server: races at named points, faults of all kinds, and rights."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdproxy.coordination.factory import open_store, server_of
from pdproxy.coordination.kubernetes_store import KubernetesStore
from pdproxy.coordination.store import Leader, Member
from pdproxy.discovery.api_server import kubernetes_client
from pdproxy.errors import ConfigError, StoreUnavailable
from tests.fakes.kubernetes_api import NAMESPACE, KubernetesApi, Request, kubeconfig
from tests.helpers.manifests import check_schema
from tests.pdproxy.coordination.test_store_contract import every_call, hold

pytest.importorskip("lightkube")
ROOT = Path(__file__).parents[3]
LEADER, MEMBERS = "pdproxy-leader-f", "pdproxy-members-f"
TTL_S = 30.0
NOW = 1_800_000_000.0


class Clocks:
    """The clocks of one replica, which a test moves. Mutable state: the seconds that have passed, and Unix time."""

    def __init__(self, unix: float = NOW) -> None:
        self.seconds = 0.0
        self.unix = unix


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubernetesApi]:
    async with KubernetesApi(clock=lambda: NOW) as api:
        (tmp_path / "token").write_text("first\n")
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, api.url, tmp_path / "token")))
        yield api


@pytest.fixture
async def opened(api: KubernetesApi) -> AsyncIterator[Callable[..., KubernetesStore]]:
    """Opens a replica's store, whose requests tell by a header of whom they are."""
    stores: list[KubernetesStore] = []

    def open_one(who: str = "a", clocks: Clocks | None = None, *, timeout_s: float = 5.0) -> KubernetesStore:
        at = clocks or Clocks()

        def connect() -> Any:
            client = kubernetes_client("coordinator")
            client.headers["x-who"] = who
            return client

        store = KubernetesStore(
            "kubernetes",
            "f",
            timeout_s=timeout_s,
            connect=connect,
            clock=lambda: at.seconds,
            unix_clock=lambda: at.unix,
        )
        stores.append(store)
        return store

    yield open_one
    for store in stores:
        await store.aclose()


def lease(api: KubernetesApi, name: str = LEADER) -> dict[str, Any]:
    return api.get("leases", name)


def annotations(api: KubernetesApi, name: str = LEADER) -> dict[str, str]:
    found: dict[str, str] = lease(api, name)["metadata"]["annotations"]
    return found


# ── whose lead ends when ────────────────────────────────────────────────────────────────────────────────────────


async def test_a_lead_ends_by_the_clock_of_who_watches_whatever_time_it_shows(
    api: KubernetesApi, opened: Callable[..., KubernetesStore]
) -> None:
    for skew_s in (-60.0, 0.0, 3600.0):
        clocks = Clocks(NOW + skew_s)
        one, two = opened("a"), opened("b", clocks)
        leader = await hold(one, "a", ttl_s=TTL_S)
        assert await hold(two, "b") == leader
        clocks.seconds = TTL_S - 3
        assert await hold(two, "b") == leader == await two.look()
        clocks.seconds = TTL_S
        assert await two.look() is None
        taken = await hold(two, "b")
        assert (taken.member, taken.term) == ("b", leader.term + 1)
        assert await hold(one, "a") == taken
        await two.release(taken)


async def test_a_replica_that_has_just_come_waits_for_a_whole_lead(opened: Callable[..., KubernetesStore]) -> None:
    clocks = Clocks()
    leader = await hold(opened("a"), "a", ttl_s=TTL_S)
    clocks.seconds = 1e6
    late = opened("b", clocks)
    assert await hold(late, "b") == leader
    clocks.seconds += TTL_S - 3
    assert await hold(late, "b") == leader


async def test_a_renewal_is_seen_though_the_leaders_clock_stands_still(opened: Callable[..., KubernetesStore]) -> None:
    clocks = Clocks()
    one, two = opened("a"), opened("b", clocks)
    leader = await hold(one, "a", ttl_s=TTL_S)
    for _ in range(3):
        assert await hold(two, "b") == leader
        assert await hold(one, "a", ttl_s=TTL_S) == leader
        clocks.seconds += TTL_S - 1
    assert await hold(two, "b") == leader


async def test_a_server_that_was_set_back_gives_a_version_again_and_it_is_another_lease(
    api: KubernetesApi, opened: Callable[..., KubernetesStore]
) -> None:
    of_one, of_two = Clocks(), Clocks()
    one, two = opened("a", of_one), opened("b", of_two)
    leader = await hold(one, "a", ttl_s=TTL_S)
    kept, version = lease(api), api.version
    await hold(one, "a", ttl_s=TTL_S)
    assert await hold(two, "b") == leader
    of_two.seconds = TTL_S - 3
    api.version = version - 1
    api.put("leases", kept)
    of_one.unix += 5
    assert await hold(one, "a", ttl_s=TTL_S) == leader
    assert lease(api)["metadata"]["resourceVersion"] == str(version + 1)
    of_two.seconds = TTL_S
    assert await hold(two, "b") == leader


async def test_who_finds_a_lead_about_to_end_waits_for_that(opened: Callable[..., KubernetesStore]) -> None:
    clocks = Clocks()
    two = opened("b", clocks, timeout_s=5.0)
    leader = await hold(opened("a"), "a", ttl_s=TTL_S)
    assert await hold(two, "b") == leader
    clocks.seconds = TTL_S - 3
    assert await hold(two, "b") == leader, "that is not soon"
    clocks.seconds = TTL_S - 0.2
    loop = asyncio.get_running_loop()
    loop.call_later(0.1, setattr, clocks, "seconds", TTL_S)
    assert (await hold(two, "b")).member == "b"


async def test_a_member_goes_when_it_was_not_seen_to_enter_again(opened: Callable[..., KubernetesStore]) -> None:
    clocks = Clocks(NOW - 60)
    one, two = opened("a"), opened("b", clocks)
    a, b = (Member(name, f"{name}:1", name) for name in "ab")
    await one.enter(a, TTL_S)
    assert await two.members() == [a]
    clocks.seconds = TTL_S - 1
    await one.enter(a, TTL_S)
    await two.enter(b, TTL_S)
    clocks.seconds += TTL_S - 1
    assert await two.members() == [a, b]
    clocks.seconds += 1
    assert await two.members() == [b], "its own entry it has seen for a second"
    await two.enter(b, TTL_S)
    assert await one.members() == [b], "the other was taken out"


# ── terms ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("skew_s", [-60.0, 60.0])
async def test_a_lease_that_is_made_anew_has_greater_terms_whatever_a_clock_shows(
    api: KubernetesApi, opened: Callable[..., KubernetesStore], skew_s: float
) -> None:
    first = await hold(opened("a", Clocks(NOW - skew_s)), "a")
    api.remove("leases", LEADER)
    api.clock = lambda: NOW + 1
    second = await hold(opened("b", Clocks(NOW + skew_s)), "b")
    assert second.term > first.term
    assert int(NOW) * 1000 < first.term <= second.term <= int(NOW + 2) * 1000


async def test_a_renewal_that_arrives_after_the_lease_was_deleted_does_not_make_it(
    api: KubernetesApi, opened: Callable[..., KubernetesStore]
) -> None:
    one = opened("a")
    leader = await hold(one, "a")

    async def delete_first(request: Request) -> None:
        if request.method == "PUT":
            api.faults.before = None
            api.remove("leases", LEADER)

    api.faults.before = delete_first
    again = await hold(one, "a", seen=leader.term)
    assert again.term > leader.term
    assert api.counts["post leases"] == 2


async def test_a_term_that_was_taken_off_a_lease_is_not_guessed(
    api: KubernetesApi, opened: Callable[..., KubernetesStore]
) -> None:
    one = opened("a")
    await one.release(await hold(one, "a"))
    api.change("leases", LEADER, lambda one: one["metadata"].pop("annotations"))
    with pytest.raises(StoreUnavailable, match="remove it"):
        await hold(one, "a")


# ── races ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Turns:
    """Lets the requests of two replicas through in a given order, and all when that order is used up. Mutable state:
    whose turns are left."""

    def __init__(self, order: Sequence[str]) -> None:
        self.left = list(order)
        self._news = asyncio.Event()

    async def before(self, request: Request) -> None:
        who = request.headers["x-who"]
        while self.left and self.left[0] != who:
            await self._news.wait()
        if self.left:
            self.left.pop(0)
            self._tell()

    def leave(self, who: str) -> None:
        self.left = [one for one in self.left if one != who]
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


ORDERS = sorted({"".join(one) for one in itertools.permutations("aaabbb")})


@pytest.mark.parametrize("begin", ["with none", "released", "lapsed"])
async def test_two_candidates_race_in_every_order(
    api: KubernetesApi, opened: Callable[..., KubernetesStore], begin: str
) -> None:
    clocks = Clocks()
    stores = {who: opened(who, clocks) for who in "ab"}
    other = opened("c")
    last = 0
    for order in ORDERS:
        if begin == "with none":
            api._objects["leases"].clear()
        else:
            for store in stores.values():
                await store.release(Leader(last, *((store is stores["a"] and ("a", "a:1")) or ("b", "b:1"))))
            old = await hold(other, "c", ttl_s=TTL_S)
            assert old.term > last
            last = old.term
            if begin == "released":
                await other.release(old)
            else:
                assert [await store.look() for store in stores.values()] == [old, old]
                clocks.seconds += TTL_S
        turns = Turns(order)
        api.faults.before = turns.before

        async def campaign(who: str, turns: Turns = turns) -> Leader:
            try:
                return await hold(stores[who], who, ttl_s=TTL_S)
            finally:
                turns.leave(who)

        told = await asyncio.gather(campaign("a"), campaign("b"))
        api.faults.before = None
        assert told[0] == told[1], order
        assert told[0].term > last or begin == "with none", order
        last = told[0].term
        assert lease(api)["spec"]["holderIdentity"] == told[0].member
        await stores[told[0].member].release(told[0])


@pytest.mark.parametrize("gives_up", [False, True])
async def test_a_renewal_that_stood_still_while_another_took_over_is_refused(
    api: KubernetesApi, opened: Callable[..., KubernetesStore], gives_up: bool
) -> None:
    clocks, goes_on = Clocks(), asyncio.Event()
    one, two = opened("a"), opened("b", clocks)
    leader = await hold(one, "a", ttl_s=TTL_S)
    assert await hold(two, "b") == leader
    has_come = asyncio.Event()

    async def stand_still(request: Request) -> None:
        if request.method == "PUT" and request.headers["x-who"] == "a":
            has_come.set()
            await goes_on.wait()

    api.faults.before = stand_still
    renewal = asyncio.create_task(hold(one, "a", ttl_s=TTL_S))
    await has_come.wait()
    if gives_up:  # and what it has sent is carried out all the same, some time
        renewal.cancel()
        await asyncio.wait([renewal])
    clocks.seconds = TTL_S
    taken = await hold(two, "b", ttl_s=TTL_S)
    assert taken.term > leader.term
    goes_on.set()
    if not gives_up:
        assert await renewal == taken
    assert await hold(two, "b", ttl_s=TTL_S) == taken
    assert await hold(one, "a") == taken
    await one.release(leader)
    assert await two.look() == taken


async def test_who_takes_over_a_lease_that_was_renewed_in_that_moment_does_not(
    api: KubernetesApi, opened: Callable[..., KubernetesStore]
) -> None:
    clocks = Clocks()
    one, two = opened("a"), opened("b", clocks)
    leader = await hold(one, "a", ttl_s=TTL_S)
    assert await hold(two, "b") == leader
    clocks.seconds = TTL_S

    async def renew_first(request: Request) -> None:
        if request.method == "PUT" and request.headers["x-who"] == "b":
            api.faults.before = None
            assert await hold(one, "a", ttl_s=TTL_S) == leader

    api.faults.before = renew_first
    assert await hold(two, "b") == leader


async def test_many_members_enter_at_once(opened: Callable[..., KubernetesStore]) -> None:
    members = [Member(f"m{number}", f"m{number}:1", "it") for number in range(8)]
    stores = [opened(one.id, timeout_s=30.0) for one in members]
    for _ in range(2):
        await asyncio.gather(*(store.enter(one, TTL_S) for store, one in zip(stores, members, strict=True)))
    assert await stores[0].members() == members
    await asyncio.gather(*(store.leave(one.id) for store, one in zip(stores, members, strict=True)))
    assert await stores[0].members() == []


# ── a server that fails ─────────────────────────────────────────────────────────────────────────────────────────


async def life(store: KubernetesStore) -> list[object]:
    """All that a replica asks of its store. Returns what it was told."""
    secret = await store.secret("s")
    leader = await hold(store, "a")
    told: list[object] = [secret, leader.member, await hold(store, "a") == leader == await store.look()]
    await store.enter(Member("a", "a:1", "a"), TTL_S)
    told += await store.members()
    await store.leave("a")
    told += [await store.members()]
    await store.release(leader)
    return [*told, await store.look()]


LIFE = ["s", "a", True, Member("a", "a:1", "a"), [], None]


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_connection_that_breaks_at_any_request_costs_nothing(
    api: KubernetesApi, opened: Callable[..., KubernetesStore], when: str
) -> None:
    """Before it was done, or after that: then the reply is lost of what was carried out."""
    num_requests = broken_at = 0
    while True:
        broken_at += 1
        num_requests = 0

        async def break_off(request: Request, broken_at: int = broken_at) -> None:
            nonlocal num_requests
            num_requests += 1
            if num_requests == broken_at:
                raise ConnectionAbortedError

        api._objects["leases"].clear()
        setattr(api.faults, when, break_off)
        assert await life(opened()) == LIFE, broken_at
        if num_requests < broken_at:
            break
    assert broken_at > 15


@pytest.mark.parametrize(
    ("code", "headers"), [(403, {}), (410, {}), (429, {"Retry-After": "60"}), (500, {}), (503, {})]
)
async def test_a_refusal_is_told_and_costs_no_lead(
    api: KubernetesApi, opened: Callable[..., KubernetesStore], code: int, headers: dict[str, str]
) -> None:
    store = opened()
    leader = await hold(store, "a")
    for call in every_call(store):
        api.faults.one_status = [(code, headers)]
        began = asyncio.get_running_loop().time()
        with pytest.raises(StoreUnavailable, match=f"kubernetes://{NAMESPACE}/pdproxy cannot be used: HTTP {code}"):
            await call()
        assert asyncio.get_running_loop().time() - began < 1
        assert await hold(store, "a") == leader


async def test_a_token_that_is_another(
    api: KubernetesApi, opened: Callable[..., KubernetesStore], tmp_path: Path
) -> None:
    api.token = "first"
    store = opened()
    leader = await hold(store, "a")
    api.token = "second"
    (tmp_path / "token").write_text("second\n")
    assert await hold(store, "a") == leader
    assert api.counts["401"] == 1
    api.token = "third"
    with pytest.raises(StoreUnavailable, match="HTTP 401"):
        await hold(store, "a")
    (tmp_path / "token").write_text("third\n")
    assert await hold(store, "a") == leader


@contextmanager
def in_a_hurry(store: KubernetesStore) -> Iterator[None]:
    """Has the store wait for 0.4 s at most while the block runs."""
    kept, store._timeout_s = store._timeout_s, 0.4
    with pytest.raises(StoreUnavailable, match=r"no answer within 0\.4 s"):
        yield
    store._timeout_s = kept


async def test_connections_that_are_half_open(api: KubernetesApi, opened: Callable[..., KubernetesStore]) -> None:
    store = opened()
    leader = await hold(store, "a")
    await api.freeze()
    with in_a_hurry(store):
        await hold(store, "a")
    assert await hold(store, "a") == leader


async def test_a_slow_server_holds_nobody_up_and_is_no_reason_to_ask_more_often(
    api: KubernetesApi, opened: Callable[..., KubernetesStore]
) -> None:
    store = opened()
    leader = await hold(store, "a")

    async def be_slow(request: Request) -> None:
        await asyncio.Event().wait()

    api.faults.before = be_slow
    num_asked = len(api.requests)
    for _ in range(3):
        with in_a_hurry(store):
            await hold(store, "a")
    assert len(api.requests) <= num_asked + 3
    api.faults.before = None
    assert await hold(store, "a") == leader


async def test_a_cluster_that_is_configured_anew_is_found(
    api: KubernetesApi, opened: Callable[..., KubernetesStore], tmp_path: Path
) -> None:
    store = opened()
    await hold(store, "a")
    await api.stop()
    async with KubernetesApi() as other:
        kubeconfig(tmp_path, other.url, tmp_path / "token")
        assert (await hold(store, "b")).member == "b"
    await api.start()


# ── what is written ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_leases_are_valid_at_all_times(api: KubernetesApi, opened: Callable[..., KubernetesStore]) -> None:
    kept: dict[str, dict[str, Any]] = {}

    async def keep(request: Request) -> None:
        for _, name in api._objects["leases"]:
            kept[json.dumps(lease(api, name))] = lease(api, name)
        if request.content:
            kept[request.content.decode()] = json.loads(request.content)

    api.faults.after = keep
    assert await life(opened()) == LIFE
    assert len(kept) > 12
    for one in kept.values():
        check_schema(one)
    assert lease(api)["spec"] == {"leaseTransitions": 1}


async def test_people_see_who_leads_since_when(api: KubernetesApi, opened: Callable[..., KubernetesStore]) -> None:
    clocks = Clocks()
    store = opened("a", clocks)
    leader = await hold(store, "a", ttl_s=4.2)
    clocks.unix += 1.5
    await hold(store, "a", ttl_s=4.2)
    assert lease(api)["spec"] == {
        "holderIdentity": "a",
        "leaseDurationSeconds": 5,
        "leaseTransitions": 1,
        "acquireTime": "2027-01-15T08:00:00.000000Z",
        "renewTime": "2027-01-15T08:00:01.500000Z",
    }
    assert annotations(api)["pdproxy.coordination/term"] == str(leader.term)


async def test_what_others_add_to_a_lease_stays(api: KubernetesApi, opened: Callable[..., KubernetesStore]) -> None:
    store = opened()
    leader = await hold(store, "a")
    owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "pdproxy", "uid": "u"}

    def add(one: dict[str, Any]) -> None:
        one["metadata"] |= {"labels": {"app": "pdproxy"}, "ownerReferences": [owner]}
        one["metadata"]["annotations"]["theirs"] = "x"

    api.change("leases", LEADER, add)
    assert await hold(store, "a") == leader
    await store.release(leader)
    meta = lease(api)["metadata"]
    assert (meta["labels"], meta["ownerReferences"], meta["annotations"]["theirs"]) == (
        {"app": "pdproxy"},
        [owner],
        "x",
    )


async def test_no_more_is_asked_than_the_role_allows(
    api: KubernetesApi, opened: Callable[..., KubernetesStore]
) -> None:
    file = ROOT / "examples" / "kubernetes" / "components" / "lease" / "rbac.yaml"
    [role] = [one for one in yaml.safe_load_all(file.read_text()) if one["kind"] == "Role"]
    store = open_store("kubernetes", "default", timeout_s=5.0)
    for call in every_call(store):
        await call()
    await store.release(await hold(store, "a"))
    await store.aclose()
    verbs = {"GET": "get", "POST": "create", "PUT": "update"}
    asked = {(verbs[one.method], "" if one.method == "POST" else one.path.rpartition("/")[2]) for one in api.requests}
    allowed = {
        (verb, name)
        for rule in role["rules"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [""])
        if (rule["apiGroups"], rule["resources"]) == (["coordination.k8s.io"], ["leases"])
    }
    assert asked == allowed


# ── URLs ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("url", "namespace", "name"),
    [
        ("kubernetes", NAMESPACE, "pdproxy"),
        ("kubernetes://", NAMESPACE, "pdproxy"),
        ("kubernetes://there", "there", "pdproxy"),
        ("kubernetes://there/mine", "there", "mine"),
        ("kubernetes:///mine", NAMESPACE, "mine"),
    ],
)
async def test_a_url_names_the_namespace_and_the_leases(
    api: KubernetesApi, url: str, namespace: str, name: str
) -> None:
    store = open_store(url, "f", timeout_s=5)
    await hold(store, "a")
    assert api.get("leases", f"{name}-leader-f", namespace)["spec"]["holderIdentity"] == "a"
    await store.aclose()


@pytest.mark.parametrize(
    ("url", "fleet", "says"),
    [
        ("kubernetes://There", "f", "the URL cannot be used"),
        ("kubernetes://a/b/c", "f", "the URL cannot be used"),
        ("kubernetes://a/b?c=d", "f", "the URL cannot be used"),
        ("kubernetes:a", "f", "it must begin with one of redis://"),
        ("kubernetes", "F_1", "lower-case letters"),
        ("kubernetes", "a" * 250, "lower-case letters"),
    ],
)
async def test_what_cannot_be_a_lease_is_refused(api: KubernetesApi, url: str, fleet: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_store(url, fleet, timeout_s=1)


@pytest.mark.parametrize("use", [partial(open_store, timeout_s=1, fleet="f"), server_of])
@pytest.mark.parametrize("url", ["kubernetes", "kubernetes://there/mine"])
async def test_no_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str, use: Callable[[str], Awaitable[None]]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"^coordinator: no cluster is configured"):
        use(url)
