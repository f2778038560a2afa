"""The module finds out whether anything is still held: it adds up what the proxy and every engine say of themselves."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from scripts.dev.soak.plan import Plan

LOOK_INTERVAL_S = 0.25


@dataclass(slots=True)
class LeakCheck:
    """LeakCheck is one look at what every process still holds."""

    num_held: int = 0
    """Counts the slots that the proxy counts as held, and the requests and orphans that it still has."""
    num_leaked: int = 0
    """Counts the pages of PD buffers and KV caches, the requests and the pushes that engines still have."""
    num_tasks: int = 0
    are_all_ready: bool = False
    where: list[str] = field(default_factory=list)
    """Holds what is still held and by which process, in words."""

    @property
    def are_clear(self) -> bool:
        return not self.num_held and not self.num_leaked and self.are_all_ready


async def look(plan: Plan) -> LeakCheck:
    """Returns what is held now. Raises `httpx.HTTPError` where a process does not answer."""
    leaks = LeakCheck()
    async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
        _read_proxy(leaks, await _get(client, f"{plan.url}/status"))
        for engine in plan.engines:
            buffer = await _get(client, f"{engine.url}/kv_buffer")
            _read_engine(leaks, engine.name, buffer, await _get(client, f"{engine.url}/statistics"))
    return leaks


async def until_clear(plan: Plan, timeout_s: float) -> LeakCheck:
    """Returns the first look that finds nothing, else the last one in time."""
    deadline = time.monotonic() + timeout_s
    # HTTP offers nothing to wait on, so it is asked again.
    while not (leaks := await look(plan)).are_clear and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(LOOK_INTERVAL_S)
    return leaks


def _read_proxy(leaks: LeakCheck, status: dict[str, Any]) -> None:
    leaks.num_tasks = status["tasks"]
    leaks.are_all_ready = all(one["state"] == "ready" for one in status["fleet"])
    leaks.where += [f"{one['name']} is {one['state']}: {one['why']}" for one in status["fleet"] if one["why"]]
    for name, ledger in status["ledger"].items():
        _note(leaks, f"slots of {name}", held=ledger["held"])
        _note(leaks, f"the ledger of {name}", held=ledger["granted"] - ledger["returned"] - ledger["held"])
    _note(leaks, "requests in flight", held=len(status["in_flight"]))


def _read_engine(leaks: LeakCheck, name: str, buffer: dict[str, Any], statistics: dict[str, Any]) -> None:
    cache = statistics["cache_pages"]
    _note(leaks, f"PD buffer of {name}", leaked=buffer["num_pages"] - buffer["num_free"])
    _note(leaks, f"attempts that wait for pages of {name}", leaked=buffer["num_queued"])
    _note(leaks, f"KV cache of {name}", leaked=cache["total"] - cache["free"])
    _note(leaks, f"requests of {name}", leaked=statistics["requests"])
    _note(leaks, f"pushes of {name}", leaked=statistics["pushes"])


def _note(leaks: LeakCheck, what: str, *, held: int = 0, leaked: int = 0) -> None:
    leaks.num_held += abs(held)
    leaks.num_leaked += leaked
    if held or leaked:
        leaks.where.append(f"{what}: {held or leaked}")


async def _get(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    response = await client.get(url)
    response.raise_for_status()
    content: dict[str, Any] = response.json()
    return content
