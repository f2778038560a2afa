"""Pods as instances: what joins, what is drained, and in which role."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdproxy.config.instances import InstanceSettings
from pdproxy.config.settings import Settings, load
from pdproxy.discovery.api_server import kubernetes_client
from pdproxy.discovery.discovery import Discovery
from pdproxy.discovery.factory import make_discovery
from pdproxy.discovery.kubernetes import KubernetesPods, Query, queries
from pdproxy.errors import ConfigError
from pdproxy.fleet.membership import Membership
from pdproxy.fleet.pool import Pool
from pdproxy.fleet.roster import Entry, Roster
from tests.fakes.calls import until
from tests.fakes.fleet import Held, make_admission, make_instance, make_ready
from tests.fakes.kubernetes_api import (
    NAMESPACE,
    KubernetesApi,
    endpoint,
    labelled,
    pod,
    ready,
    slice_of,
    terminating,
)

pytestmark = pytest.mark.usefixtures("config")
BOTH = Query("prefill", "role=prefill"), Query("decode", "role=decode")


class Told:
    """What was told last, as name, role and url."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.history: list[set[tuple[str, str]]] = []

    def __call__(self, entries: Iterable[Entry]) -> None:
        self.entries = list(entries)
        self.history.append(self.roles)

    @property
    def roles(self) -> set[tuple[str, str]]:
        return {(one.name, one.settings.role) for one in self.entries}

    @property
    def urls(self) -> dict[str, str]:
        return {one.name: one.settings.url for one in self.entries}


@asynccontextmanager
async def watching(
    *asked: Query, namespace: str = NAMESPACE, engine: Any = "builtin", **more: Any
) -> AsyncIterator[Told]:
    told = Told()
    pods = KubernetesPods(asked or BOTH, kubernetes_client, namespace=namespace, engine=engine, **more)
    task = asyncio.ensure_future(pods.run(told))
    try:
        yield told
        assert not task.done(), "it has ended"
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def engine(name: str, role: str, ip: str = "10.0.0.1", **more: Any) -> dict[str, Any]:
    return pod(name, ip, ports={"http": 8000, "metrics": 9000}, role=role, **more)


async def is_watched(api: KubernetesApi, what: str = "pods") -> None:
    await until(lambda: api.counts[f"watch {what}"] >= 2)


async def test_ready_pods_with_an_address(api: KubernetesApi) -> None:
    api.put("pods", engine("p", "prefill"))
    api.put("pods", engine("d", "decode", "fd00::2"))
    api.put("pods", engine("starting", "decode", "10.0.0.3", is_ready=False))
    api.put("pods", engine("nowhere", "decode", ""))
    api.put("pods", engine("ending", "decode", "10.0.0.5"))
    api.change("pods", "ending", terminating)
    api.put("pods", pod("other", "10.0.0.6", ports={"http": 1}))
    async with watching() as told:
        await is_watched(api)
        assert told.roles == {("p", "prefill"), ("d", "decode")}
        assert told.urls == {"p": "http://10.0.0.1:8000", "d": "http://[fd00::2]:8000"}
        api.change("pods", "starting", ready(True))
        await until(lambda: ("starting", "decode") in told.roles)
        api.change("pods", "d", terminating)
        await until(lambda: ("d", "decode") not in told.roles)
        api.change("pods", "starting", ready(False))
        await until(lambda: told.roles == {("p", "prefill")})


@pytest.mark.parametrize("is_decode_first", [True, False])
async def test_a_role_that_changes(api: KubernetesApi, is_decode_first: bool) -> None:
    api.put("pods", engine("a", "prefill"))
    async with watching() as told:
        await is_watched(api)
        for role in ("decode", "prefill", "decode") if is_decode_first else ("decode", "prefill"):
            api.put("pods", engine("a", role))
            await until(lambda role=role: told.roles == {("a", role)})
            api.change("pods", "a", ready(True))
            await asyncio.sleep(0.02)
            assert told.roles == {("a", role)}
        assert all(len(one) <= 1 for one in told.history), "it never has both roles"


