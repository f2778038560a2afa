"""The floors: a module imports only from its own floor or below, and the two packages meet at one door."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from pdproxy.config.values import Engine

ROOT = Path(__file__).parents[1]

FLOORS = (
    # the proxy
    "pdproxy.compiled.stamp",
    "pdproxy.compiled.choice",
    "pdproxy",
    "pdproxy.errors",
    "pdproxy.ids",
    "pdproxy.aio",
    "pdproxy.openai",
    "pdproxy.config",
    "pdproxy.admission",
    "pdproxy.tokens",
    "pdproxy.kv_events",
    "pdproxy.engines",
    "pdproxy.fleet",
    "pdproxy.discovery",
    "pdproxy.coordination",
    "pdproxy.kv_signals",
    "pdproxy.telemetry",
    "pdproxy.orchestrator",
    "pdproxy.server",
    "pdproxy.dashboard",
    "pdproxy.assemble",
    "pdproxy.serve",
    "pdproxy.fronts",
    "pdproxy.inspection",
    "pdproxy.launch",
    "pdproxy.loadtest",
    "pdproxy.simulate",
    "pdproxy.compiled",
    "pdproxy.cli",
    "pdproxy.__main__",
    # the transfer
    "transfer.errors",
    "transfer.without_torch",
    "transfer.logs",
    "transfer.command_line",
    "transfer.memory_budget",
    "transfer.geometry",
    "transfer.descriptors",
    "transfer.bounded_connection",
    "transfer.trust",
    "transfer.wire",
    "transfer.child_process",
    "transfer.agents.base",
    "transfer.agents.spans",
    "transfer.plan",
    "transfer.memory",
    "transfer.agents",
    "transfer.roles",
    "transfer.dataplane",
    "transfer.engine",
    "transfer.connectors",
    "transfer",
)
"""From the ground up. A folder imports from itself and from those before it. The longest name counts for a module."""
DOOR = {
    "transfer.bounded_connection",
    "transfer.descriptors",
    "transfer.errors",
    "transfer.geometry",
    "transfer.logs",
    "transfer.memory_budget",
    "transfer.trust",
    "transfer.wire",
    "transfer.without_torch",
    "transfer",
}
"""All of `transfer` that `pdproxy` may see; `transfer` itself only as `from transfer import wire, logs`."""
HEAVY = {"torch", "nixl", "nixl_cu12", "nixl_cu13", "safetensors"}
NO_IO = {
    "httpx",
    "httpx2",
    "dns",
    "zmq",
    "uvicorn",
    "fastapi",
    "starlette",
    "socket",
    "subprocess",
    "requests",
    "aiohttp",
}


def modules(package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = dict([*modules("pdproxy"), *modules("transfer")])


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module imported anywhere in the file, those for type checking included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            submodules = {f"{module}.{alias.name}" for alias in node.names} & MODULES.keys()
            found |= submodules or {module}
    return frozenset(found)


def floor(module: str) -> int:
    found = module
    while found not in FLOORS:
        found = found.rpartition(".")[0]
    assert found == module or "." in found, f"{module} stands on no floor: add its folder to FLOORS"
    return FLOORS.index(found)


def package(module: str) -> str:
    return module.partition(".")[0]


def of(name: str) -> dict[str, frozenset[str]]:
    """Returns what each module of one of our packages imports."""
    found = {module: imports(path) for module, path in MODULES.items() if package(module) == name}
    assert len(found) > 50, "where have they gone?"
    return found


def offenders(found: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Returns those modules for which there is anything, with what there is."""
    return {module: sorted(names) for module, names in found.items() if names}


@pytest.mark.parametrize("name", ["pdproxy", "transfer"])
def test_imports_point_down(name: str) -> None:
    ours = {module: {one for one in names if package(one) == name} for module, names in of(name).items()}
    assert not offenders(
        {module: [one for one in names if floor(one) > floor(module)] for module, names in ours.items()}
    ), "these modules import from floors above their own"


def test_transfer_knows_nothing_of_the_proxy() -> None:
    assert not offenders(
        {module: [one for one in names if package(one) == "pdproxy"] for module, names in of("transfer").items()}
    )


def test_the_one_door() -> None:
    def is_let_in(name: str) -> bool:
        is_below = name.startswith(("transfer.command_line.", "transfer.geometry."))
        return package(name) != "transfer" or is_below or name in DOOR

    assert not offenders(
        {module: [one for one in names if not is_let_in(one)] for module, names in of("pdproxy").items()}
    )


def test_the_proxy_is_free_of_torch() -> None:
    assert not offenders({module: heavy(names) for module, names in of("pdproxy").items()})


LIGHT = (
    "transfer.errors",
    "transfer.logs",
    "transfer.command_line",
    "transfer.memory_budget",
    "transfer.geometry",
    "transfer.descriptors",
    "transfer.trust",
    "transfer.wire",
    "transfer.child_process",
    "transfer.agents.base",
    "transfer.agents.spans",
    "transfer.plan",
)
"""What is imported without torch, by the proxy and by tools."""


def test_the_lower_floors_of_transfer_are_free_of_torch() -> None:
    names = of("transfer").items()
    assert not offenders({module: heavy(found) for module, found in names if FLOORS[floor(module)] in LIGHT})


def heavy(names: Iterable[str]) -> list[str]:
    return [name for name in names if package(name) in HEAVY]


DOES_IO = (
    "pdproxy.coordination.",
    "pdproxy.discovery.",
    "pdproxy.engines.http.",
    "pdproxy.kv_events.subscriber",
    "pdproxy.kv_signals.zmq",
)


def test_below_the_server_only_five_places_do_io() -> None:
    below = {
        module: [one for one in names if package(one) in NO_IO]
        for module, names in of("pdproxy").items()
        if floor(module) < FLOORS.index("pdproxy.server") and not module.startswith(DOES_IO)
    }
    assert not offenders(below)


def test_only_assemble_knows_the_concrete_classes() -> None:
    kinds = {f"pdproxy.engines.{kind}" for kind in get_args(Engine)}
    clients = {"pdproxy.engines.http.httpx_client", "pdproxy.engines.http.http1.client"}
    concrete = {"pdproxy.admission.budget", "pdproxy.kv_signals.zmq", *clients, *kinds}
    outside = {"pdproxy.loadtest.target"}  # a client of whatever proxy or engine it is pointed at
    own = {"pdproxy.assemble", "pdproxy.engines.factory", "pdproxy.engines.lmcache_config", *concrete, *outside}
    knowing = {name for name, path in MODULES.items() if imports(path) & concrete} - own
    assert not knowing


def test_no_import_cycles() -> None:
    graph = {name: {target for target in imports(path) if target in MODULES} for name, path in MODULES.items()}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " → ".join((*trail, module))
        if module not in done:
            for target in graph[module]:
                visit(target, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())
