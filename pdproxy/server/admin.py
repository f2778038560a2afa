"""The admin API changes the fleet by hand while it works. It is off unless it has a key of its own."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from pdproxy.config.instances import InstanceSettings
from pdproxy.errors import AdminOff, BodyTooLarge, InvalidRequest
from pdproxy.fleet.membership import Membership
from pdproxy.fleet.pool import Pool
from pdproxy.server.api_keys import ApiKeys

MAX_BODY_BYTES = 64 * 1024
PATH = "/admin/instances"
_TRUE = frozenset({"", "1", "true", "yes"})
_FALSE = frozenset({"0", "false", "no"})


def admin_router(pool: Pool, membership: Membership, keys: ApiKeys) -> APIRouter:
    """Returns the routes under ``/admin/instances``. With `keys` that are open to everybody, each is answered 403.

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
        instance = membership.add(_settings(await _body(request)))
        return _json(instance.status(), 201)

    @router.post(PATH + "/{name:path}/drain")
    async def drain_instance(request: Request, name: str) -> Response:
        check(request)
        return _json(membership.drain(name).status())

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
    if settings.launch is not None:
        raise InvalidRequest("launch: the proxy starts no engines; pdproxy up does, those in its file", param="launch")
    return settings


def _is_forced(request: Request) -> bool:
    value = request.query_params.get("force", "false").lower()
    if value not in _TRUE | _FALSE:
        raise InvalidRequest(f"force: {value!r} is neither true nor false", param="force")
    return value in _TRUE


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
