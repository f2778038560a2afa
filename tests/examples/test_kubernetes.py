"""The manifests and the chart: valid by Kubernetes' schemas, true to the proxy's options, and alike."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdproxy.config.settings import Settings, load
from pdproxy.serve import ABORT_S
from tests.fakes.proxy_harness import proxy_in_front_of
from tests.helpers import manifests, programs
from tests.helpers.manifests import Object, check_schema, of_kind, pod_of, proxy_of

ALL_ON = ("podMonitor.enabled=true", "keda.enabled=true")
DISCOVERED = (*ALL_ON, "discovery.enabled=true")
RENDERED: dict[str, Callable[[], tuple[Object, ...]]] = {
    "overlay minimal": lambda: manifests.overlay("minimal"),
    "overlay full": lambda: manifests.overlay("full"),
    "overlay discovered": lambda: manifests.overlay("discovered"),
    "chart": manifests.chart,
    "chart, all on": lambda: manifests.chart(*ALL_ON),
    "chart, discovered": lambda: manifests.chart(*DISCOVERED),
}
NEEDS_DISCOVERY = {"overlay discovered", "chart, discovered"}


@pytest.fixture(params=RENDERED)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def objects(name: str) -> tuple[Object, ...]:
    return RENDERED[name]()


def settings_of(objects: tuple[Object, ...], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """What the proxy's command line, environment and file come to, by the proxy's own reader."""
    [container] = pod_of(proxy_of(objects))["spec"]["containers"]
    [config] = of_kind(objects, "ConfigMap")
    (folder / "fleet.toml").write_text(config["data"]["fleet.toml"])
    for one in container["env"]:
        value = "10.0.0.7" if "fieldRef" in one["valueFrom"] else "ab" * 32
        monkeypatch.setenv(one["name"], value)
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert {one["name"] for one in pod_of(proxy_of(objects))["spec"]["volumes"]} == mounts.keys()
    words = [word.replace(mounts["fleet"], str(folder)) for word in container["args"]]
    assert words[0] == "serve"
    return load(words[1:])


# ── by the schemas ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_object_is_one(objects: tuple[Object, ...]) -> None:
    for one in objects:
        check_schema(one)
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(names) == len(set(names)) > 6


@pytest.mark.parametrize(
    ("kind", "place", "wrong"),
    [
        ("Deployment", ("spec", "template", "spec"), {"terminationGracePeriod": 5}),
        ("PodDisruptionBudget", ("spec",), {"minAvailble": 1}),
        ("PodMonitor", ("spec",), {"podMetricsEndpoint": []}),
        ("ScaledObject", ("spec",), {"minReplicas": 1}),
        ("ScaledObject", ("spec",), {"maxReplicaCount": "many"}),
    ],
)
def test_the_schemas_find_a_mistake(kind: str, place: tuple[str, ...], wrong: dict[str, Any]) -> None:
    one = inner = copy.deepcopy(of_kind(manifests.overlay("full"), kind)[0])
    check_schema(one)
    for key in place:
        inner = inner[key]
    inner.update(wrong)
    with pytest.raises(Exception, match=next(iter(wrong))):
        check_schema(one)


def test_helm_finds_nothing_to_say() -> None:
    programs.output_of(programs.helm(), "lint", "--strict", manifests.CHART)


def test_the_chart_wants_a_store_for_several_replicas() -> None:
    with pytest.raises(AssertionError, match="coordinator: needed"):
        manifests.chart("redis.enabled=false")
    [alone] = of_kind(manifests.chart("redis.enabled=false", "replicas=1"), "Deployment")
    assert not [one for one in pod_of(alone)["spec"]["containers"][0]["args"] if "coordinator" in one]


# ── by the proxy ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_proxy_takes_its_options(
    name: str, objects: tuple[Object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in NEEDS_DISCOVERY and "discover" not in Settings.model_fields:
        pytest.skip("this proxy has no --discover")
    settings = settings_of(objects, tmp_path, monkeypatch)
    container = pod_of(proxy_of(objects))["spec"]["containers"][0]
    for one in container["env"]:
        assert one["name"].removeprefix("PDPROXY_").lower() in Settings.model_fields, one["name"]
    if name not in NEEDS_DISCOVERY:
        assert {one.role for one in settings.fleet()} == {"prefill", "decode"}
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports == {"http": settings.port, "replica": settings.replica_port}
    stores = [
        f"redis://{one['metadata']['name']}:{one['spec']['ports'][0]['port']}" for one in of_kind(objects, "Service")
    ]
    assert settings.coordinator in stores


def test_who_leaves_has_the_time(
    name: str, objects: tuple[Object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod is not killed while its requests may still run, nor left by its balancer too late."""
    if name in NEEDS_DISCOVERY and "discover" not in Settings.model_fields:
        pytest.skip("this proxy has no --discover")
    settings = settings_of(objects, tmp_path, monkeypatch)
    spec = pod_of(proxy_of(objects))["spec"]
    assert spec["terminationGracePeriodSeconds"] > settings.drain_grace_s + settings.drain_timeout_s + ABORT_S
    probe = spec["containers"][0]["readinessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] + probe["timeoutSeconds"] < settings.drain_grace_s


def test_the_chart_has_time_for_any_drain() -> None:
    for grace_s, timeout_s in (("0", "1"), ("2.5", "900.5")):
        made = manifests.chart(f"drain.graceS={grace_s}", f"drain.timeoutS={timeout_s}")
        least = math.ceil(float(grace_s) + float(timeout_s) + ABORT_S)
        assert pod_of(proxy_of(made))["spec"]["terminationGracePeriodSeconds"] > least


async def test_probes_ask_what_the_proxy_answers() -> None:
    container = pod_of(proxy_of(manifests.overlay("minimal")))["spec"]["containers"][0]
    async with proxy_in_front_of() as house:
        for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
            assert (await house.get(container[probe]["httpGet"]["path"])).status == 200
        house.proxy.orchestrator.leave()
        assert (await house.get(container["readinessProbe"]["httpGet"]["path"])).status == 503
        assert (await house.get(container["livenessProbe"]["httpGet"]["path"])).status == 200


# ── by what a cluster makes of them ─────────────────────────────────────────────────────────────────────────────────


def test_no_service_becomes_an_option(objects: tuple[Object, ...]) -> None:
    """Kubernetes would set PDPROXY_PORT for a service named pdproxy."""
    assert pod_of(proxy_of(objects))["spec"]["enableServiceLinks"] is False


def test_selectors_choose_whom_they_mean(objects: tuple[Object, ...]) -> None:
    pods = {one["metadata"]["name"]: pod_of(one)["metadata"]["labels"] for one in of_kind(objects, "Deployment")}

    def chosen(selector: dict[str, str]) -> list[str]:
        return [name for name, labels in pods.items() if selector.items() <= labels.items()]

    for one in of_kind(objects, "Service"):
        assert chosen(one["spec"]["selector"]) == [one["metadata"]["name"]]
    for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
        for one in of_kind(objects, kind):
            assert chosen(one["spec"]["selector"]["matchLabels"]) == [one["metadata"]["name"]]
    for one in of_kind(objects, "Deployment"):
        for spread in pod_of(one)["spec"].get("topologySpreadConstraints", []):
            assert chosen(spread["labelSelector"]["matchLabels"]) == [one["metadata"]["name"]]


def test_names_lead_somewhere(objects: tuple[Object, ...]) -> None:
    ports = {
        port["name"] for one in of_kind(objects, "Deployment") for port in pod_of(one)["spec"]["containers"][0]["ports"]
    }
    for one in of_kind(objects, "Service"):
        assert {port["targetPort"] for port in one["spec"]["ports"]} <= ports
    for one in of_kind(objects, "PodMonitor"):
        assert {port["port"] for port in one["spec"]["podMetricsEndpoints"]} <= ports
    spec = pod_of(proxy_of(objects))["spec"]
    [account] = of_kind(objects, "ServiceAccount")
    [config] = of_kind(objects, "ConfigMap")
    assert spec["serviceAccountName"] == account["metadata"]["name"]
    assert config["metadata"]["name"] in [one["configMap"]["name"] for one in spec["volumes"] if "configMap" in one]


def test_pods_are_restricted(objects: tuple[Object, ...]) -> None:
    """As Kubernetes' Pod Security Standard `restricted` has it, and with a root file system that is read-only."""
    for one in of_kind(objects, "Deployment"):
        spec = pod_of(one)["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert all({"configMap", "emptyDir", "secret"} & volume.keys() for volume in spec.get("volumes", []))
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}


def test_rights_are_those_of_discovery_and_no_more(name: str, objects: tuple[Object, ...]) -> None:
    mounts_token = pod_of(proxy_of(objects))["spec"]["automountServiceAccountToken"]
    assert mounts_token is (name in NEEDS_DISCOVERY)
    roles = of_kind(objects, "Role")
    assert len(roles) == (name in NEEDS_DISCOVERY)
    for role in roles:
        rights = {(*rule["apiGroups"], *rule["resources"]): set(rule["verbs"]) for rule in role["rules"]}
        verbs = {"get", "list", "watch"}
        assert rights == {("", "pods"): verbs, ("discovery.k8s.io", "endpointslices"): verbs}
        [binding] = of_kind(objects, "RoleBinding")
        [account] = of_kind(objects, "ServiceAccount")
        [subject] = binding["subjects"]
        assert (subject["name"], subject["namespace"]) == (account["metadata"]["name"], "llm")
        assert binding["roleRef"]["name"] == role["metadata"]["name"]


# ── alike ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("overlay", "settings"), [("full", ALL_ON), ("discovered", DISCOVERED)])
def test_the_chart_makes_what_the_overlays_make(overlay: str, settings: tuple[str, ...]) -> None:
    """Labels, the file of instances and what says nothing apart, each object is the same."""
    ours, theirs = (
        {(one["kind"], one["metadata"]["name"]): _bare(one) for one in objects}
        for objects in (manifests.overlay(overlay), manifests.chart(*settings))
    )
    assert ours.keys() == theirs.keys()
    for key in ours.keys() - {("ConfigMap", "pdproxy-fleet")}:
        assert ours[key] == theirs[key], key


def _bare(value: Any) -> Any:
    """Less labels, which name the release, and defaults that one of them writes out."""
    if isinstance(value, dict):
        left_out = {"labels", "matchLabels", "namespace", "imagePullPolicy", "annotations"}
        if value.keys() & {"app.kubernetes.io/name", "app.kubernetes.io/component"}:
            return {}
        return {name: _bare(inner) for name, inner in value.items() if name not in left_out and name != "type"} | (
            {"type": value["type"]} if value.get("type") not in (None, "ClusterIP") else {}
        )
    if isinstance(value, list):
        return [_bare(inner) for inner in value]
    return " ".join(value.split()) if isinstance(value, str) else value
