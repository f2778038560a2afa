"""The module finds the fleet of a configuration that names DNS services or pods, as the proxy would."""

from __future__ import annotations

from collections.abc import Iterable

import anyio

from pdproxy.assemble import unlike
from pdproxy.config.instances import InstanceSettings
from pdproxy.config.settings import Settings
from pdproxy.discovery.discovery import Discovery
from pdproxy.discovery.factory import make_discovery
from pdproxy.inspection.findings import Report
from pdproxy.inspection.noted import warnings_noted

FIND_S = 10.0
"""The longest time in seconds for the name servers or the cluster to name instances."""
QUIET_S = 1.0
"""Seconds in which nothing more is found, after which all is found: pods of each role are listed for themselves."""


async def find_fleet(settings: Settings, report: Report) -> tuple[InstanceSettings, ...] | None:
    """Returns the instances that are given and those that are found; None where none are looked for. Notes what keeps
    them from being found. Raises `ConfigError`."""
    discovery = make_discovery(settings)
    if discovery is None:
        return None
    given = settings.fleet()
    with warnings_noted() as said:
        await _look(discovery)
    fleet = (*given, *(one.settings for one in unlike(given, discovery.found)))
    _note(report, fleet, said)
    return fleet


async def _look(discovery: Discovery) -> None:
    with anyio.move_on_after(FIND_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(discovery.run)
            before = None
            while not discovery.has_looked or before != discovery.found:
                before = discovery.found
                await anyio.sleep(QUIET_S)
            tasks.cancel_scope.cancel()


def _note(report: Report, fleet: tuple[InstanceSettings, ...], said: Iterable[str]) -> None:
    for why in said:
        advice = "see whether this machine may ask the name server or the cluster, and what the options say of them"
        report.add("not_found", (), why, advice)
    for role in ("prefill", "decode"):
        if not any(one.role == role for one in fleet):
            advice = "see whether engines of this role are ready, and whether the options name them as they are named"
            report.add("not_found", (), f"no {role} instance was found within {FIND_S:g} s", advice)