async def test_the_labels_of_both(api: KubernetesApi, caplog: pytest.LogCaptureFixture) -> None:
    api.put("pods", engine("a", "both"))
    api.put("pods", engine("b", "prefill", "10.0.0.2"))
    async with watching(Query("prefill", "role!=decode"), Query("decode", "role!=prefill")) as told:
        await is_watched(api)
        await until(lambda: told.roles == {("b", "prefill")})
        assert "make the selectors exclude each other" in caplog.text
        api.put("pods", engine("a", "decode"))
        await until(lambda: told.roles == {("b", "prefill"), ("a", "decode")})


async def test_another_uid_is_another_incarnation(api: KubernetesApi) -> None:
    api.put("pods", engine("a", "prefill", uid="one"))
    async with watching() as told:
        await until(lambda: [one.incarnation for one in told.entries] == ["one"])
        api.remove("pods", "a")
        api.put("pods", engine("a", "prefill", uid="two"))
        await until(lambda: [one.incarnation for one in told.entries] == ["two"])


@pytest.mark.parametrize(
    ("ports", "annotations", "wanted", "expected"),
    [
        ({"http": 8000, "x": 1}, {}, None, 8000),
        ({"serve": 8200}, {}, None, 8200),
        ({"http": 8000, "vllm": 8200}, {}, "vllm", 8200),
        ({"http": 8000, "vllm": 8200}, {}, "8300", 8300),
        ({"http": 8000, "vllm": 8200}, {"pdproxy.instance/port": "vllm"}, "http", 8200),
        ({}, {"pdproxy.instance/port": "8400"}, None, 8400),
    ],
)
async def test_ports(
    api: KubernetesApi, ports: dict[str, int], annotations: dict[str, str], wanted: str | None, expected: int
) -> None:
    api.put("pods", pod("a", ports=ports, annotations=annotations, role="prefill"))
    async with watching(port=wanted) as told:
        await until(lambda: told.urls == {"a": f"http://10.0.0.1:{expected}"})


async def test_pods_that_cannot_be_instances_are_told_once(
    api: KubernetesApi, caplog: pytest.LogCaptureFixture
) -> None:
    api.put("pods", pod("portless", ports={"a": 1, "b": 2}, role="prefill"))
    api.put("pods", engine("wrong", "prefill", "10.0.0.2", annotations={"pdproxy.instance/engine": "mystery"}))
    api.put("pods", engine("good", "prefill", "10.0.0.3"))
    async with watching() as told:
        await until(lambda: told.roles == {("good", "prefill")})
        api.put("pods", engine("better", "prefill", "10.0.0.4"))
        await until(lambda: told.roles == {("good", "prefill"), ("better", "prefill")})
    said = [record.message for record in caplog.records]
    assert len(said) == 2
    assert any("portless" in one and "a 1, b 2" in one and "discover_port" in one for one in said)
    assert any("wrong" in one and "engine" in one for one in said)


async def test_what_keeps_instances_from_being_found(api: KubernetesApi) -> None:
    """It is there while it lasts, and gone with the next list, though nothing happens in the cluster then."""
    api.put("pods", pod("portless", ports={"a": 1, "b": 2}, role="prefill"))
    api.faults.list_status = [(403, {})] * 2
    pods = KubernetesPods(BOTH, kubernetes_client, namespace=NAMESPACE, engine="builtin")
    assert pods.complaints == []
    task = asyncio.ensure_future(pods.run(Told()))
    await until(lambda: len(pods.complaints) == 2)
    assert all(one.startswith("the cluster cannot be read (api/v1/") and "HTTP 403" in one for one in pods.complaints)
    await until(lambda: [one.partition(":")[0] for one in pods.complaints] == ["the pod llm/portless is no instance"])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_what_a_pod_says_of_itself(api: KubernetesApi) -> None:
    said = {
        "sglang.ai/bootstrap-port": "8998",
        "pdproxy.instance/max-rooms": "7",
        "pdproxy.instance/lmcache-config": "/x",
    }
    api.put("pods", engine("a", "prefill", annotations=said))
    async with watching(engine="sglang") as told:
        await until(lambda: bool(told.entries))
        (one,) = told.entries
        assert (one.settings.bootstrap_port, one.settings.max_rooms) == (8998, 7)
        assert one.settings.lmcache_config is None


