"""The module keeps the store in Kubernetes, as two Lease objects (coordination.k8s.io/v1).

One tells who leads, the greatest term and the fleet's secret; the other one has the members. What a Lease has no field
for is in its annotations. Each is read and written whole, on the version that was read: where somebody else has written
meanwhile, the server refuses that, and it is read again. Get, create and update of these two are all that it takes.

No clock but the observer's own counts. A lead has ended when its Lease was not seen to change for as long as it says,
and a member has gone when its entry was not. Who takes the lead over writes on the very version that it has watched for
so long: a renewal that it has not seen makes that fail. The times in a Lease are for people.

A Lease that is made anew knows of no term. It begins with the moment at which the server says that it was made, in
milliseconds: of two Leases under one name the later one has the greater terms, whatever the clocks of replicas show.
The server tells that moment in seconds. Within one, the replica's clock decides.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec

from pdproxy.coordination.store import MAX_TERM, Leader, Member, bounded, check_seen, foreign, unavailable
from pdproxy.discovery.api_server import (
    CONFLICT,
    NOT_FOUND,
    ApiServer,
    ClusterFault,
    Connect,
    kubernetes_client,
    own_namespace,
)
from pdproxy.errors import ConfigError, StoreUnavailable

OPTION = "coordinator"
DEFAULT_NAME = "pdproxy"
PAUSE_S = 0.02
"""The longest pause in seconds before a Lease is read again that somebody else has written meanwhile."""
_PREFIX = "pdproxy.coordination/"
TERM, ADDRESS, SECRET, MEMBERS = (f"{_PREFIX}{name}" for name in ("term", "address", "secret", "members"))
AFTER = f"{_PREFIX}after"
"""The annotation with the version that a write was made on. So no write leaves a Lease as it was: the server would not
count that as a change, and nobody would see it."""
_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_URL = re.compile(rf"kubernetes(://(?P<namespace>{_LABEL})?(/(?P<name>{_LABEL})?)?)?")
_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")


class _Meta(msgspec.Struct, rename="camel"):
    resource_version: str
    creation_timestamp: datetime
    annotations: dict[str, str] | None = None


class _Spec(msgspec.Struct, rename="camel"):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    lease_transitions: int | None = None


class _Known(msgspec.Struct):
    metadata: _Meta
    spec: _Spec = msgspec.field(default_factory=_Spec)


class _Lease:
    """One version of a Lease, as the server has sent it."""

    __slots__ = ("annotations", "content", "meta", "spec")

    def __init__(self, content: bytes) -> None:
        """Raises `msgspec.DecodeError`."""
        known = msgspec.json.decode(content, type=_Known)
        self.content = content
        self.meta = known.metadata
        self.spec = known.spec
        self.annotations = known.metadata.annotations or {}

    def changed(self, annotations: Mapping[str, str | None], spec: Mapping[str, Any]) -> bytes:
        """Returns the Lease with these annotations and fields, without those that are None. What others have added to
        it stays; and so do its version and its uid, without which the server would make a Lease that was deleted."""
        whole = msgspec.json.decode(self.content)
        meta = whole["metadata"]
        meta["annotations"] = _without_none({**self.annotations, **annotations, AFTER: self.meta.resource_version})
        whole["spec"] = _without_none({**(whole.get("spec") or {}), **spec})
        return msgspec.json.encode(whole)


class _Entry(Member, frozen=True):
    """One member in the Lease of members. `mark` is another one after each renewal."""

    ttl_s: float
    mark: str


class KubernetesStore:
    """Implements `store.Store`. Mutable state: the server's client; the leader's Lease as it was read last, and since
    when it has been like that; the mark of each member that is listed, and since when it has had it.
    """

    __slots__ = (
        "_clock",
        "_fleet",
        "_leader_name",
        "_marks",
        "_members_name",
        "_path",
        "_server",
        "_timeout_s",
        "_unix_clock",
        "_watched",
        "_watched_since",
        "_where",
    )

    def __init__(
        self,
        url: str,
        fleet: str,
        *,
        timeout_s: float,
        connect: Connect | None = None,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """Takes ``kubernetes[://[NAMESPACE][/NAME]]``, with which the names of the Leases begin. Raises `ConfigError`
        where the URL cannot be used, where no cluster is configured, or where lightkube is missing.
        """
        self._timeout_s = timeout_s
        read = _URL.fullmatch(url)
        if read is None:
            raise ConfigError(f"{OPTION}: the URL cannot be used: write kubernetes://NAMESPACE/NAME, or kubernetes")
        namespace, name = read["namespace"] or own_namespace(OPTION), read["name"] or DEFAULT_NAME
        self._leader_name, self._members_name = f"{name}-leader-{fleet}", f"{name}-members-{fleet}"
        if not _NAME.fullmatch(self._members_name):
            raise ConfigError(
                f"fleet_name: {fleet!r} becomes part of a Lease's name; use lower-case letters, digits, dots and dashes"
            )
        self._path = f"apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._where = f"kubernetes://{namespace}/{name}"
        self._server = ApiServer(connect or partial(kubernetes_client, OPTION))
        self._server.open()
        self._clock = clock
        self._unix_clock = unix_clock
        self._watched = b""
        self._watched_since = 0.0
        self._marks: dict[str, tuple[str, float]] = {}

    async def hold(self, member: str, address: str, *, seen: int, ttl_s: float) -> Leader:
        check_seen(seen)
        with bounded(self._timeout_s, self._where) as deadline:
            while True:
                lease = await self._found_or_made(self._leader_name)
                leader = self._leader(lease)
                if leader is not None and leader.member != member:
                    left_s = self._left_s(lease)
                    if left_s > deadline.seconds_left / 2:
                        return leader
                    if left_s > 0:  # the next question would come late
                        await asyncio.sleep(left_s)
                        continue
                    leader = None
                if leader is None:
                    leader = Leader(max(self._term(lease), seen) + 1, member, address)
                if await self._write_leader(lease, leader, ttl_s):
                    return leader

    async def look(self) -> Leader | None:
        with bounded(self._timeout_s, self._where):
            lease = await self._found(self._leader_name)
        leader = None if lease is None else self._leader(lease)
        return None if lease is None or self._left_s(lease) == 0 else leader

    async def release(self, leader: Leader) -> None:
        with bounded(self._timeout_s, self._where):
            while True:
                lease = await self._found(self._leader_name)
                if lease is None or self._leader(lease) != leader:
                    return
                ended = dict.fromkeys(("holderIdentity", "leaseDurationSeconds", "acquireTime", "renewTime"))
                if await self._write(self._leader_name, lease, {ADDRESS: None}, ended):
                    return

    async def enter(self, member: Member, ttl_s: float) -> None:
        with bounded(self._timeout_s, self._where):
            while True:
                lease = await self._found_or_made(self._members_name)
                others = [one for one in self._present(lease) if one.id != member.id]
                mark = lease.meta.resource_version
                entry = _Entry(member.id, member.address, member.name, ttl_s, mark)
                if await self._write_members(lease, [*others, entry]):
                    return

    async def leave(self, member_id: str) -> None:
        with bounded(self._timeout_s, self._where):
            while True:
                lease = await self._found(self._members_name)
                present = [] if lease is None else self._present(lease)
                others = [one for one in present if one.id != member_id]
                if lease is None or len(others) == len(present) or await self._write_members(lease, others):
                    return

    async def members(self) -> list[Member]:
        with bounded(self._timeout_s, self._where):
            lease = await self._found(self._members_name)
        present = [] if lease is None else self._present(lease)
        return sorted((Member(one.id, one.address, one.name) for one in present), key=lambda one: one.id)

    async def secret(self, proposed: str) -> str:
        with bounded(self._timeout_s, self._where):
            while True:
                lease = await self._found_or_made(self._leader_name)
                known = lease.annotations.get(SECRET)
                if known is not None:
                    if not known:
                        raise self._foreign(self._leader_name)
                    return known
                if await self._write(self._leader_name, lease, {SECRET: proposed}, {}):
                    return proposed

    async def aclose(self) -> None:
        with suppress(StoreUnavailable, OSError), bounded(self._timeout_s, self._where):
            await self._server.aclose()

    # ── what a Lease says ───────────────────────────────────────────────────────────────────────────────────────

    def _leader(self, lease: _Lease) -> Leader | None:
        """Returns whose lead it tells of, which may have ended by itself. None: nobody's."""
        term, spec = self._term(lease), lease.spec
        if not spec.holder_identity:
            return None
        address = lease.annotations.get(ADDRESS)
        if TERM not in lease.annotations or address is None or (spec.lease_duration_seconds or 0) <= 0:
            raise self._foreign(self._leader_name)
        return Leader(term, spec.holder_identity, address)

    def _term(self, lease: _Lease) -> int:
        """Returns the greatest term that the Lease knows: where there was none yet, the time at which it was made."""
        told = lease.annotations.get(TERM)
        if told is None and not lease.spec.lease_transitions:
            made_ms = int(lease.meta.creation_timestamp.timestamp()) * 1000
            return min(max(made_ms, int(self._unix_clock() * 1000)), made_ms + 999)
        if told is None or not re.fullmatch("[0-9]{1,16}", told) or int(told) >= MAX_TERM:
            raise self._foreign(self._leader_name)
        return int(told)

    def _left_s(self, lease: _Lease) -> float:
        """Returns the seconds for which the lead goes on, where this very Lease is not changed before."""
        now = self._clock()
        if lease.content != self._watched:
            self._watched, self._watched_since = lease.content, now
        return max(0.0, self._watched_since + (lease.spec.lease_duration_seconds or 0) - now)

    def _present(self, lease: _Lease) -> list[_Entry]:
        """Returns the entries of the members that are present."""
        try:
            listed = msgspec.json.decode(lease.annotations.get(MEMBERS, "[]"), type=list[_Entry])
        except msgspec.DecodeError:
            raise self._foreign(self._members_name) from None
        now, known = self._clock(), self._marks
        self._marks = {}
        for one in listed:
            seen = known.get(one.id)
            self._marks[one.id] = seen if seen is not None and seen[0] == one.mark else (one.mark, now)
        return [one for one in listed if now < self._marks[one.id][1] + one.ttl_s]

    def _foreign(self, name: str) -> StoreUnavailable:
        return foreign(self._where, name)

    def _now(self) -> str:
        return datetime.fromtimestamp(self._unix_clock(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    # ── reading and writing ─────────────────────────────────────────────────────────────────────────────────────

    async def _found(self, name: str) -> _Lease | None:
        """Returns the Lease as it is now, or None where there is none."""
        try:
            return self._read(name, await self._ask("GET", f"{self._path}/{name}"))
        except ClusterFault as fault:
            if fault.status == NOT_FOUND:
                return None
            raise unavailable(self._where, str(fault)) from None

    async def _found_or_made(self, name: str) -> _Lease:
        """Returns the Lease as it is now. Where there is none, it makes one that says nothing."""
        while True:
            lease = await self._found(name)
            if lease is not None:
                return lease
            kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
            made = msgspec.json.encode({**kind, "metadata": {"name": name}, "spec": {}})
            try:
                return self._read(name, await self._ask("POST", self._path, made))
            except ClusterFault as fault:
                if fault.status != CONFLICT:  # as it is where another replica was faster
                    raise unavailable(self._where, str(fault)) from None

    async def _write(
        self, name: str, lease: _Lease, annotations: Mapping[str, str | None], spec: Mapping[str, Any]
    ) -> bool:
        """Writes what is to be changed. Returns False, after a pause, where it is not the present version any more."""
        try:
            await self._ask("PUT", f"{self._path}/{name}", lease.changed(annotations, spec))
        except ClusterFault as fault:
            if fault.status not in (CONFLICT, NOT_FOUND):
                raise unavailable(self._where, str(fault)) from None
            await asyncio.sleep(random.uniform(0, PAUSE_S))
            return False
        return True

    async def _write_leader(self, lease: _Lease, leader: Leader, ttl_s: float) -> bool:
        """Writes that `leader` leads from now on, for so long."""
        now = self._now()
        spec: dict[str, Any] = {"leaseDurationSeconds": math.ceil(ttl_s), "renewTime": now}
        if self._leader(lease) != leader:
            num_transitions = (lease.spec.lease_transitions or 0) + 1
            spec |= {"holderIdentity": leader.member, "acquireTime": now, "leaseTransitions": num_transitions}
        return await self._write(self._leader_name, lease, {TERM: str(leader.term), ADDRESS: leader.address}, spec)

    async def _write_members(self, lease: _Lease, entries: list[_Entry]) -> bool:
        content = msgspec.json.encode(entries).decode()
        return await self._write(self._members_name, lease, {MEMBERS: content}, {})

    def _read(self, name: str, content: bytes) -> _Lease:
        try:
            return _Lease(content)
        except msgspec.ValidationError:
            raise self._foreign(name) from None
        except msgspec.DecodeError as error:
            raise unavailable(self._where, f"it does not answer as Kubernetes does: {error}") from None

    async def _ask(self, method: str, path: str, content: bytes | None = None) -> bytes:
        """Returns the answer. A call that got none is made once more: the server may have closed an idle connection.
        All calls here may be repeated. Raises `ClusterFault`.
        """
        try:
            return await self._call(method, path, content)
        except ClusterFault as fault:
            if not await self._server.recover(fault):
                raise
        return await self._call(method, path, content)

    async def _call(self, method: str, path: str, content: bytes | None) -> bytes:
        async with self._server.call(path, method=method, content=content) as call:
            return await call.whole()


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
