"""The module keeps the store in etcd, 3.4 or later, by way of its JSON gateway: no gRPC is needed.

A lead is a key under a lease. A lease lives at least as long as asked: etcd rounds up to whole seconds, and to the
shortest that it knows. (Older releases may end it too soon where one of etcd's members hung: etcd issue 15247.) A
renewal is the lease's keep-alive and then a read that a majority of these members confirms: the key was still there
after the keep-alive. A new lease at each renewal would make a new revision each time, which etcd keeps until somebody
compacts.
"""

from __future__ import annotations

import math
import ssl
import time
from base64 import b64encode
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

import httpx
import msgspec

from pdproxy.coordination.store import MAX_TERM, UNREADABLE, Leader, Member, bounded, check_seen, foreign, unavailable
from pdproxy.errors import ConfigError, StoreUnavailable

DEFAULT_PORT = 2379
MAX_ROUNDS = 8
"""The times that one call looks again because another member was faster."""
_TLS_OPTIONS = ("ca", "cert", "key")
_UNAUTHENTICATED = 16
_NEXT_MAY_HELP = (500, 502, 503, 504)


class _Pair(msgspec.Struct):
    """A `_Pair` is one key with its value. msgspec undoes base64 where the type is bytes."""

    key: bytes
    value: bytes = b""
    lease: int = 0
    mod_revision: int = 0


class _Range(msgspec.Struct):
    kvs: list[_Pair] = []


class _Result(msgspec.Struct):
    response_range: _Range | None = None


class _Transaction(msgspec.Struct):
    succeeded: bool = False
    responses: list[_Result] = []


class _Lease(msgspec.Struct):
    id: int = msgspec.field(name="ID", default=0)
    ttl_s: int = msgspec.field(name="TTL", default=0)


class _KeptAlive(msgspec.Struct):
    result: _Lease


class _Token(msgspec.Struct):
    token: str


class _Anything(msgspec.Struct):
    pass


class _Fault(msgspec.Struct):
    code: int = 0
    message: str = ""
    error: str = ""


class _FailedError(Exception):
    """`_FailedError` says that one endpoint did not do what was asked. `can_repeat`: another endpoint may."""

    def __init__(self, what: str, *, can_repeat: bool = False, needs_token: bool = False) -> None:
        super().__init__(what)
        self.can_repeat = can_repeat
        self.needs_token = needs_token


T = TypeVar("T")


