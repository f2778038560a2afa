"""The manifests and the chart: valid by Kubernetes' schemas, true to the proxy's options, and alike."""

from __future__ import annotations

import copy
import json
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdproxy.config.settings import Settings, load
from pdproxy.serve import ABORT_S
from tests.fakes.proxy_harness import proxy_in_front_of
from tests.helpers import manifests, programs
from tests.helpers.manifests import Object, check_schema, of_kind, pod_of, proxy_of
from tests.helpers.watched_metrics import RULES

ALL_ON = ("podMonitor.enabled=true", "keda.enabled=true")
DISCOVERED = (*ALL_ON, "discovery.enabled=true")
LEASE = ("coordinator=kubernetes",)
RENDERED: dict[str, Callable[[], tuple[Object, ...]]] = {
    "overlay minimal": lambda: manifests.overlay("minimal"),
    "overlay full": lambda: manifests.overlay("full"),
    "overlay discovered": lambda: manifests.overlay("discovered"),
    "overlay own": lambda: manifests.overlay("own"),
    "overlay lease": lambda: manifests.overlay("lease"),
    "chart": manifests.chart,
    "chart, all on": lambda: manifests.chart(*ALL_ON),
    "chart, discovered": lambda: manifests.chart(*DISCOVERED),
    "chart, lease": lambda: manifests.chart(*LEASE),
    "chart, discovered, lease": lambda: manifests.chart(*DISCOVERED, *LEASE),
}
NEEDS_DISCOVERY = {"overlay discovered", "chart, discovered", "chart, discovered, lease"}
NEEDS_LEASES = {"overlay lease", "chart, lease", "chart, discovered, lease"}


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


def test_what_is_found_is_not_in_the_file_as_well() -> None:
    """A pod does not join while an instance that is given has its name, and pods of StatefulSets are named alike."""
    files = [
        tomllib.loads(one["data"]["fleet.toml"])
        for objects in (manifests.overlay("discovered"), manifests.chart("discovery.enabled=true"))
        for one in of_kind(objects, "ConfigMap")
    ]
    assert files == [{"engine": "vllm_nixl"}] * 2


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
    assert settings.coordinator in (["kubernetes:///pdproxy"] if name in NEEDS_LEASES else stores)


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


def test_rights_are_those_that_are_needed_and_no_more(name: str, objects: tuple[Object, ...]) -> None:
    mounts_token = pod_of(proxy_of(objects))["spec"]["automountServiceAccountToken"]
    assert mounts_token is (name in NEEDS_DISCOVERY | NEEDS_LEASES)
    rights = {
        (*rule["apiGroups"], *rule["resources"], *rule.get("resourceNames", [])): set(rule["verbs"])
        for role in of_kind(objects, "Role")
        for rule in role["rules"]
    }
    expected = {}
    if name in NEEDS_DISCOVERY:
        verbs = {"get", "list", "watch"}
        expected |= {("", "pods"): verbs, ("discovery.k8s.io", "endpointslices"): verbs}
    if name in NEEDS_LEASES:
        leases = ("coordination.k8s.io", "leases")
        expected |= {(*leases, "pdproxy-leader-default", "pdproxy-members-default"): {"get", "update"}}
        expected |= {leases: {"create"}}
    assert rights == expected
    bindings = of_kind(objects, "RoleBinding")
    assert sorted(one["roleRef"]["name"] for one in bindings) == sorted(
        one["metadata"]["name"] for one in of_kind(objects, "Role")
    )
    [account] = of_kind(objects, "ServiceAccount")
    for binding in bindings:
        [subject] = binding["subjects"]
        assert (subject["name"], subject["namespace"]) == (account["metadata"]["name"], "llm")


def test_no_pod_starts_without_the_keys_of_clients(objects: tuple[Object, ...]) -> None:
    """A Secret or a key of it that is misspelt would let everybody in."""
    assert _optional(objects) == {"PDPROXY_ADMIN_KEY", "PDPROXY_ENGINE_API_KEY", "PDPROXY_ATTEMPT_KEY"}


def test_a_chart_for_everybody() -> None:
    assert "PDPROXY_API_KEYS" in _optional(manifests.chart("auth.required=false"))


def _optional(objects: tuple[Object, ...]) -> set[str]:
    """The variables that may be missing."""
    [container] = pod_of(proxy_of(objects))["spec"]["containers"]
    secrets = {one["name"]: one["valueFrom"].get("secretKeyRef", {}) for one in container["env"]}
    return {name for name, secret in secrets.items() if secret.get("optional")}