@pytest.mark.parametrize(
    ("label", "annotation", "revision"),
    [("v1", None, "v1"), (None, "v2", "v2"), ("v1", "v2", "v2"), (None, None, None)],
)
async def test_a_revision_is_a_label_or_an_annotation(
    api: KubernetesApi, label: str | None, annotation: str | None, revision: str | None
) -> None:
    name = "pdproxy.instance/revision"
    one = engine("a", "prefill", annotations={} if annotation is None else {name: annotation})
    if label is not None:
        one["metadata"]["labels"][name] = label
    api.put("pods", one)
    async with watching() as told:
        await until(lambda: bool(told.entries))
        assert [one.settings.revision for one in told.entries] == [revision]


async def test_all_namespaces(api: KubernetesApi) -> None:
    api.put("pods", engine("a", "prefill", namespace="one"))
    api.put("pods", engine("a", "prefill", "10.0.0.2", namespace="two"))
    async with watching(namespace="*") as told:
        await until(lambda: set(told.urls) == {"one.a", "two.a"})


# ── services ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_endpoints_of_a_service(api: KubernetesApi) -> None:
    ends = [
        endpoint("10.0.0.1", "u1", name="a"),
        endpoint("10.0.0.2", "u2", name="b", ready=False),
        endpoint("10.0.0.3"),
    ]
    api.put("endpointslices", slice_of("pre", "pre-1", *ends, ports={"http": 8000}))
    api.put("endpointslices", slice_of("other", "other-1", endpoint("10.0.0.9", "u9", name="z"), ports={"http": 8000}))
    async with watching(Query("prefill", service="pre")) as told:
        await until(lambda: set(told.urls) == {"a", "pre-1-10.0.0.3"})
        ends[0]["conditions"] = {"ready": False, "serving": True, "terminating": True}
        ends[1]["conditions"] = {"ready": True}
        api.put("endpointslices", slice_of("pre", "pre-1", *ends[:2], ports={"http": 8000}))
        await until(lambda: told.urls == {"b": "http://10.0.0.2:8000"})
        assert told.entries[0].incarnation == "u2"


async def test_services_of_all_namespaces(api: KubernetesApi) -> None:
    for number, namespace in enumerate(("one", "two")):
        slice_ = slice_of("pre", "pre-1", endpoint(f"10.0.{number}.1", f"u{number}", name="a"), ports={"http": 8000})
        slice_["endpoints"].append(endpoint(f"10.0.{number}.2"))
        slice_["metadata"]["namespace"] = namespace
        api.put("endpointslices", slice_)
    async with watching(Query("prefill", service="pre"), namespace="*") as told:
        await until(lambda: set(told.urls) == {"one.a", "two.a", "one.pre-1-10.0.0.2", "two.pre-1-10.0.1.2"})


async def test_an_endpoint_of_both_services(api: KubernetesApi, caplog: pytest.LogCaptureFixture) -> None:
    one = endpoint("10.0.0.1", "u1", name="a")
    for service in ("pre", "dec"):
        api.put("endpointslices", slice_of(service, f"{service}-1", one, ports={"http": 8000}))
    async with watching(Query("prefill", service="pre"), Query("decode", service="dec")) as told:
        await is_watched(api, "endpointslices")
        assert told.roles == {("a", "prefill")}
        assert "a is an instance for prefill already" in caplog.text
        api.put("endpointslices", slice_of("pre", "pre-1", ports={"http": 8000}))
        await until(lambda: told.roles == {("a", "decode")})


async def test_endpoints_that_stay_are_made_once(api: KubernetesApi) -> None:
    """A service of a thousand endpoints changes often, and one at a time."""
    ends = [endpoint(f"10.0.0.{number}", f"u{number}", name=f"a{number}") for number in range(20)]
    api.put("endpointslices", slice_of("pre", "pre-1", *ends, ports={"http": 8000}))
    num_made = 0

    def complete(one: InstanceSettings) -> InstanceSettings:
        nonlocal num_made
        num_made += 1
        return one

    async with watching(Query("prefill", service="pre"), complete=complete) as told:
        await until(lambda: len(told.urls) == 20)
        api.put("endpointslices", slice_of("pre", "pre-1", *ends[1:], ports={"http": 8000}))
        await until(lambda: len(told.urls) == 19)
        assert num_made == 20
        ends[5] = endpoint("10.0.1.5", "u5", name="a5")
        api.put("endpointslices", slice_of("pre", "pre-1", *ends, ports={"http": 8000}))
        await until(lambda: told.urls.get("a5") == "http://10.0.1.5:8000")
        assert num_made == 22


