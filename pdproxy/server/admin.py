"""The admin API changes the fleet by hand while it works. It is off unless it has a key of its own."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from pdproxy.config.instances import InstanceSettings, is_link_local, is_place
from pdproxy.config.values import Role
from pdproxy.errors import AdminOff, BodyTooLarge, InvalidRequest
from pdproxy.fleet.membership import Membership
from pdproxy.fleet.pool import Pool
from pdproxy.fleet.role_changes import RoleChanges
from pdproxy.server.api_keys import ApiKeys

MAX_BODY_BYTES = 64 * 1024
PATH = "/admin/instances"
RESOLVE_S = 3.0
"""The most seconds in which the addresses of a new instance's name are looked up."""
_TRUE = frozenset({"", "1", "true", "yes"})
_FALSE = frozenset({"0", "false", "no"})


class _WantedRole(msgspec.Struct, forbid_unknown_fields=True):
    role: Role


_wanted_role = msgspec.json.Decoder(_WantedRole)


def admin_router(
    pool: Pool, membership: Membership, roles: RoleChanges, keys: ApiKeys, *, allow_link_local: bool
) -> APIRouter:
    """Returns the routes under ``/admin/instances``. With `keys` that are open to everybody, each is answered 403.

    Unless `allow_link_local`, no instance is added at a link-local address, nor at that of a cloud's metadata service.
    Errors are raised as `ProxyError`, for the app to answer.
    """
    router = APIRouter()

    def check(request: Request) -> None:
        if keys.is_open:
            raise AdminOff("the admin API is off; start the proxy with --admin-key or --admin-key-file to use it")
        keys.check(request.headers)

    @router.get(PATH)
    async def list_instances(request: Request) -> Response:
        check(request)
        return _json({"object": "list", "data": pool.status()})

    @router.post(PATH)
    async def add_instance(request: Request) -> Response:
        check(request)
        settings = _settings(await _body(request))
        if not allow_link_local:
            await _check_addresses(settings)
        return _json(membership.add(settings).status(), 201)

    @router.post(PATH + "/{name:path}/drain")
    async def drain_instance(request: Request, name: str) -> Response:
        check(request)
        return _json(membership.drain(name).status())

    @router.post(PATH + "/{name:path}/resume")
    async def resume_instance(request: Request, name: str) -> Response:
        check(request)
        return _json(membership.resume(name).status())

    @router.post(PATH + "/{name:path}/role")
    async def change_role(request: Request, name: str) -> Response:
        check(request)
        wanted = _role(await _body(request))
        return _json(roles.change(name, wanted, force=_is_forced(request)).status(), 202)

    @router.delete(PATH + "/{name:path}")
    async def remove_instance(request: Request, name: str) -> Response:
        check(request)
        instance = membership.remove(name, force=_is_forced(request))
        await membership.sweep()
        return _json(instance.status() | {"leaving": instance in pool.leaving})

    return router


async def _body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLarge(f"the request body is larger than {MAX_BODY_BYTES} bytes")
    return body


def _settings(body: bytes) -> InstanceSettings:
    """Returns the settings in `body`. Raises `InvalidRequest` that names the field."""
    try:
        settings = InstanceSettings.model_validate_json(body)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(str(part) for part in wrong["loc"]) or None
        known = ", ".join(InstanceSettings.model_fields)
        what = f"there is no such field; there are {known}" if wrong["type"] == "extra_forbidden" else wrong["msg"]
        raise InvalidRequest(f"{field or 'the body'}: {what}", param=field) from None
    if len(settings.ranks()) > 1:
        raise InvalidRequest(
            "data_parallel_size: each rank is an instance of its own; add one at a time, and name its "
            "data_parallel_rank",
            param="data_parallel_size",
        )
    if settings.launch is not None:
        raise InvalidRequest("launch: the proxy starts no engines; pdproxy up does, those in its file", param="launch")
    return settings


def _role(body: bytes) -> Role:
    """Returns the role that `body` asks for. Raises `InvalidRequest`."""
    try:
        return _wanted_role.decode(body).role
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f'role: the body must be {{"role": "prefill"}} or {{"role": "decode"}}: {error}'
        raise InvalidRequest(message, param="role") from None


async def _check_addresses(settings: InstanceSettings) -> None:
    """Raises `InvalidRequest` where the proxy or its engines would be sent to a link-local address. A name that cannot
    be resolved is let pass: its instance stays down for now."""
    if not is_place(settings.url):
        return  # which is said when it is added
    hosts = {
        "url": urlsplit(settings.url).hostname,
        "receiver_host": settings.receiver_host,
        "kv_events": urlsplit(settings.kv_events).hostname if settings.kv_events else None,
        "kv_events_replay": urlsplit(settings.kv_events_replay).hostname if settings.kv_events_replay else None,
    }
    for field, host in hosts.items():
        if host is not None and any(map(is_link_local, (host, *await _addresses(host)))):
            raise InvalidRequest(
                f"{field}: {host} is a link-local address or one of a metadata service; start the proxy with "
                "--allow-link-local where an engine is there",
                param=field,
            )


async def _addresses(host: str) -> list[str]:
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, None)
    except (OSError, UnicodeError, TimeoutError):  # `UnicodeError`: no name that could be asked for
        return []
    return [str(address[0]) for _, _, _, _, address in found]


def _is_forced(request: Request) -> bool:
    value = request.query_params.get("force", "false").lower()
    if value not in _TRUE | _FALSE:
        raise InvalidRequest(f"force: {value!r} is neither true nor false", param="force")
    return value in _TRUE


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
