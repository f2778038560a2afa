"""The module reads instances from pods and from the endpoints of services. It does no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from pydantic import ValidationError

from pdproxy.config.instances import InstanceSettings
from pdproxy.config.values import Engine, Role
from pdproxy.fleet.roster import Entry

ANNOTATION = "pdproxy.instance/"
"""The beginning of the annotations in which a pod says what differs from the options."""
ANNOTATED = (
    "engine",
    "bootstrap_port",
    "kv_port",
    "receiver_ports",
    "alloc_ports",
    "chunk_size",
    "max_rooms",
    "model",
    "revision",
)
"""The fields of an instance that a pod may say itself, each as ``pdproxy.instance/`` and its name with dashes. None of
them names a file, or a place to which requests would go instead."""
REVISION = f"{ANNOTATION}revision"
"""The revision may be a label as well, by which the pods of a deployment can be selected."""
SGLANG_BOOTSTRAP = "sglang.ai/bootstrap-port"
"""The annotation by which SGLang's own router learns of a prefiller's bootstrap port."""
MAX_PORT_CHARS = 8
MAX_TOLD = 100
"""The most characters of an annotation that are told in a message."""
USUAL_PORT = "http"
"""The name of the port that counts where several are declared and no option says which."""


class Meta(msgspec.Struct, rename="camel"):
    """Meta is what is read of an object's metadata."""

    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name


class ContainerPort(msgspec.Struct, rename="camel"):
    """ContainerPort is a port that a container declares."""

    container_port: int
    name: str = ""
    protocol: str = "TCP"


class Container(msgspec.Struct):
    """Container is what is read of one container."""

    ports: list[ContainerPort] | None = None


class PodSpec(msgspec.Struct, rename="camel"):
    """PodSpec is what is read of a pod's spec. Init containers that go on running declare ports, too."""

    containers: list[Container] | None = None
    init_containers: list[Container] | None = None


class Condition(msgspec.Struct):
    """Condition is one of a pod's conditions."""

    type: str
    status: str


class PodStatus(msgspec.Struct, rename="camel"):
    """PodStatus is what is read of a pod's status."""

    pod_ip: str | None = msgspec.field(name="podIP", default=None)
    phase: str = ""
    conditions: list[Condition] | None = None


class Pod(msgspec.Struct):
    """Pod is one pod."""

    metadata: Meta
    spec: PodSpec | None = None
    status: PodStatus | None = None

    @property
    def is_ready(self) -> bool:
        """Tells whether the pod may be sent requests: it is ready, has an address, and has not been told to end."""
        status = self.status
        if self.metadata.deletion_timestamp is not None or status is None or not status.pod_ip:
            return False
        return any(one.type == "Ready" and one.status == "True" for one in status.conditions or ())

    def port(self, wanted: str | None) -> int:
        """Returns the port of the engine. Raises `PodError` where the pod does not say which."""
        said = (self.metadata.annotations or {}).get(f"{ANNOTATION}port", wanted)
        if (number := _number(said)) is not None:
            return number
        spec = self.spec or PodSpec()
        containers = (*(spec.containers or ()), *(spec.init_containers or ()))
        ports = [port for one in containers for port in one.ports or () if port.protocol == "TCP"]
        named: list[int] = [port.container_port for port in ports if port.name == (said or USUAL_PORT)]
        if not named and said is None and len(ports) == 1:
            named = [ports[0].container_port]
        if not named:
            declared = ", ".join(f"{port.name} {port.container_port}".strip() for port in ports) or "none"
            unlike = "" if said is None else f"none is {said[:MAX_TOLD]!r}, and "
            raise PodError(
                f"its ports are {declared}, and {unlike}it is not said "
                f"which one is the engine's; give discover_port, or the annotation {ANNOTATION}port"
            )
        return named[0]


class Conditions(msgspec.Struct):
    """Conditions say how an endpoint is. What is not said is as the API has it by default."""

    ready: bool | None = None
    terminating: bool | None = None


class Reference(msgspec.Struct):
    """Reference names the object behind an endpoint."""

    name: str = ""
    uid: str = ""
    kind: str = ""


class Endpoint(msgspec.Struct, rename="camel"):
    """Endpoint is one endpoint of a slice."""

    addresses: list[str]
    conditions: Conditions | None = None
    target_ref: Reference | None = None

    @property
    def is_ready(self) -> bool:
        conditions = self.conditions or Conditions()
        return conditions.ready is not False and not self.is_ending and bool(self.addresses)

    @property
    def is_ending(self) -> bool:
        return self.conditions is not None and self.conditions.terminating is True

    @property
    def identity(self) -> str:
        """Returns the uid of the pod behind the endpoint, or the address where there is none."""
        return (self.target_ref and self.target_ref.uid) or self.addresses[0]


class SlicePort(msgspec.Struct):
    """SlicePort is one port of a slice."""

    name: str | None = None
    port: int | None = None
    protocol: str | None = None


