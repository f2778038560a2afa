"""The module plans a fleet that a file describes: what of it is started here, and how. It is the file of ``pdproxy
serve --config``.

The instances that have ``launch`` are started; the others are somewhere else, and only the proxy has to do with them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pdproxy.config import settings as config
from pdproxy.config.settings import Settings
from pdproxy.errors import ConfigError
from pdproxy.launch.errors import PreflightError
from pdproxy.launch.file_engines import FileEngines
from pdproxy.launch.fleet_plan import PROXY, FleetPlan, drain_s, no_grace, patience
from pdproxy.launch.kinds import KINDS
from pdproxy.launch.machine import Machine, environment
from pdproxy.launch.options import EVERYWHERE, RunOptions, authority
from pdproxy.launch.preflight import PortUse
from pdproxy.launch.process import Program

LOCALHOST = "127.0.0.1"


def plan_file(
    path: Path, run: RunOptions, machine: Machine, *, python: Path | None = None, proxy_args: Sequence[str] = ()
) -> FleetPlan:
    """Returns the plan of a file's fleet, and starts nothing. `python` is that of engines for which the file names
    none. Raises `PreflightError`."""
    try:
        settings = config.load(["--config", str(path), *proxy_args])
        settings.fleet()  # which looks whether they fit together
        local = [one for one in settings.instances if one.launch is not None]
        maker = FileEngines(settings, local, run, python, machine)
        engines = tuple(maker.plan(one) for one in local)
        options = maker.proxy_options()
        url = _url(settings)
    except (ConfigError, PreflightError) as error:
        raise PreflightError(f"{path}: {error}") from None
    serve = (sys.executable, "-m", "pdproxy", "serve", "--config", str(path), *no_grace(settings))
    command = (*serve, *options, *proxy_args)
    timeout_s = max(KINDS[one.engine].timeout_s for one in local) if local else KINDS["builtin"].timeout_s
    return FleetPlan(
        engines=engines,
        needs=tuple(maker.needs(one) for one in local),
        proxy=Program(name=PROXY, command=command, ready_url=f"{url}/ready", env=environment("cpu", machine)),
        ports=(*_ports(settings), *(port for engine in engines for port in engine.ports)),
        host=LOCALHOST,
        url=url,
        files={name: text for engine in engines for name, text in engine.files.items()},
        folder=maker.folder,
        tiny_model=maker.tiny_model,
        timeout_s=timeout_s * patience(len(engines), machine),
        drain_s=drain_s(settings),
    )


def _url(settings: Settings) -> str:
    """Returns the address at which this machine reaches the proxy. Raises `PreflightError` for port 0."""
    if settings.port == 0:
        raise PreflightError("port is 0, any free one, and whoever starts the proxy has to know it; name one")
    scheme = "https" if settings.ssl_certfile else "http"
    host = LOCALHOST if settings.host in EVERYWHERE else settings.host
    return f"{scheme}://{authority(host, settings.port)}"


def _ports(settings: Settings) -> Iterator[PortUse]:
    """Yields the proxy's own ports."""
    yield PortUse(settings.port, PROXY, "the file's port", _bound(settings.host))
    if signal_port := settings.signal_port(settings.fleet()):
        yield PortUse(signal_port, "KV signals", "the file's proxy_port", _bound(settings.proxy_host))


def _bound(host: str) -> str:
    """Returns a host as a socket takes it."""
    return "0.0.0.0" if host == "*" else host
