"""The module is the command line of ``pdproxy check``."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

from pdproxy.config.instances import InstanceSettings
from pdproxy.config.settings import Settings, load
from pdproxy.errors import ConfigError
from pdproxy.inspection.findings import Report
from pdproxy.inspection.fleet_check import FleetCheck
from pdproxy.inspection.found_fleet import find_fleet
from pdproxy.inspection.running_proxy import ProxyStatus, RunningProxy, fleet_of, read_page
from pdproxy.telemetry import log
from transfer.command_line.commands import did_you_mean
from transfer.command_line.json_file import console_beside, write_json
from transfer.trust import read_secrets

SOMETHING_IS_WRONG = 1
"""The exit status where something is to be put right; 2 where the check could not be made."""


def check(
    arguments: Sequence[str],
    *,
    own_flags: Sequence[str],
    url: str | None,
    max_pairs: int,
    limit_s: float,
    key_file: Path | None,
    json_file: Path | None,
) -> int:
    """Checks the fleet that the arguments name, or that of the proxy at `url`. Returns the exit status.

    Raises `ConfigError`, `AskFailed` where the proxy cannot be asked, and `TransferError` and `OSError` for files.
    """
    key = None if key_file is None else read_secrets(key_file).strip()
    settings = _load(arguments, own_flags)
    log.configure(settings.log_level if "log_level" in settings.model_fields_set else "error", settings.log_format)
    report = asyncio.run(_checked(settings, url=url, max_pairs=max_pairs, limit_s=limit_s, key=key))
    write_json(json_file, report.as_json())
    report.print_to(console_beside(json_file))
    return 0 if report.is_good else SOMETHING_IS_WRONG


def _load(arguments: Sequence[str], own_flags: Sequence[str]) -> Settings:
    """Returns the settings. Raises `ConfigError`, which suggests one of the command's own flags where that may be
    meant."""
    try:
        return load(arguments)
    except ConfigError as error:
        _, unknown, words = str(error).partition("unrecognized arguments: ")
        meant = did_you_mean([word for word in words.split() if word.startswith("--")], own_flags) if unknown else ""
        raise ConfigError(f"{error} ({meant})" if meant else str(error)) from None


async def _checked(settings: Settings, *, url: str | None, max_pairs: int, limit_s: float, key: str | None) -> Report:
    if url is None:
        report = Report(str(settings.config) if settings.config is not None else "configuration")
        fleet = await find_fleet(settings, report)
        checking = FleetCheck(settings, report, fleet=fleet, max_pairs=max_pairs, limit_s=limit_s)
    else:
        report = Report(url)
        async with RunningProxy(url, key=key) as proxy:
            status = read_page(url, await proxy.page())
            models = await proxy.models()
        _note_proxy(report, status, models)
        fleet = fleet_of(status, _known(settings))
        if not fleet:
            raise ConfigError(f"--url: the proxy at {url} has no instances")
        checking = FleetCheck(settings, report, fleet=fleet, is_beside_proxy=True, max_pairs=max_pairs, limit_s=limit_s)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, checking.stop)
    await checking.run()
    return report


def _known(settings: Settings) -> tuple[InstanceSettings, ...]:
    """Returns the instances that the options name, which may be none."""
    try:
        return settings.fleet()
    except ConfigError:
        return settings.instances


def _note_proxy(report: Report, status: ProxyStatus, models: list[str] | None) -> None:
    """Notes what the proxy itself says is wrong."""
    for one in status.fleet:
        if one.leaving:
            continue
        if one.state != "ready":
            advice = "where nothing else is said of it here, the proxy cannot reach it and this machine can"
            report.add("proxy", (one.name,), f"the proxy says that it is {one.state}: {one.why}", advice)
        elif one.draining:
            advice = "resume it with POST /admin/instances/NAME/resume"
            report.add("proxy", (one.name,), "it is draining: it gets no new requests", advice, is_warning=True)
        elif not one.routable:
            why = f"the proxy leaves it alone: its breaker is {one.breaker.state}"
            report.add("proxy", (one.name,), why, "see the proxy's log for its faults")
        if one.foreign:
            why = f"{one.foreign} of its pages are in use by somebody else, or were when the proxy was started"
            advice = "let one proxy, or one fleet of replicas, admit for a decoder; soon after a start, wait"
            report.add("proxy", (one.name,), why, advice, is_warning=True)
    if status.draining or status.leaving:
        report.add("proxy", (), "the proxy is shutting down", "check the one that takes its place")
    elif not status.ready:
        report.add("proxy", (), "the proxy serves no requests: /ready is 503", "see what is wrong with its instances")
    if models is None:
        why = "its models are not known: /v1/models asks for a key"
        report.add("key", (), why, "give a client's key with --key-file", is_warning=True)
    elif not models and status.ready:
        report.add("proxy", (), "the proxy serves no model", "see what is wrong with its instances")