class EtcdStore:
    """Implements `store.Store`. Mutable state: the client's connections; which endpoint answered last; the token of the
    user, where there is one; the lease under which this object has put each key.
    """

    __slots__ = ("_at", "_client", "_endpoints", "_leases", "_prefix", "_timeout_s", "_token", "_user", "_where")

    def __init__(self, url: str, fleet: str, *, timeout_s: float) -> None:
        """Takes ``etcd[s]://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]…][?ca=FILE&cert=FILE&key=FILE]``. Raises
        `ConfigError` where the URL cannot be used.
        """
        self._timeout_s = timeout_s
        self._prefix = f"pdproxy/{fleet}/"
        self._endpoints, self._user, verify = _read_url(url)
        self._where = f"{url.partition('://')[0]}://{','.join(urlsplit(one).netloc for one in self._endpoints)}"
        # Each endpoint gets its share, so that one which hangs leaves time for the others.
        share_s = timeout_s / len(self._endpoints)
        self._client = httpx.AsyncClient(verify=verify, trust_env=False, timeout=share_s)
        self._at = 0
        self._token: str | None = None
        self._leases: dict[str, _Lease] = {}

    async def hold(self, member: str, address: str, *, seen: int, ttl_s: float) -> Leader:
        check_seen(seen)
        with bounded(self._timeout_s, self._where):
            for _ in range(MAX_ROUNDS):
                leader = await self._hold_once(member, address, seen, ttl_s)
                if leader is not None:
                    return leader
        raise unavailable(self._where, f"others changed the leader {MAX_ROUNDS} times meanwhile")

    async def look(self) -> Leader | None:
        with bounded(self._timeout_s, self._where):
            (found,) = await self._read("leader")
        return None if found is None else self._leader(found)

    async def release(self, leader: Leader) -> None:
        self._leases.pop("leader", None)
        with bounded(self._timeout_s, self._where):
            is_it = self._compare("leader", "VALUE", value=_base64(msgspec.json.encode(leader)))
            await self._transact([is_it], [{"request_delete_range": {"key": self._key("leader")}}])

    async def enter(self, member: Member, ttl_s: float) -> None:
        name, value = f"members/{member.id}", msgspec.json.encode(member)
        with bounded(self._timeout_s, self._where):
            lease = await self._renewed(name, ttl_s)
            if lease is not None:
                (found,) = await self._read(name)
                if found is not None and found.lease == lease.id and found.value == value:
                    return
            lease = await self._granted(name, ttl_s)
            await self._transact([], [self._put(name, value, lease)])

    async def leave(self, member_id: str) -> None:
        self._leases.pop(f"members/{member_id}", None)
        with bounded(self._timeout_s, self._where):
            key = self._key(f"members/{member_id}")
            await self._transact([], [{"request_delete_range": {"key": key}}])

    async def members(self) -> list[Member]:
        # "0" is the character behind "/": up to there, every key begins with "members/".
        with bounded(self._timeout_s, self._where):
            content = {"key": self._key("members/"), "range_end": self._key("members0")}
            found = await self._call("kv/range", content, _Range)
        try:
            present = [msgspec.json.decode(pair.value, type=Member) for pair in found.kvs]
        except msgspec.DecodeError:
            raise foreign(self._where, f"{self._prefix}members/") from None
        return sorted(present, key=lambda member: member.id)

    async def secret(self, proposed: str) -> str:
        key = {"key": self._key("secret")}
        with bounded(self._timeout_s, self._where):
            unless = [{"request_range": key}]
            done = await self._transact([self._absent("secret")], [self._put("secret", proposed.encode())], unless)
        if done.succeeded:
            return proposed
        pairs = self._pairs(done)
        if not pairs or pairs[0] is None:
            raise unavailable(self._where, "it does not answer as etcd does")
        try:
            return pairs[0].value.decode()
        except UnicodeDecodeError:
            raise foreign(self._where, f"{self._prefix}secret") from None

    async def aclose(self) -> None:
        with suppress(StoreUnavailable, httpx.HTTPError, OSError), bounded(self._timeout_s, self._where):
            await self._client.aclose()

    # ── leading ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _hold_once(self, member: str, address: str, seen: int, ttl_s: float) -> Leader | None:
        """Returns who leads, or None where another member changed that meanwhile."""
        # The lease first: what is read after it tells that the key outlived the keep-alive.
        lease = await self._renewed("leader", ttl_s)
        found, counter = await self._read("leader", "term")
        if found is None:
            return await self._begin(member, address, seen, ttl_s, counter)
        leader = self._leader(found)
        if leader.member != member:
            self._leases.pop("leader", None)  # it must not be kept alive for nothing
            return leader
        if lease is not None and found.lease == lease.id:
            return leader
        # The key is under a lease that ends too soon, or that this object does not know.
        lease = await self._granted("leader", ttl_s)
        done = await self._transact([self._unchanged("leader", found)], [self._put("leader", found.value, lease)])
        return leader if done.succeeded else None

    async def _begin(self, member: str, address: str, seen: int, ttl_s: float, counter: _Pair | None) -> Leader | None:
        known = time.time_ns() // 1_000_000 if counter is None else self._term(counter)
        leader = Leader(max(known, seen) + 1, member, address)
        lease = await self._granted("leader", ttl_s)
        conditions = [self._absent("leader")]
        conditions += [self._absent("term") if counter is None else self._unchanged("term", counter)]
        puts = [self._put("leader", msgspec.json.encode(leader), lease), self._put("term", b"%d" % leader.term)]
        done = await self._transact(conditions, puts)
        return leader if done.succeeded else None

    def _leader(self, found: _Pair) -> Leader:
        try:
            leader = msgspec.json.decode(found.value, type=Leader)
        except msgspec.DecodeError:
            raise foreign(self._where, f"{self._prefix}leader") from None
        if not found.lease:  # it would lead for ever
            raise foreign(self._where, f"{self._prefix}leader")
        return leader

    def _term(self, counter: _Pair) -> int:
        if not counter.value.isdigit() or int(counter.value) >= MAX_TERM:
            raise foreign(self._where, f"{self._prefix}term")
        return int(counter.value)

    async def _renewed(self, name: str, ttl_s: float) -> _Lease | None:
        """Returns the lease under which this object has put the key, alive for `ttl_s` from now on, or None."""
        lease = self._leases.pop(name, None)
        if lease is None or lease.ttl_s < ttl_s:
            return None
        kept = await self._call("lease/keepalive", {"ID": lease.id}, _KeptAlive)
        if kept.result.ttl_s < ttl_s:
            return None
        self._leases[name] = lease
        return lease

    async def _granted(self, name: str, ttl_s: float) -> _Lease:
        lease = await self._call("lease/grant", {"TTL": math.ceil(ttl_s)}, _Lease)
        if lease.ttl_s < ttl_s:
            raise unavailable(self._where, f"it granted a lease of {lease.ttl_s} s where {ttl_s:g} s were asked for")
        self._leases[name] = lease
        return lease

    # ── keys and transactions ───────────────────────────────────────────────────────────────────────────────────

    def _key(self, name: str) -> str:
        return _base64(f"{self._prefix}{name}".encode())

    def _compare(self, name: str, target: str, **what: str | int) -> dict[str, Any]:
        return {"key": self._key(name), "target": target, "result": "EQUAL", **what}

    def _absent(self, name: str) -> dict[str, Any]:
        return self._compare(name, "CREATE", create_revision=0)

    def _unchanged(self, name: str, found: _Pair) -> dict[str, Any]:
        return self._compare(name, "MOD", mod_revision=found.mod_revision)

    def _put(self, name: str, value: bytes, lease: _Lease | None = None) -> dict[str, Any]:
        return {"request_put": {"key": self._key(name), "value": _base64(value), "lease": lease.id if lease else 0}}

    async def _read(self, *names: str) -> list[_Pair | None]:
        """Returns what the keys hold, all at one moment, None for each that is absent."""
        done = await self._transact([], [{"request_range": {"key": self._key(name)}} for name in names])
        pairs = self._pairs(done)
        if len(pairs) != len(names):
            raise unavailable(self._where, "it does not answer as etcd does")
        return pairs

    def _pairs(self, done: _Transaction) -> list[_Pair | None]:
        ranges = [one.response_range for one in done.responses if one.response_range is not None]
        return [one.kvs[0] if one.kvs else None for one in ranges]

    async def _transact(
        self,
        conditions: list[dict[str, Any]],
        then: list[dict[str, Any]],
        otherwise: list[dict[str, Any]] | None = None,
    ) -> _Transaction:
        content = {"compare": conditions, "success": then, "failure": otherwise or []}
        return await self._call("kv/txn", content, _Transaction)

    # ── HTTP ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _call(self, path: str, content: dict[str, Any], kind: type[T]) -> T:
        """Returns the answer of the first endpoint that gives one. Each is tried twice: it may have closed an idle
        connection. All calls here may be repeated.
        """
        failure = _FailedError("")
        for _ in range(2 * len(self._endpoints)):
            try:
                if self._user is not None and self._token is None:
                    name, password = self._user
                    answer = await self._post("auth/authenticate", {"name": name, "password": password}, _Token)
                    self._token = answer.token
                return await self._post(path, content, kind)
            except _FailedError as error:
                failure = error
            if failure.needs_token and self._token is not None:
                self._token = None
            elif failure.can_repeat:
                self._at = (self._at + 1) % len(self._endpoints)
            else:
                break
        raise unavailable(self._where, str(failure))

    async def _post(self, path: str, content: dict[str, Any], kind: type[T]) -> T:
        headers = {} if self._token is None else {"authorization": self._token}
        try:
            answer = await self._client.post(
                f"{self._endpoints[self._at]}/v3/{path}", content=msgspec.json.encode(content), headers=headers
            )
        except StoreUnavailable:
            raise
        except Exception as error:  # httpx passes on what an event loop says of a connection that was closed just then
            raise _FailedError(str(error) or type(error).__name__, can_repeat=True) from None
        if answer.status_code != 200:
            raise _failed(answer)
        try:
            return msgspec.json.decode(answer.content, type=kind, strict=False)
        except msgspec.DecodeError as error:
            raise _FailedError(f"it does not answer as etcd does: {error}") from None