def test_a_chart_with_a_fleet_of_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Leases have that name, and it may use no others."""
    objects = manifests.chart(*LEASE, "fleetName=blue")
    settings = settings_of(objects, tmp_path, monkeypatch)
    assert settings.fleet_name == "blue"
    [role] = of_kind(objects, "Role")
    named = [f"pdproxy-{what}-{settings.fleet_name}" for what in ("leader", "members")]
    assert role["rules"][0]["resourceNames"] == named


@pytest.mark.parametrize("namespace", ["engines", "*"])
def test_a_chart_that_finds_engines_elsewhere(namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = manifests.chart("discovery.enabled=true", f"discovery.namespace={namespace}")
    for one in objects:
        check_schema(one)
    assert settings_of(objects, tmp_path, monkeypatch).discover_namespace == namespace
    kind = "ClusterRole" if namespace == "*" else "Role"
    [role] = of_kind(objects, kind)
    [binding] = of_kind(objects, f"{kind}Binding")
    assert role["metadata"] == binding["metadata"]
    assert role["metadata"].get("namespace") == (None if namespace == "*" else namespace)
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": kind,
        "name": role["metadata"]["name"],
    }
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "pdproxy", "namespace": "llm"}]


def test_a_chart_with_more_volumes_and_secrets() -> None:
    objects = manifests.chart(
        "imagePullSecrets[0].name=registry",
        "extraVolumes[0].name=ca",
        "extraVolumes[0].configMap.name=ca",
        "extraVolumeMounts[0].name=ca",
        "extraVolumeMounts[0].mountPath=/etc/ca",
    )
    check_schema(proxy_of(objects))
    spec = pod_of(proxy_of(objects))["spec"]
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["volumes"][-1] == {"name": "ca", "configMap": {"name": "ca"}}
    assert spec["containers"][0]["volumeMounts"][-1] == {"name": "ca", "mountPath": "/etc/ca"}


def test_releases_in_one_namespace_do_not_share_leases() -> None:
    """Each chart's Leases, and its rights to them, have the name of the release."""
    objects = manifests.chart(*LEASE, release="other")
    [deployment] = of_kind(objects, "Deployment")
    assert "--coordinator=kubernetes:///other" in pod_of(deployment)["spec"]["containers"][0]["args"]
    [role] = of_kind(objects, "Role")
    assert role["rules"][0]["resourceNames"] == ["other-leader-default", "other-members-default"]


# ── alike ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("overlay", "settings"), [("full", ALL_ON), ("discovered", DISCOVERED), ("lease", LEASE)])
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


# ── what stands beside the proxy ────────────────────────────────────────────────────────────────────────────────────


def engines() -> tuple[Object, ...]:
    return manifests.built(manifests.KUBERNETES / "engines")


def test_engines_are_objects() -> None:
    for one in engines():
        check_schema(one)


def test_engines_are_where_the_fleets_file_has_them() -> None:
    [config] = of_kind(manifests.overlay("minimal"), "ConfigMap")
    ports = {one["metadata"]["name"]: one["spec"]["ports"][0]["port"] for one in of_kind(engines(), "Service")}
    made = {
        f"http://{name}-{number}.{one['spec']['serviceName']}:{ports[one['spec']['serviceName']]}": name
        for one in of_kind(engines(), "StatefulSet")
        for name in [one["metadata"]["name"]]
        for number in range(one["spec"]["replicas"])
    }
    assert made == {one["url"]: one["role"] for one in tomllib.loads(config["data"]["fleet.toml"])["instances"]}
    for one in of_kind(engines(), "Service"):
        assert one["spec"]["clusterIP"] == "None"


def test_engines_are_those_that_discovery_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(manifests.overlay("discovered"), tmp_path, monkeypatch)
    for one in of_kind(engines(), "StatefulSet"):
        labels = pod_of(one)["metadata"]["labels"]
        assert one["spec"]["selector"]["matchLabels"] == labels
        [(key, value)] = labels.items()
        assert getattr(settings, f"{value}_selector") == f"{key}={value}"


def test_engines_reach_each_other() -> None:
    """NIXL's side channel is told to the other side: it must be an address of the pod, and not of its own loopback."""
    roles = {"prefill": "kv_producer", "decode": "kv_consumer"}
    for one in of_kind(engines(), "StatefulSet"):
        [container] = pod_of(one)["spec"]["containers"]
        env = {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        assert int(env["VLLM_NIXL_SIDE_CHANNEL_PORT"]) == ports["side-channel"]
        given = dict(word.removeprefix("--").split("=", 1) for word in container["args"])
        assert int(given["port"]) == ports["http"]
        config = json.loads(given["kv-transfer-config"])
        assert (config["kv_connector"], config["kv_role"]) == ("NixlConnector", roles.pop(one["metadata"]["name"]))
        assert pod_of(one)["spec"]["terminationGracePeriodSeconds"] > int(
            container["lifecycle"]["preStop"]["exec"]["command"][1]
        )
    assert not roles


def test_rules_for_the_operator_are_those_of_prometheus(tmp_path: Path) -> None:
    [rule] = of_kind(manifests.component("alerts", tmp_path), "PrometheusRule")
    check_schema(rule)
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    assert sorted(rule["spec"]["groups"], key=_name) == sorted(groups, key=_name)


def _name(group: dict[str, Any]) -> str:
    return str(group["name"])


def test_the_outside_reaches_the_api_alone(tmp_path: Path) -> None:
    [ingress] = of_kind(manifests.component("ingress", tmp_path), "Ingress")
    check_schema(ingress)
    [rule] = ingress["spec"]["rules"]
    [path] = rule["http"]["paths"]
    assert (path["path"], path["pathType"]) == ("/v1/", "Prefix")
    backend = path["backend"]["service"]
    [service] = [
        one for one in of_kind(manifests.overlay("minimal"), "Service") if one["metadata"]["name"] == backend["name"]
    ]
    assert backend["port"]["name"] in [port["name"] for port in service["spec"]["ports"]]
