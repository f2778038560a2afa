"""A stand-in for a Kubernetes API server on the wire: lists and watches of pods, EndpointSlices and Leases, and writes.

It keeps objects with versions, as the real one does, and answers as raw bytes, so that a test can have it cut a watch
in any place, say in both ways that a version is gone, leave connections half open, change its token, or ask for a
pause. Leases can be created and updated, with the conflicts of the real one. kubectl and the official client use it,
too. As a program (``python -m tests.fakes.kubernetes_api PORT FILE``) it keeps what it has in a file, and can be frozen
and killed.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import random
import re
import sys
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

NAMESPACE = "llm"
COLLECTIONS = {
    "pods": ("v1", "Pod"),
    "endpointslices": ("discovery.k8s.io/v1", "EndpointSlice"),
    "inferencepools": ("inference.networking.k8s.io/v1", "InferencePool"),
    "leases": ("coordination.k8s.io/v1", "Lease"),
}
_MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}(Z|[+-]\d\d:\d\d)")
_PATH = re.compile(r"^/(?:api/v1|apis/[^/]+/v1)(?:/namespaces/([^/]+))?/([a-z]+)(?:/([^/]+))?$")
Object = dict[str, Any]


@dataclass
class Request:
    """One request as it came."""

    path: str
    query: dict[str, str]
    headers: dict[str, str]
    method: str = "GET"
    content: bytes = b""

    @property
    def is_watch(self) -> bool:
        return self.query.get("watch") in ("1", "true")


@dataclass
class Faults:
    """What goes wrong. Each of the lists is used up from its front, one for each request."""

    list_status: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    watch_status: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    is_continue_gone: bool = False
    cut_bytes: random.Random | None = None
    """Whether events are sent in pieces of any size."""
    is_cut_within: bool = False
    """Whether the next watch ends, in order, within its first event."""
    before: Callable[[Request], Awaitable[None]] | None = None
    after: Callable[[Request], Awaitable[None]] | None = None
    """What a request for one object waits for, before it is done and before it is answered. Where that raises
    `ConnectionError`, the connection breaks there."""
    one_status: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    """As those of lists and watches, of requests for one object."""
    instead: Callable[[Request, asyncio.StreamWriter], Awaitable[bool]] | None = None
    """Answers a request in the server's place, and tells whether it did. The connection is closed then."""