def _failed(answer: httpx.Response) -> _FailedError:
    try:
        fault = msgspec.json.decode(answer.content, type=_Fault)
    except msgspec.DecodeError:
        fault = _Fault()
    what = fault.message or fault.error or f"HTTP {answer.status_code}"
    return _FailedError(
        what,
        can_repeat=answer.status_code in _NEXT_MAY_HELP,
        # The second one is what a token of before any change of users and roles gets.
        needs_token=fault.code == _UNAUTHENTICATED or "auth store is old" in what,
    )


def _base64(content: bytes) -> str:
    return b64encode(content).decode("ascii")


def _read_url(url: str) -> tuple[list[str], tuple[str, str] | None, ssl.SSLContext | bool]:
    """Returns the endpoints, the user with the password, and what httpx verifies with. Raises `ConfigError`."""
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
        login, _, hosts = parts.netloc.rpartition("@")
        scheme = "https" if parts.scheme == "etcds" else "http"
        endpoints = [_endpoint(scheme, host) for host in hosts.split(",")]
        if unknown := sorted(options.keys() - set(_TLS_OPTIONS if scheme == "https" else ())):
            raise ValueError(
                f"it has the option {unknown[0]!r}; etcds:// takes {', '.join(_TLS_OPTIONS)}, etcd:// none"
            )
        if parts.path not in ("", "/") or parts.fragment:
            raise ValueError("nothing may follow the hosts but ?OPTIONS")
        verify: ssl.SSLContext | bool = True
        if scheme == "https":
            verify = ssl.create_default_context(cafile=options.get("ca"))
            if "cert" in options:
                verify.load_cert_chain(options["cert"], options.get("key"))
    except (ValueError, OSError) as error:  # an ssl.SSLError is an OSError
        raise ConfigError(f"coordinator: the URL cannot be used: {error}") from None
    name, _, password = login.partition(":")
    return endpoints, (unquote(name), unquote(password)) if login else None, verify


def _endpoint(scheme: str, host: str) -> str:
    try:
        parts = urlsplit(f"{scheme}://{host}")
        port = parts.port
    except ValueError:
        raise ValueError(UNREADABLE) from None
    if not parts.hostname:
        raise ValueError("a host is missing")
    return f"{scheme}://{host}" if port else f"{scheme}://{host}:{DEFAULT_PORT}"