class Slice(msgspec.Struct, rename="camel"):
    """Slice is one EndpointSlice of a service."""

    metadata: Meta
    address_type: str = "IPv4"
    endpoints: list[Endpoint] | None = None
    ports: list[SlicePort] | None = None

    def port(self, wanted: str | None) -> int:
        """Returns the port of the engines. Raises `PodError` where the slice does not say which."""
        if (number := _number(wanted)) is not None:
            return number
        ports = [one for one in self.ports or () if one.port and one.protocol in (None, "TCP")]
        named = [one.port for one in ports if one.name == (wanted or USUAL_PORT)]
        if not named and wanted is None and len(ports) == 1:
            named = [ports[0].port]
        if not named or named[0] is None:
            declared = ", ".join(f"{one.name or ''} {one.port}".strip() for one in ports) or "none"
            raise PodError(f"the service's ports are {declared}; say in discover_port which one is the engines'")
        return named[0]


class PoolSelector(msgspec.Struct, rename="camel"):
    """PoolSelector has the labels of an InferencePool's pods."""

    match_labels: dict[str, str] | None = None


class PoolPort(msgspec.Struct):
    """PoolPort is a port at which each pod of an InferencePool serves."""

    number: int


class PoolSpec(msgspec.Struct, rename="camel"):
    """PoolSpec is what is read of an InferencePool's spec."""

    selector: PoolSelector
    target_ports: list[PoolPort] | None = None


class InferencePool(msgspec.Struct):
    """InferencePool says which pods belong together, and at which port they serve."""

    metadata: Meta
    spec: PoolSpec

    def has(self, pod: Pod) -> bool:
        """Tells whether the pod has the pool's labels. A pool without labels has none."""
        wanted, labels = self.spec.selector.match_labels or {}, pod.metadata.labels or {}
        return bool(wanted) and all(labels.get(name) == value for name, value in wanted.items())

    @property
    def port(self) -> str | None:
        """Returns the first of the pool's ports; the others are further endpoints of the same pods."""
        return str(self.spec.target_ports[0].number) if self.spec.target_ports else None


class PodError(Exception):
    """A pod cannot be an instance. The message says why."""


def ready_endpoints(slices: Iterable[Slice]) -> dict[str, tuple[Endpoint, Slice]]:
    """Returns the endpoints that may be sent requests, by identity. While an endpoint moves it may be in two slices:
    then one that calls it ready is enough, and one that calls it ending, too."""
    both = [(one, each) for each in slices for one in each.endpoints or () if one.addresses]
    ending = {one.identity for one, _ in both if one.is_ending}
    # Of a service with both families, a pod has an endpoint in a slice of each. The first one counts.
    both.sort(key=lambda pair: (pair[1].address_type != "IPv4", pair[1].metadata.name))
    found: dict[str, tuple[Endpoint, Slice]] = {}
    for one, each in both:
        if one.is_ready and one.identity not in ending:
            found.setdefault(one.identity, (one, each))
    return found


def of_pod(pod: Pod, role: Role, engine: Engine, *, port: str | None, with_namespace: bool) -> Entry:
    """Returns the instance that a ready pod is. `port` is what the options say of it. Raises `PodError`."""
    meta, status = pod.metadata, pod.status
    assert status is not None
    annotations = meta.annotations or {}
    if REVISION not in annotations and (revision := (meta.labels or {}).get(REVISION)):
        annotations = annotations | {REVISION: revision}
    return _entry(
        name=f"{meta.namespace}.{meta.name}" if with_namespace else meta.name,
        uid=meta.uid,
        role=role,
        url=_url(status.pod_ip or "", pod.port(port)),
        fields={"engine": engine, **_annotated(annotations, role, engine)},
    )


def of_endpoint(
    endpoint: Endpoint, slice_: Slice, role: Role, engine: Engine, *, port: str | None, with_namespace: bool
) -> Entry:
    """Returns the instance that a ready endpoint is. Raises `PodError`."""
    target, meta = endpoint.target_ref or Reference(), slice_.metadata
    name = target.name or f"{meta.name}-{endpoint.addresses[0]}"
    return _entry(
        name=f"{meta.namespace}.{name}" if with_namespace else name,
        uid=target.uid,
        role=role,
        url=_url(endpoint.addresses[0], slice_.port(port)),
        fields={"engine": engine},
    )


def _annotated(annotations: Mapping[str, str], role: Role, engine: Engine) -> dict[str, Any]:
    said: dict[str, Any] = {}
    if engine == "sglang" and role == "prefill" and SGLANG_BOOTSTRAP in annotations:
        said["bootstrap_port"] = annotations[SGLANG_BOOTSTRAP]
    for field in ANNOTATED:
        text = annotations.get(f"{ANNOTATION}{field.replace('_', '-')}")
        if text is not None:
            said[field] = text.split(",") if field.endswith("_ports") else text
    return said


def _number(said: str | None) -> int | None:
    """Returns the port that is said as a number. Whoever labels pods may write what no `int` reads."""
    return int(said) if said is not None and said.isdecimal() and len(said) <= MAX_PORT_CHARS else None


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _entry(*, name: str, uid: str, role: Role, url: str, fields: Mapping[str, Any]) -> Entry:
    try:
        settings = InstanceSettings(name=name, role=role, url=url, **fields)
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise PodError(told) from None
    return Entry(settings, incarnation=uid)
