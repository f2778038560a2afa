"""Pods of a Kubernetes cluster as instances: those that selectors or services name for each role.

What must hold: a pod that is said to end, or not to be ready, gets nothing new from the same event on; a pod that is
ready is in the fleet; another uid under a known name is another instance, and another role, too. A violation would be
seen as requests that failed at a pod that was terminating, or as a pod that is ready and gets none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import anyio

from pdproxy.config.instances import InstanceSettings
from pdproxy.config.values import Engine, Role
from pdproxy.discovery.api_server import Connect
from pdproxy.discovery.cluster import Reflector
from pdproxy.discovery.discovery import Tell
from pdproxy.discovery.pods import (
    Endpoint,
    InferencePool,
    Meta,
    Pod,
    PodError,
    Reference,
    Slice,
    of_endpoint,
    of_pod,
    ready_endpoints,
)
from pdproxy.discovery.selectors import is_selector
from pdproxy.errors import ConfigError
from pdproxy.fleet.roster import Entry

log = logging.getLogger(__name__)

EVERYWHERE = "*"
SERVICE_LABEL = "kubernetes.io/service-name"
PRESETS: Mapping[str, Mapping[Role, str]] = {
    "llm-d": {"prefill": "llm-d.ai/role=prefill", "decode": "llm-d.ai/role=decode"},
    "aibrix": {"prefill": "role-name=prefill", "decode": "role-name=decode"},
}
LEADERS_ONLY = "leaderworkerset.sigs.k8s.io/worker-index=0"
"""The label of the pods of LeaderWorkerSets that take requests. The others are further ranks of the same engine."""


@dataclass(frozen=True, slots=True)
class Query:
    """Query says which pods have a role: those with these labels, the endpoints of this service, or pods that are
    both."""

    role: Role
    labels: str = ""
    service: str = ""


def queries(
    selectors: Mapping[Role, str | None], services: Mapping[Role, str | None], presets: Sequence[str]
) -> list[Query]:
    """Returns what is asked for each role. Raises `ConfigError` for a role of which nothing is said, and for labels
    that are no selector."""
    found = []
    for role, given in selectors.items():
        labels = [given] if given and given.strip() else []
        if labels and not is_selector(labels[0]):
            raise ConfigError(
                f"{role}_selector: {given!r} is no label selector; write k=v, k!=v, k in (v,v), k notin (v,v), k or "
                "!k, with commas between several"
            )
        labels += [PRESETS[preset][role] for preset in presets if preset in PRESETS]
        service = services[role] or ""
        if not labels and not service:
            raise ConfigError(
                f"{role}_selector: needed with discover; give the labels of the {role} pods as k=v, a discover_preset, "
                f"or {role}_service"
            )
        labels += [LEADERS_ONLY] * ("lws" in presets)
        found.append(Query(role, ",".join(labels), service))
    return found


class _Named(Protocol):
    @property
    def metadata(self) -> Meta: ...


T = TypeVar("T", bound=_Named)


class _Table(Generic[T]):
    """_Table holds the objects of one reflector, each with a number that tells what was heard of last."""

    def __init__(self, count: Callable[[], int], changed: Callable[[], None]) -> None:
        self._count = count
        self._changed = changed
        self.objects: dict[tuple[str, str], tuple[int, T]] = {}

    def replace(self, objects: list[T]) -> None:
        known = self.objects
        self.objects = {one.metadata.key: known_as(known.get(one.metadata.key), one, self._count) for one in objects}
        self._changed()

    def change(self, what: str, one: T) -> None:
        if what == "DELETED":
            self.objects.pop(one.metadata.key, None)
        else:
            self.objects[one.metadata.key] = self._count(), one
        self._changed()

    def all(self) -> Iterator[T]:
        return (one for _, one in self.objects.values())


def known_as(known: tuple[int, T] | None, one: T, count: Callable[[], int]) -> tuple[int, T]:
    """Returns the object with its number: that of before, where it is the same version."""
    if known is not None and known[1].metadata.resource_version == one.metadata.resource_version:
        return known
    return count(), one


class KubernetesPods:
    """KubernetesPods finds the pods of both roles. Implements `discovery.Source`.

    Mutable state: the reflectors; the objects that each has told; the instances made of pods, by what they were made
    of; what was complained of, by pod.
    """

    def __init__(
        self,
        asked: Sequence[Query],
        connect: Connect,
        *,
        namespace: str,
        engine: Engine,
        port: str | None = None,
        pool: str | None = None,
        complete: Callable[[InstanceSettings], InstanceSettings] = lambda one: one,
    ) -> None:
        """`namespace` may be ``*``. `pool` names an InferencePool to which the pods must belong. `complete` adds to an
        instance what the options say of its kind."""
        self._asked = asked
        self._namespace = namespace
        self._engine: Engine = engine
        self._port = port
        self._pool = pool
        self._complete = complete
        self._connect = connect
        self._num_heard = 0
        self._pods = {one.role: _Table[Pod](self._count, self._changed) for one in asked if one.labels}
        self._slices = {one.role: _Table[Slice](self._count, self._changed) for one in asked if one.service}
        self._pools = _Table[InferencePool](self._count, self._changed)
        self._made: dict[tuple[Role, int, str | None], Entry] = {}
        self._made_of_endpoints: dict[tuple[Hashable, ...], Entry] = {}
        self._made_before: dict[tuple[Hashable, ...], Entry] = {}
        self._told: dict[str, str] = {}
        self._reflectors: list[Reflector[Any]] = []
        self._tell: Tell = lambda entries: None

    @property
    def complaints(self) -> list[str]:
        unread = [one.complaint for one in self._reflectors if one.complaint]
        return [*unread, *(f"{name} is no instance: {what}" for name, what in self._told.items())]

    async def run(self, tell: Tell) -> None:
        self._tell = tell
        self._reflectors = []
        async with anyio.create_task_group() as tasks:
            if self._pool is not None:
                path = self._path("apis/inference.networking.k8s.io/v1", "inferencepools")
                tasks.start_soon(self._reflect(path, InferencePool, self._pools, "", f"metadata.name={self._pool}").run)
            for query in self._asked:
                if query.labels:
                    pods = self._pods[query.role]
                    tasks.start_soon(self._reflect(self._path("api/v1", "pods"), Pod, pods, query.labels).run)
                if query.service:
                    slices = self._slices[query.role]
                    path = self._path("apis/discovery.k8s.io/v1", "endpointslices")
                    label = f"{SERVICE_LABEL}={query.service}"
                    tasks.start_soon(self._reflect(path, Slice, slices, label).run)

    def _reflect(self, path: str, kind: type[T], table: _Table[T], labels: str, fields: str = "") -> Reflector[T]:
        reflector = Reflector(self._connect, path, kind, table, labels=labels, fields=fields)
        self._reflectors.append(reflector)
        return reflector

    def _path(self, group: str, kind: str) -> str:
        middle = "" if self._namespace == EVERYWHERE else f"namespaces/{self._namespace}/"
        return f"{group}/{middle}{kind}"

    def _count(self) -> int:
        self._num_heard += 1
        return self._num_heard

    def _changed(self) -> None:
        complaints: dict[str, str] = {}
        self._made_before, self._made_of_endpoints = self._made_of_endpoints, {}
        self._tell(list(self._entries(complaints)))
        for name, what in complaints.items():
            if self._told.get(name) != what:
                log.warning("%s is no instance: %s", name, what)
        self._told = complaints
        if len(self._made) > 2 * sum(len(pods.objects) for pods in self._pods.values()):
            self._forget()

    def _entries(self, complaints: dict[str, str]) -> Iterator[Entry]:
        """Yields the instances that may be sent requests now. Those that cannot be instances are complained of."""
        role_of: dict[str, Role] = {}
        for query in self._asked:
            for name, make in self._ready(query):
                try:
                    entry = make()
                except PodError as error:
                    complaints[name] = str(error)
                    continue
                if entry is None:
                    continue
                if (other := role_of.setdefault(entry.name, query.role)) == query.role:
                    yield entry
                else:
                    complaints[name] = f"{entry.name} is an instance for {other} already; let no pod have both roles"

    def _ready(self, query: Query) -> Iterator[tuple[str, Callable[[], Entry | None]]]:
        """Yields what messages call each pod that is ready, and what makes it an instance of this role."""
        slices, pods = self._slices.get(query.role), self._pods.get(query.role)
        ready = None if slices is None else ready_endpoints(slices.all())
        if pods is None:
            for identity, (endpoint, slice_) in (ready or {}).items():
                yield f"the endpoint {identity}", partial(self._of_endpoint, query.role, endpoint, slice_)
            return
        for number, pod in pods.objects.values():
            is_here = pod.is_ready and (ready is None or pod.metadata.uid in ready)
            if is_here and (self._pool is None or self._pool_of(pod) is not None):
                yield f"the pod {'/'.join(pod.metadata.key)}", partial(self._of_pod, query.role, number, pod)

    def _of_endpoint(self, role: Role, endpoint: Endpoint, slice_: Slice) -> Entry:
        target, with_namespace = endpoint.target_ref or Reference(), self._namespace == EVERYWHERE
        place = endpoint.addresses[0], slice_.port(self._port)
        made_of = role, slice_.metadata.key, target.name, target.uid, *place
        made = self._made_before.get(made_of)
        if made is None:
            made = of_endpoint(endpoint, slice_, role, self._engine, port=self._port, with_namespace=with_namespace)
            made = replace(made, settings=self._complete(made.settings))
        self._made_of_endpoints[made_of] = made
        return made

    def _of_pod(self, role: Role, number: int, pod: Pod) -> Entry | None:
        """Returns the instance that the pod is; None where it has another role by now. Raises `PodError`."""
        if not self._is_of(role, number, pod):
            return None
        with_namespace = self._namespace == EVERYWHERE
        pool, port = self._pool_of(pod), self._port
        if port is None and pool is not None:
            port = pool.port
        made_of = role, number, port
        made = self._made.get(made_of)
        if made is None:
            made = of_pod(pod, role, self._engine, port=port, with_namespace=with_namespace)
            made = self._made[made_of] = replace(made, settings=self._complete(made.settings))
        return made

    def _forget(self) -> None:
        """Forgets the instances made of pods as they are no longer."""
        numbers = {number for pods in self._pods.values() for number, _ in pods.objects.values()}
        self._made = {made_of: one for made_of, one in self._made.items() if made_of[1] in numbers}

    def _pool_of(self, pod: Pod) -> InferencePool | None:
        """Returns the pool that has the pod. A pool has pods of its own namespace alone."""
        namespace = pod.metadata.namespace
        return next((one for one in self._pools.all() if one.metadata.namespace == namespace and one.has(pod)), None)

    def _is_of(self, role: Role, number: int, pod: Pod) -> bool:
        """Tells whether a pod that is listed for `role` has that role. While its labels change it may be listed for
        both roles: then what was heard last counts. Raises `PodError` where it has the labels of both."""
        for other, table in self._pods.items():
            listed = table.objects.get(pod.metadata.key) if other != role else None
            if listed is None:
                continue
            if listed[1].metadata.resource_version == pod.metadata.resource_version:
                raise PodError("it has the labels of prefillers and of decoders; make the selectors exclude each other")
            if listed[0] > number:
                return False
        return True

    def __repr__(self) -> str:
        return f"<KubernetesPods in {self._namespace}: {', '.join(map(str, self._asked))}>"