async def test_begun_anew_it_tells_nothing_before_it_knows(api: KubernetesApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that met a bug is run again, and the fleet does not shrink until all of it is listed."""
    monkeypatch.setattr("pdproxy.discovery.discovery.AFTER_BUG_S", 0.05)
    for number in range(3):
        api.put("pods", engine(f"p{number}", "prefill", f"10.0.0.{number}"))
        api.put("pods", engine(f"d{number}", "decode", f"10.0.1.{number}"))
    fails = False

    def complete(one: InstanceSettings) -> InstanceSettings:
        if fails and one.name == "bad":
            raise ZeroDivisionError
        return one

    source = KubernetesPods(BOTH, kubernetes_client, namespace=NAMESPACE, engine="builtin", complete=complete)
    discovery = Discovery([source])
    looking = asyncio.ensure_future(discovery.run())
    try:
        await until(lambda: len(discovery.found) == 6)
        fails = True
        api.put("pods", engine("bad", "prefill", "10.0.2.1"))
        sizes = set()
        for _ in range(100):
            sizes.add(len(discovery.found))
            await asyncio.sleep(0.005)
        assert sizes == {6}
        fails = False
        await until(lambda: len(discovery.found) == 7)
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


async def test_an_endpoint_that_moves_between_slices_stays(api: KubernetesApi) -> None:
    moving = endpoint("10.0.0.1", "u1", name="a")
    staying = endpoint("10.0.0.2", "u2", name="b")
    api.put("endpointslices", slice_of("pre", "pre-1", moving, ports={"http": 8000}))
    api.put("endpointslices", slice_of("pre", "pre-2", staying, ports={"http": 8000}))
    async with watching(Query("prefill", service="pre")) as told:
        await until(lambda: set(told.urls) == {"a", "b"})
        num = len(told.history)
        api.put("endpointslices", slice_of("pre", "pre-2", staying, moving, ports={"http": 8000}))
        api.put("endpointslices", slice_of("pre", "pre-1", ports={"http": 8000}))
        await until(lambda: len(told.history) >= num + 2)
        assert all(len(one) == 2 for one in told.history[num:])
        # One that ends in either of two slices ends.
        ending = endpoint("10.0.0.1", "u1", name="a", ready=False, terminating=True)
        api.put("endpointslices", slice_of("pre", "pre-1", ending, ports={"http": 8000}))
        await until(lambda: set(told.urls) == {"b"})


async def test_both_families_of_a_service_are_one_instance(api: KubernetesApi) -> None:
    api.put("endpointslices", slice_of("pre", "a6", endpoint("fd00::1", "u1", name="a"), ports={"x": 1}, family="IPv6"))
    api.put("endpointslices", slice_of("pre", "b4", endpoint("10.0.0.1", "u1", name="a"), ports={"x": 1}))
    async with watching(Query("prefill", service="pre")) as told:
        await until(lambda: told.urls == {"a": "http://10.0.0.1:1"})


async def test_pods_that_are_ready_in_a_service(api: KubernetesApi) -> None:
    api.put("pods", engine("a", "prefill", uid="u1"))
    api.put("pods", engine("b", "prefill", "10.0.0.2", uid="u2"))
    api.put("endpointslices", slice_of("pre", "pre-1", endpoint("10.0.0.1", "u1", name="a"), ports={"http": 1}))
    async with watching(Query("prefill", "role=prefill", "pre")) as told:
        await until(lambda: told.urls == {"a": "http://10.0.0.1:8000"})
        api.put("endpointslices", slice_of("pre", "pre-1", endpoint("10.0.0.2", "u2", name="b"), ports={"http": 1}))
        await until(lambda: set(told.urls) == {"b"})
        api.change("pods", "b", terminating)
        await until(lambda: not told.urls)


async def test_the_pods_of_an_inference_pool(api: KubernetesApi) -> None:
    def pool(app: str, *ports: int) -> dict[str, Any]:
        spec = {"selector": {"matchLabels": {"app": app}}, "targetPorts": [{"number": port} for port in ports]}
        return {"metadata": {"name": "it"}, "spec": spec}

    for number, app in enumerate(("one", "two")):
        api.put("pods", labelled(engine(app, "prefill", f"10.0.0.{number}"), {"app": app}))
    api.put("inferencepools", {**pool("two"), "metadata": {"name": "another"}})
    async with watching(pool="it") as told:
        await is_watched(api)
        assert not told.urls, "the pool is not there"
        api.put("inferencepools", pool("one", 8300))
        await until(lambda: told.urls == {"one": "http://10.0.0.0:8300"})
        api.put("inferencepools", pool("two"))
        await until(lambda: told.urls == {"two": "http://10.0.0.1:8000"})


# ── options ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_presets() -> None:
    none: dict[Any, None] = {"prefill": None, "decode": None}
    assert queries(none, none, ["llm-d"])[0].labels == "llm-d.ai/role=prefill"
    assert queries(none, none, ["aibrix", "lws"])[1].labels == (
        "role-name=decode,leaderworkerset.sigs.k8s.io/worker-index=0"
    )
    given: dict[Any, str | None] = {"prefill": "app=x", "decode": "app=x"}
    assert queries(given, none, ["llm-d"])[1] == Query("decode", "app=x,llm-d.ai/role=decode")
    with pytest.raises(ConfigError, match="prefill_selector: needed"):
        queries(none, none, ["lws"])


async def test_the_leaders_of_llm_d_alone(api: KubernetesApi) -> None:
    index = "leaderworkerset.sigs.k8s.io/worker-index"
    for name, number in (("a", "0"), ("a-1", "1")):
        labels = {"llm-d.ai/role": "prefill", index: number}
        api.put("pods", labelled(pod(name, f"10.0.1.{number}", ports={"http": 8000}), labels))
    none: dict[Any, None] = {"prefill": None, "decode": None}
    async with watching(*queries(none, none, ["llm-d", "lws"])) as told:
        await until(lambda: set(told.urls) == {"a"})


def test_options_that_mean_nothing_alone() -> None:
    settings = load(["--prefill", "http://p:1", "--decode", "http://d:1", "--prefill-selector", "a=b"])
    with pytest.raises(ConfigError, match="prefill_selector: means nothing without discover"):
        make_discovery(settings)


def test_a_fleet_that_is_found_needs_no_instances() -> None:
    settings = load(["--discover", "kubernetes", "--discover-preset", "llm-d,lws", "--discover-namespace", "x"])
    assert settings.fleet() == ()
    assert make_discovery(settings) is not None


# ── the fleet ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Fleet:
    """A pool that follows what is discovered. Instances are ready at once."""

    def __init__(self) -> None:
        admission = make_admission()
        self.pool = Pool(admission)

        def make(one: Any) -> Any:
            return make_ready(make_instance(one, admission=admission))

        self.membership = Membership(self.pool, make_instance=make, check=Settings(port=0).check_instances)
        self.roster = Roster("discovery", self.membership, self.pool)

    @property
    def present(self) -> set[tuple[str, str]]:
        return {(one.name, one.role) for one in self.pool.instances}


@asynccontextmanager
async def following(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    monkeypatch.setattr("pdproxy.discovery.discovery.AGAIN_S", 0.05)
    monkeypatch.setattr("pdproxy.fleet.membership.SWEEP_S", 0.02)
    fleet = Fleet()
    source = KubernetesPods(BOTH, kubernetes_client, namespace=NAMESPACE, engine="builtin")
    discovery = Discovery([source])
    runners = discovery.run(), discovery.lead(fleet.roster), fleet.membership.run()
    tasks = [asyncio.ensure_future(one) for one in runners]
    try:
        yield fleet
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_pod_that_ends_is_drained_and_finishes(api: KubernetesApi, monkeypatch: pytest.MonkeyPatch) -> None:
    api.put("pods", engine("d", "decode"))
    async with following(monkeypatch) as fleet:
        await until(lambda: fleet.present == {("d", "decode")})
        (instance,) = fleet.pool.instances
        with contextlib.ExitStack() as stack:
            held = Held(instance, 2)
            stack.callback(held.release)
            api.change("pods", "d", terminating)
            await until(lambda: not fleet.present)
            assert instance.is_draining
            assert fleet.pool.leaving == (instance,)
            api.remove("pods", "d")
            await asyncio.sleep(0.1)
            assert fleet.pool.leaving == (instance,)
        await until(lambda: not fleet.pool.leaving)


async def test_a_role_changes_when_nothing_of_the_old_is_left(
    api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.put("pods", engine("a", "decode"))
    async with following(monkeypatch) as fleet:
        await until(lambda: fleet.present == {("a", "decode")})
        (instance,) = fleet.pool.instances
        held = Held(instance, 2)
        api.put("pods", engine("a", "prefill"))
        await until(lambda: not fleet.present)
        await asyncio.sleep(0.1)
        assert not fleet.present
        held.release()
        await until(lambda: fleet.present == {("a", "prefill")})


async def test_a_new_incarnation_at_the_same_address(api: KubernetesApi, monkeypatch: pytest.MonkeyPatch) -> None:
    api.put("pods", engine("a", "decode", uid="one"))
    async with following(monkeypatch) as fleet:
        await until(lambda: fleet.present == {("a", "decode")})
        (before,) = fleet.pool.instances
        api.put("pods", engine("a", "decode", uid="two"))
        await until(lambda: fleet.pool.instances and fleet.pool.instances[0] is not before)
        assert before.is_draining


async def test_odd_pods_harm_nobody(api: KubernetesApi, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = [{"port": port} for port in ("99999", "0", "-1", "x y", "\u0661", "")]
    odd += [{"port": "9" * 5000}]
    odd += [{"engine": "lmcache", "receiver-ports": ports} for ports in ("", "a,b", "7300,7300", "0")]
    odd += [{"chunk-size": "0"}, {"chunk-size": "16"}, {"model": "m" * 5000}, {"model": "a\nb"}, {"kv-port": "5700"}]
    for number, said in enumerate(odd):
        annotations = {f"pdproxy.instance/{name}": text for name, text in said.items()}
        api.put("pods", engine(f"odd-{number}", "decode", f"10.1.0.{number}", annotations=annotations))
    for number, ip in enumerate(("10.0.0", "fe80::1%eth0", "a b", "[", "::ffff:10.0.0.9")):
        api.put("pods", engine(f"where-{number}", "prefill", ip))
    api.put("pods", {**engine("bare", "decode"), "spec": {}})
    api.put("pods", {"metadata": {"name": "barer", "labels": {"role": "decode"}}})
    async with following(monkeypatch) as fleet:
        api.put("pods", engine("good", "decode", "10.2.0.1"))
        await until(lambda: ("good", "decode") in fleet.present)
        assert fleet.present >= {("odd-12", "decode"), ("where-4", "prefill")}
        await asyncio.sleep(0.1)


async def test_the_fleet_is_what_the_cluster_says(api: KubernetesApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes in any order: the fleet is at last what the cluster has, and never has what it has just been told."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    expected: dict[str, str] = {}
    async with following(monkeypatch) as fleet:
        for _ in range(200):
            name = f"p{rng.randrange(6)}"
            role = rng.choice(("prefill", "decode"))
            ip = f"10.0.0.{name[1:]}"
            what = rng.choice(("run", "run", "end", "remove"))
            if what == "run":
                api.put("pods", engine(name, role, ip, uid=f"{name}-{rng.randrange(2)}"))
                expected[name] = role
            elif name in expected and what == "end":
                api.change("pods", name, terminating)
                del expected[name]
            elif name in expected:
                api.remove("pods", name)
                del expected[name]
            if rng.random() < 0.05:
                rng.choice((api.cut, api.forget, api.end_watches))()
            await asyncio.sleep(rng.choice((0, 0.002)))
        await until(lambda: fleet.present == set(expected.items()))
