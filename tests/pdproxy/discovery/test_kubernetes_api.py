"""The stand-in of the API server, judged by others: the API's schemas, the official client and kubectl."""

from __future__ import annotations

import asyncio
import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.kubernetes_api import (
    NAMESPACE,
    KubernetesApi,
    Object,
    endpoint,
    labelled,
    pod,
    slice_of,
    terminating,
)

RELEASE = "1.31"


def objects(api: KubernetesApi) -> list[tuple[str, Object]]:
    """One of each kind that the tests use, as the stand-in keeps it."""
    api.put("pods", pod("plain"))
    api.put("pods", pod("full", ports={"http": 8000}, annotations={"a/b": "c"}, is_ready=False, role="prefill"))
    api.put("pods", labelled(pod("labelled"), {"llm-d.ai/role": "prefill"}))
    api.put("pods", pod("ending", uid="u"))
    api.change("pods", "ending", terminating)
    ends = [endpoint("10.0.0.1", "u", name="plain"), endpoint("10.0.0.2", ready=False, terminating=True)]
    api.put("endpointslices", slice_of("decode", "decode-abc", *ends, ports={"http": 8000}))
    spec = {"holderIdentity": "somebody", "leaseDurationSeconds": 15, "renewTime": "2026-01-01T00:00:00.000000Z"}
    api.put("leases", {"metadata": {"name": "lead"}, "spec": spec})
    found = [("pods", api.get("pods", name)) for name in ("plain", "full", "labelled", "ending")]
    return [*found, ("endpointslices", api.get("endpointslices", "decode-abc")), ("leases", api.get("leases", "lead"))]


def test_objects_are_valid() -> None:
    validate: Any = pytest.importorskip("kubernetes_validate").validate
    for _, one in objects(KubernetesApi()):
        validate(one, RELEASE, strict=True)


@pytest.mark.filterwarnings("default")
async def test_the_official_client_reads_it(api: KubernetesApi) -> None:
    client: Any = pytest.importorskip("kubernetes.client")
    watch: Any = pytest.importorskip("kubernetes.watch")
    objects(api)

    def read() -> tuple[list[str], list[tuple[str, str]], list[str]]:
        with client.ApiClient(client.Configuration(host=api.url)) as connection:
            core = client.CoreV1Api(connection)
            first = core.list_namespaced_pod(NAMESPACE, limit=2)
            rest = core.list_namespaced_pod(NAMESPACE, limit=2, _continue=first.metadata._continue)
            names = [one.metadata.name for one in (*first.items, *rest.items)]
            events = [
                (event["type"], event["object"].metadata.name)
                for event in watch.Watch().stream(
                    core.list_namespaced_pod,
                    NAMESPACE,
                    label_selector="role=prefill",
                    resource_version="1000",
                    timeout_seconds=1,
                )
            ]
            slices = client.DiscoveryV1Api(connection).list_namespaced_endpoint_slice(
                NAMESPACE, label_selector="kubernetes.io/service-name=decode"
            )
            return names, events, [one.endpoints[0].target_ref.name for one in slices.items]

    names, events, targets = await asyncio.to_thread(read)
    assert names == ["plain", "full", "labelled", "ending"]
    assert events == [("ADDED", "full")]
    assert targets == ["plain"]


@pytest.mark.filterwarnings("default")
async def test_the_official_client_writes_leases_and_is_told_of_conflicts(api: KubernetesApi) -> None:
    client: Any = pytest.importorskip("kubernetes.client")

    def write() -> list[tuple[int, str]]:
        refused: list[tuple[int, str]] = []

        def refuses(call: Any, *arguments: Any) -> None:
            with pytest.raises(client.ApiException) as raised:
                call(*arguments)
            refused.append((raised.value.status, json.loads(raised.value.body)["reason"]))

        with client.ApiClient(client.Configuration(host=api.url)) as connection:
            leases = client.CoordinationV1Api(connection)
            body = client.V1Lease(
                metadata=client.V1ObjectMeta(name="it"),
                spec=client.V1LeaseSpec(
                    holder_identity="a", renew_time=datetime(2026, 1, 1, microsecond=1, tzinfo=UTC)
                ),
            )
            made = leases.create_namespaced_lease(NAMESPACE, body)
            refuses(leases.create_namespaced_lease, NAMESPACE, body)
            refuses(leases.replace_namespaced_lease, "it", NAMESPACE, body)  # it has no version
            made.spec.holder_identity = "b"
            changed = leases.replace_namespaced_lease("it", NAMESPACE, made)
            assert changed.spec.holder_identity == "b"
            assert changed.metadata.resource_version != made.metadata.resource_version
            again = leases.replace_namespaced_lease("it", NAMESPACE, changed)
            assert again.metadata.resource_version == changed.metadata.resource_version, "nothing has changed"
            refuses(leases.replace_namespaced_lease, "it", NAMESPACE, made)
            api.remove("leases", "it")
            refuses(leases.replace_namespaced_lease, "it", NAMESPACE, changed)
            refuses(leases.read_namespaced_lease, "it", NAMESPACE)
            changed.spec.lease_duration_seconds, changed.metadata.uid = 0, None
            refuses(leases.replace_namespaced_lease, "it", NAMESPACE, changed)
        return refused

    assert await asyncio.to_thread(write) == [
        (409, "AlreadyExists"),
        (422, "Invalid"),
        (409, "Conflict"),
        (409, "Conflict"),
        (404, "NotFound"),
        (422, "Invalid"),
    ]


async def test_kubectl_reads_and_writes_it(api: KubernetesApi, config: Path, tmp_path: Path) -> None:
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("NOT TESTED with kubectl: install it (Debian: the package kubernetes-client)")
    objects(api)  # without a token, which kubectl sends over TLS alone

    async def kubectl(*arguments: str, says: str | None = None) -> str:
        command = [program, "--kubeconfig", str(config), "--cache-dir", str(tmp_path / "cache"), *arguments]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
        out, error = await asyncio.wait_for(process.communicate((says or "").encode()), 60)
        assert process.returncode == 0, error
        return out.decode()

    got = json.loads(await kubectl("get", "pods", "-l", "role=prefill", "-o", "json"))
    assert [one["metadata"]["name"] for one in got["items"]] == ["full"]
    assert "decode-abc" in await kubectl("get", "endpointslices", "-o", "name")
    lease = await kubectl("get", "lease", "lead", "-o", "json")
    said = lease.replace("somebody", "another")
    assert "lease.coordination.k8s.io/lead replaced" in await kubectl(
        "replace", "--validate=false", "-f", "-", says=said
    )
    assert api.get("leases", "lead")["spec"]["holderIdentity"] == "another"
    with pytest.raises(AssertionError, match="the object has been modified"):
        await kubectl("replace", "--validate=false", "-f", "-", says=said.replace("another", "a third"))