class KubernetesApi:
    """``async with KubernetesApi() as api`` serves at `api.url`, with a token where one is set.

    Mutable state: the objects of each collection by namespace and name; every change with its version; the faults; the
    open connections.
    """

    def __init__(
        self,
        *,
        token: str | None = None,
        page: int | None = None,
        watch_s: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`page`: the most objects of one answer. `watch_s`: how long a watch lasts at most. `clock`: Unix time."""
        self.token = token
        self.clock = clock
        self.page = page
        self.watch_s = watch_s
        self.faults = Faults()
        self.version = 1000
        self.oldest = 0
        """The version before which no change is known any more."""
        self.requests: list[Request] = []
        self.counts: Counter[str] = Counter()
        self._objects: dict[str, dict[tuple[str, str], Object]] = {one: {} for one in COLLECTIONS}
        self._changes: list[tuple[int, str, str, Object, Object | None]] = []
        self._snapshots: dict[str, tuple[int, list[Object]]] = {}
        self._news = asyncio.Event()
        self._half_open: set[asyncio.Task[None]] = set()
        self._ended = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> KubernetesApi:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Ends, with all connections. It can be started again at the same port."""
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ── what is in the cluster ──────────────────────────────────────────────────────────────────────────────────

    def put(self, collection: str, one: Object) -> Object:
        """Adds or replaces an object, and tells those who watch. Returns it as it is kept."""
        api_version, kind = COLLECTIONS[collection]
        one = {"apiVersion": api_version, "kind": kind, **copy.deepcopy(one)}
        meta = one["metadata"]
        meta.setdefault("namespace", NAMESPACE)
        key = meta["namespace"], meta["name"]
        before = self._objects[collection].get(key)
        meta.setdefault("uid", before["metadata"]["uid"] if before else str(uuid.uuid4()))
        meta.setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
        self._objects[collection][key] = one
        self._note(collection, "ADDED" if before is None else "MODIFIED", one, before)
        return one

    def remove(self, collection: str, name: str, namespace: str = NAMESPACE) -> None:
        one = self._objects[collection].pop((namespace, name))
        self._note(collection, "DELETED", copy.deepcopy(one), one)

    def get(self, collection: str, name: str, namespace: str = NAMESPACE) -> Object:
        return copy.deepcopy(self._objects[collection][namespace, name])

    def change(self, collection: str, name: str, how: Callable[[Object], object]) -> None:
        """Changes an object in place, by `how`."""
        one = self.get(collection, name)
        how(one)
        self.put(collection, one)

    def _note(self, collection: str, what: str, one: Object, before: Object | None) -> None:
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)
        self._changes.append((self.version, collection, what, copy.deepcopy(one), copy.deepcopy(before)))
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # ── what goes wrong ─────────────────────────────────────────────────────────────────────────────────────────

    def forget(self) -> None:
        """Forgets all changes so far, as a compaction does: watches from before are gone."""
        self.oldest = self.version
        self.version += 1

    def cut(self) -> None:
        """Breaks all connections."""
        for writer in list(self._writers):
            writer.transport.abort()

    def end_watches(self) -> None:
        """Ends all watches in order, as at their time."""
        self._ended += 1
        self._wake()

    async def freeze(self) -> None:
        """Leaves all connections half open: nothing comes on them any more. New ones are as ever."""
        self._half_open |= self._tasks
        while tasks := list(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    # ── HTTP ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            while True:
                request = await _read(reader)
                if request is None or not await self._answer(request, writer):
                    break
        except asyncio.CancelledError:
            if task in self._half_open:
                return
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._tasks.discard(task)
        self._writers.discard(writer)
        writer.close()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        """Tells whether the connection is kept."""
        self.requests.append(request)
        if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
            self.counts["401"] += 1
            return await _send(writer, 401, status(401, "Unauthorized", "Unauthorized"))
        found = _PATH.match(request.path)
        if found is None or found[2] not in COLLECTIONS:
            return await _send(writer, 200 if request.path in DISCOVERY else 404, _discovery(request.path))
        namespace, collection, name = found.groups()
        if name is not None or request.method != "GET":
            return await self._one(request, writer)
        chosen = _chooser(namespace, request.query.get("labelSelector", ""), request.query.get("fieldSelector", ""))
        self.counts[f"{'watch' if request.is_watch else 'list'} {collection}"] += 1
        if self.faults.instead is not None and await self.faults.instead(request, writer):
            return False
        planned = self.faults.watch_status if request.is_watch else self.faults.list_status
        if planned:
            code, headers = planned.pop(0)
            return await _send(writer, code, status(code, "as planned", "Planned"), headers)
        if request.is_watch:
            await self._watch(collection, chosen, request.query, writer)
            return False
        return await self._list(collection, chosen, request, writer)

    async def _one(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        if self.faults.before is not None:
            await self.faults.before(request)
        if self.faults.one_status:
            code, headers = self.faults.one_status.pop(0)
            return await _send(writer, code, status(code, "as planned", "Planned"), headers)
        code, body = self.one(request)
        if self.faults.after is not None:
            await self.faults.after(request)
        return await _send(writer, code, body)

    def one(self, request: Request) -> tuple[int, Object]:
        """Does what is asked of one object, at once. Returns the status and the body."""
        found = _PATH.match(request.path)
        assert found is not None
        namespace, collection, name = found.groups()
        one: Object = json.loads(request.content or b"{}")
        name = name or one["metadata"]["name"]
        namespace = namespace or NAMESPACE
        known = self._objects[collection].get((namespace, name))
        self.counts[f"{request.method.lower()} {collection}"] += 1
        if request.method == "GET":
            if known is None:
                return 404, status(404, f'{collection} "{name}" not found', "NotFound")
            return 200, copy.deepcopy(known)
        if request.method not in ("POST", "PUT") or collection != "leases":
            return 405, status(
                405, "the server does not allow this method on the requested resource", "MethodNotAllowed"
            )
        if wrong := _wrong_with(one):
            return 422, status(422, f'Lease "{name}" is invalid: {wrong}', "Invalid")
        refused = _refused_create(one, known) if request.method == "POST" else _refused_update(one, known)
        if refused is not None:
            return refused
        one["metadata"] |= {"namespace": namespace, "name": name}
        one["metadata"].pop("resourceVersion", None)
        if known is None:
            now = datetime.fromtimestamp(int(self.clock()), UTC)
            one["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": now.strftime("%Y-%m-%dT%H:%M:%SZ")}
            return 201, copy.deepcopy(self.put(collection, one))
        kept = {key: known["metadata"][key] for key in ("uid", "creationTimestamp", "resourceVersion")}
        one["metadata"] |= kept
        if one == known:  # which is no change, and makes no version
            return 200, copy.deepcopy(known)
        return 200, copy.deepcopy(self.put(collection, one))

    async def _list(
        self, collection: str, chosen: Callable[[Object], bool], request: Request, writer: asyncio.StreamWriter
    ) -> bool:
        start = 0
        if token := request.query.get("continue"):
            name, _, number = token.partition("-")
            if self.faults.is_continue_gone or name not in self._snapshots:
                self.faults.is_continue_gone = False
                gone = status(410, "The provided continue parameter is too old", "Expired")
                return await _send(writer, 410, gone)
            (version, objects), start = self._snapshots[name], int(number)
        else:
            objects = [copy.deepcopy(one) for one in self._objects[collection].values() if chosen(one)]
            version, name = self.version, f"c{len(self._snapshots)}"
            self._snapshots[name] = version, objects
        limit = min(int(request.query.get("limit") or len(objects) or 1), self.page or len(objects) or 1)
        meta = {"resourceVersion": str(version)}
        if start + limit < len(objects):
            meta["continue"] = f"{name}-{start + limit}"
        api_version, kind = COLLECTIONS[collection]
        body = {"apiVersion": api_version, "kind": f"{kind}List", "metadata": meta}
        return await _send(writer, 200, {**body, "items": objects[start : start + limit]})

    async def _watch(
        self, collection: str, chosen: Callable[[Object], bool], query: dict[str, str], writer: asyncio.StreamWriter
    ) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        seen = int(query.get("resourceVersion") or self.version)
        if seen < self.oldest:
            gone = status(410, f"too old resource version: {seen} ({self.oldest})", "Expired")
            await self._event(writer, "ERROR", gone)
            await _end(writer)
            return
        lasts_s = float(query.get("timeoutSeconds") or 3600)
        ends_at = asyncio.get_running_loop().time() + min(lasts_s, self.watch_s or lasts_s)
        ended = self._ended
        while ended == self._ended:
            news = self._news
            for version, of, what, one, before in self._changes:
                if version <= seen or of != collection:
                    continue
                told = _as_seen(what, one, before, chosen)
                if told is not None and self.faults.is_cut_within:
                    self.faults.is_cut_within = False
                    half = json.dumps({"type": told, "object": one}).encode()[:-40]
                    writer.write(b"%x\r\n%b\r\n" % (len(half), half))
                    await _end(writer)
                    return
                if told is not None:
                    await self._event(writer, told, one)
            seen = max(seen, self.version)
            left_s = ends_at - asyncio.get_running_loop().time()
            try:
                await asyncio.wait_for(news.wait(), max(0.0, left_s))
            except TimeoutError:
                break
        if query.get("allowWatchBookmarks") == "true":
            await self.bookmark(collection, writer, seen)
        await _end(writer)

    async def bookmark(self, collection: str, writer: asyncio.StreamWriter, version: int) -> None:
        """Says that all changes up to this version have been told."""
        api_version, kind = COLLECTIONS[collection]
        mark = {"apiVersion": api_version, "kind": kind, "metadata": {"resourceVersion": str(version)}}
        if kind == "Pod":
            mark["spec"] = {"containers": None}
        await self._event(writer, "BOOKMARK", mark)

    async def _event(self, writer: asyncio.StreamWriter, what: str, one: Object) -> None:
        line = json.dumps({"type": what, "object": one}, ensure_ascii=False).encode() + b"\n"
        pieces = [line]
        if (rng := self.faults.cut_bytes) is not None:
            places = sorted(rng.sample(range(1, len(line)), min(rng.randrange(6), len(line) - 1)))
            pieces = [line[start:end] for start, end in itertools.pairwise([0, *places, len(line)])]
        for piece in pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            if len(pieces) > 1:
                await asyncio.sleep(0)


def _wrong_with(lease: Object) -> str:
    """What the server's validation says of a Lease; nothing where it is valid."""
    spec = lease.get("spec") or {}
    if spec.get("leaseDurationSeconds", 1) <= 0:
        return "spec.leaseDurationSeconds: must be greater than 0"
    if spec.get("leaseTransitions", 0) < 0:
        return "spec.leaseTransitions: must be greater than or equal to 0"
    for name in ("acquireTime", "renewTime"):
        if name in spec and not _MICRO_TIME.fullmatch(spec[name]):
            return f"spec.{name}: parsing time {spec[name]!r}"
    return ""


def _refused_create(one: Object, known: Object | None) -> tuple[int, Object] | None:
    name = one["metadata"]["name"]
    if known is not None:
        return 409, status(409, f'leases.coordination.k8s.io "{name}" already exists', "AlreadyExists")
    if one["metadata"].get("resourceVersion"):
        return 500, status(500, "resourceVersion should not be set on objects to be created", "InternalError")
    return None


def _refused_update(one: Object, known: Object | None) -> tuple[int, Object] | None:
    """As the generic registry has it for Leases: an update without a version is refused, one with a uid holds for the
    object with that uid alone, and one without a uid makes an object that is not there."""
    meta, there = one["metadata"], {} if known is None else known["metadata"]
    wrong = ""
    if meta.get("uid") and meta["uid"] != there.get("uid"):
        wrong = f"Precondition failed: UID in precondition: {meta['uid']}, UID in object meta: {there.get('uid', '')}"
    elif known is not None and not meta.get("resourceVersion"):
        return 422, status(422, "metadata.resourceVersion: Invalid value: must be specified for an update", "Invalid")
    elif known is not None and meta["resourceVersion"] != there["resourceVersion"]:
        wrong = "the object has been modified; please apply your changes to the latest version and try again"
    if not wrong:
        return None
    cannot = f'Operation cannot be fulfilled on leases.coordination.k8s.io "{meta.get("name")}"'
    return 409, status(409, f"{cannot}: {wrong}", "Conflict")


def _as_seen(what: str, one: Object, before: Object | None, chosen: Callable[[Object], bool]) -> str | None:
    """What a watch with a selector is told of a change: objects enter and leave what it selects."""
    is_in, was_in = what != "DELETED" and chosen(one), before is not None and chosen(before)
    if is_in:
        return "MODIFIED" if was_in else "ADDED"
    return "DELETED" if was_in else None


def status(code: int, message: str, reason: str) -> Object:
    """A Status object, as every error of the API is one."""
    told = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return {**told, "message": message, "reason": reason, "code": code}


def _chooser(namespace: str | None, labels: str, fields: str) -> Callable[[Object], bool]:
    tests = [_label_test(one.strip()) for one in re.split(r",(?![^(]*\))", labels) if one.strip()]
    names = [one.partition("=")[2].lstrip("=") for one in fields.split(",") if one.startswith("metadata.name=")]

    def chosen(one: Object) -> bool:
        meta = one["metadata"]
        if namespace is not None and meta["namespace"] != namespace:
            return False
        return all(test(meta.get("labels") or {}) for test in tests) and all(meta["name"] == name for name in names)

    return chosen


def _label_test(text: str) -> Callable[[dict[str, str]], bool]:
    if found := re.fullmatch(r"(\S+)\s+(in|notin)\s+\((.*)\)", text):
        key, values = found[1], {one.strip() for one in found[3].split(",")}
        is_in = found[2] == "in"
        return lambda labels: (labels.get(key) in values) == is_in
    if found := re.fullmatch(r"([^!=\s]+)\s*(!=|==|=)\s*(\S*)", text):
        key, value, is_equal = found[1], found[3], found[2] != "!="
        return lambda labels: (labels.get(key) == value) == is_equal
    if text.startswith("!"):
        return lambda labels: text[1:] not in labels
    return lambda labels: text in labels


async def _read(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode().split("\r\n")
    method, target, _ = first.split(" ")
    url = urlsplit(target)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    query = {name: values[-1] for name, values in parse_qs(url.query).items()}
    content = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(url.path, query, headers, method, content)


async def _send(writer: asyncio.StreamWriter, code: int, body: Object, headers: dict[str, str] | None = None) -> bool:
    content = json.dumps(body, ensure_ascii=False).encode()
    lines = [f"HTTP/1.1 {code} X", "Content-Type: application/json", f"Content-Length: {len(content)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
    await writer.drain()
    return True


async def send_bytes(writer: asyncio.StreamWriter, *pieces: bytes) -> None:
    """Answers with these bytes, whatever they are, and with the end of the body."""
    writer.write(b"HTTP/1.1 200 X\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
    for piece in pieces:
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        await writer.drain()
    await _end(writer)


async def _end(writer: asyncio.StreamWriter) -> None:
    writer.write(b"0\r\n\r\n")
    await writer.drain()


# ── what kubectl asks first ─────────────────────────────────────────────────────────────────────────────────────────


def _resources(group: str, *names: str) -> Object:
    described = [
        {
            "name": name,
            "singularName": COLLECTIONS[name][1].lower(),
            "namespaced": True,
            "kind": COLLECTIONS[name][1],
            "verbs": ["get", "list", "watch", *(("create", "update") if name == "leases" else ())],
        }
        for name in names
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": described}


def _group(name: str) -> Object:
    version = {"groupVersion": f"{name}/v1", "version": "v1"}
    return {"name": name, "versions": [version], "preferredVersion": version}


GROUPS = ("discovery.k8s.io", "coordination.k8s.io")
DISCOVERY: dict[str, Object] = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/api/v1": _resources("v1", "pods"),
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(one) for one in GROUPS]},
    "/apis/discovery.k8s.io/v1": _resources("discovery.k8s.io/v1", "endpointslices"),
    "/apis/coordination.k8s.io/v1": _resources("coordination.k8s.io/v1", "leases"),
    "/version": {"major": "1", "minor": "31", "gitVersion": "v1.31.0"},
}


def _discovery(path: str) -> Object:
    return DISCOVERY.get(path) or status(404, "the server could not find the requested resource", "NotFound")


# ── objects ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def pod(
    name: str,
    ip: str = "10.0.0.1",
    *,
    ports: dict[str, int] | None = None,
    is_ready: bool = True,
    annotations: dict[str, str] | None = None,
    uid: str | None = None,
    namespace: str = NAMESPACE,
    **labels: str,
) -> Object:
    """A pod as the API shows it. Labels with dashes and dots are given by ``labels={…}`` of `labelled`."""
    declared = [{"name": port, "containerPort": number, "protocol": "TCP"} for port, number in (ports or {}).items()]
    meta: Object = {"name": name, "namespace": namespace, "labels": labels, "annotations": annotations or {}}
    if uid is not None:
        meta["uid"] = uid
    return {
        "metadata": meta,
        "spec": {"containers": [{"name": "engine", "image": "engine", "ports": declared}]},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "podIPs": [{"ip": ip}],
            "conditions": [{"type": "Ready", "status": "True" if is_ready else "False"}],
        },
    }


def labelled(one: Object, labels: dict[str, str]) -> Object:
    """The object with these labels as well."""
    one["metadata"]["labels"] = {**one["metadata"].get("labels", {}), **labels}
    return one


def ready(is_ready: bool) -> Callable[[Object], None]:
    """What makes a pod ready, or not."""

    def change(one: Object) -> None:
        one["status"]["conditions"] = [{"type": "Ready", "status": "True" if is_ready else "False"}]

    return change


def terminating(one: Object) -> None:
    """Marks a pod that is to end."""
    one["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:30Z", "deletionGracePeriodSeconds": 30}


def endpoint(ip: str, uid: str = "", *, name: str = "", **conditions: bool) -> Object:
    """An endpoint of a slice."""
    target = {"targetRef": {"kind": "Pod", "name": name, "namespace": NAMESPACE, "uid": uid}} if uid else {}
    return {"addresses": [ip], "conditions": {"ready": True, **conditions}, **target}


def slice_of(service: str, name: str, *endpoints: Object, ports: dict[str, int], family: str = "IPv4") -> Object:
    """An EndpointSlice of a service."""
    return {
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"kubernetes.io/service-name": service}},
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": [{"name": port, "port": number, "protocol": "TCP"} for port, number in ports.items()],
    }


