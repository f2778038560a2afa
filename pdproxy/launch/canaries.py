"""The module asks which instances have served a canary: a tiny request that the proxy sends through each before anybody
else's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import httpx

from pdproxy.launch.errors import NothingServed

INTERVAL_S = 0.2
TIMEOUT_S = 5.0
SILENT = "it does not answer"
UNKNOWN = "the proxy does not know it"


@dataclass(frozen=True, slots=True)
class Standing:
    """Standing is one instance, as the proxy sees it."""

    name: str
    is_ready: bool
    why: str
    """Holds the reason in the proxy's words, where the instance is not ready."""


async def until_served(url: str, names: Collection[str], timeout_s: float) -> tuple[Standing, ...]:
    """Waits until all of these are ready, and returns the whole fleet as it is then.

    `url` is the proxy's. Raises `NothingServed` after `timeout_s` seconds.
    """
    # An HTTP proxy from the environment has no business here, nor has a certificate: this machine started the proxy.
    async with httpx.AsyncClient(trust_env=False, verify=False, timeout=TIMEOUT_S) as client:
        deadline = time.monotonic() + timeout_s
        while True:
            fleet = await _look(client, url)
            late = [name for name in names if not any(one.name == name and one.is_ready for one in fleet)]
            if fleet and not late:
                return fleet
            if time.monotonic() > deadline:
                raise (
                    _nothing_served(late[0], fleet, timeout_s)
                    if fleet
                    else NothingServed("the proxy", timeout_s, SILENT)
                )
            # HTTP offers nothing to wait on, so it is asked again.
            await asyncio.sleep(INTERVAL_S)


async def served_models(url: str) -> tuple[list[str], bool]:
    """Returns the names of the models that the proxy at `url` serves, and whether its clients need a key: then it does
    not tell the names, and the list is empty."""
    async with httpx.AsyncClient(trust_env=False, verify=False, timeout=TIMEOUT_S) as client:
        try:
            reply = await client.get(f"{url}/v1/models")
            return [card["id"] for card in reply.json().get("data", ())], reply.status_code == httpx.codes.UNAUTHORIZED
        except (httpx.TransportError, ValueError):
            return [], False


def _nothing_served(name: str, fleet: Iterable[Standing], timeout_s: float) -> NothingServed:
    return NothingServed(name, timeout_s, next((one.why for one in fleet if one.name == name), UNKNOWN))


async def _look(client: httpx.AsyncClient, url: str) -> tuple[Standing, ...]:
    """Returns the fleet as the proxy tells it, or an empty tuple where the proxy does not answer just now."""
    try:
        status: dict[str, Any] = (await client.get(f"{url}/status")).json()
    except (httpx.TransportError, ValueError):
        return ()
    return tuple(
        Standing(one["name"], one["state"] == "ready", str(one["why"] or one["state"])) for one in status["fleet"]
    )
