"""The module finds NIXL and creates its agents. All that differs between NIXL's releases is settled here.

NIXL's Python class starts its progress thread with a delay of 0 µs, which spins on a whole core, and its config object
has no field for it. The binding's config has one (`pthrDelay`), so that is what we set. A feature that a release lacks
is found missing by looking for it; only the range of releases whose behaviour was measured goes by version.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import re
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import torch

from transfer.agents.device import current
from transfer.agents.nixl_options import NixlOptions
from transfer.errors import TransferError

log = logging.getLogger(__name__)

MIN_VERSION = (1, 3)
BEFORE_VERSION = (2, 0)
RANGE = "nixl>=1.3,<2"
PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
"""The names of NIXL's packages. The first picks the build for the CUDA at hand. The other two are those builds, which
may be installed alone."""


def create_agent(epoch: str, *, receives: bool, options: NixlOptions, device: torch.device) -> Any:
    """Returns a `nixl_agent` with the backends of `options`, which can be used safely beside its progress thread.

    It is created while `device` is current: UCX looks at that moment which lanes there are.

    Raises `TransferError` where NIXL is missing, of a release outside the range, or lacks a backend.
    """
    api = load_api()
    settings: dict[str, Any] = {"enable_prog_thread": receives, "backends": []}  # they get their options below
    if "sync_mode" in inspect.signature(api.nixl_agent_config).parameters and hasattr(api, "nixl_thread_sync_t"):
        settings["sync_mode"] = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    bindings = importlib.import_module(f"{api.__name__.rpartition('.')[0]}._bindings")
    with current(device):
        with _progress_delay(bindings, options.progress_delay_us):
            agent = api.nixl_agent(epoch, api.nixl_agent_config(**settings))
        for backend in options.backends:
            _create_backend(agent, backend, options.of(backend))
    return agent


def load_api() -> Any:
    """Returns NIXL's Python module, whichever package it comes in. Raises `TransferError` where there is none, or one
    of a release outside the range."""
    reasons = []
    for package in PACKAGES:
        try:
            api = importlib.import_module(f"{package}._api")
        except ImportError as error:
            reasons.append(str(error))
            continue
        check_version(api.__name__.partition(".")[0])
        return api
    raise TransferError(f"the KV transfer needs NIXL: pip install '{RANGE}' ({'; '.join(reasons)})")


def check_version(package: str, version_of: Callable[[str], str] = metadata.version) -> None:
    """Raises `TransferError` unless the installed distribution of `package` (or of ``nixl``) is in the range."""
    for distribution in (package.replace("_", "-"), "nixl"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            version = version_of(distribution)
            numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
            if not MIN_VERSION <= numbers < BEFORE_VERSION:
                raise TransferError(f"{distribution} {version} is installed; the KV transfer works with {RANGE}")
            return
    log.warning("NIXL was not installed as a package: its version is not known (it should be %s)", RANGE)


def _create_backend(agent: Any, backend: str, options: dict[str, str]) -> None:
    available = sorted(agent.get_plugin_list())
    if backend not in available:
        raise TransferError(f"this NIXL has no backend {backend!r}; it has {', '.join(available)}")
    try:
        agent.create_backend(backend, options)
    except Exception as error:  # border to NIXL
        raise TransferError(f"NIXL could not create its backend {backend} with {options}: {error}") from error


@contextlib.contextmanager
def _progress_delay(bindings: Any, delay_us: int) -> Iterator[None]:
    """Returns a context manager. While it is open, agents are created with this progress delay instead of 0.

    NIXL's class writes the 0 into the binding's config object. A subclass that keeps our value takes the place of that
    class meanwhile. A binding without the attribute is left alone.
    """
    original = bindings.nixlAgentConfig
    if not hasattr(original, "pthrDelay"):
        log.warning("this NIXL release cannot set its progress delay: an idle receiver will use a whole core")
        yield
        return

    class Patient(original):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, delay_us if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = Patient
    try:
        yield
    finally:
        bindings.nixlAgentConfig = original