# ── how it is reached ───────────────────────────────────────────────────────────────────────────────────────────────


def kubeconfig(folder: Path, url: str, token_file: Path | None = None) -> Path:
    """A kubeconfig for the server at `url`."""
    user = "{}" if token_file is None else f"{{tokenFile: {token_file}}}"
    path = folder / "kubeconfig"
    path.write_text(f"""\
apiVersion: v1
kind: Config
current-context: it
contexts: [{{name: it, context: {{cluster: it, user: it, namespace: {NAMESPACE}}}}}]
clusters: [{{name: it, cluster: {{server: "{url}"}}}}]
users: [{{name: it, user: {user}}}]
""")
    return path


# ── as a program ────────────────────────────────────────────────────────────────────────────────────────────────────


class _KeptApi(KubernetesApi):
    """A server that writes each change of a Lease to a file before it answers, and begins with what is in that file."""

    def __init__(self, kept: Path) -> None:
        super().__init__()
        self._kept = kept
        if kept.exists():
            self.version, leases = json.loads(kept.read_text())
            self._objects["leases"] = {(one["metadata"]["namespace"], one["metadata"]["name"]): one for one in leases}

    def _note(self, collection: str, what: str, one: Object, before: Object | None) -> None:
        super()._note(collection, what, one, before)
        written = self._kept.with_suffix(".new")
        written.write_text(json.dumps([self.version, list(self._objects["leases"].values())]))
        written.replace(self._kept)


async def _serve_for_ever(port: int, kept: Path) -> None:
    api = _KeptApi(kept)
    api.port = port
    async with api:
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve_for_ever(int(sys.argv[1]), Path(sys.argv[2])))
