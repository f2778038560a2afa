"""The floors: a module imports only from its own floor or below, and the two packages meet at one door."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# The longest prefix counts. Where a package spans floors, its modules are named.
FLOORS = {
    "pdproxy": 0,
    "pdproxy.errors": 0,
    "pdproxy.config": 0,
    "pdproxy.engines.base": 1,
    "pdproxy.admission": 1,
    "pdproxy.flight": 1,
    "pdproxy.signals.board": 1,
    "pdproxy.request.openai": 1,
    "pdproxy.request.bounds": 1,
    "pdproxy.reply.sse": 1,
    "pdproxy.reply.answer": 1,
    "pdproxy.request.path": 1,
    "pdproxy.request.streamable": 1,
    "pdproxy.reply.seam": 1,
    "pdproxy.reply.opening": 1,
    "pdproxy.reply.assembled": 1,
    "pdproxy.reply.transcript": 1,
    "pdproxy.reply.streamed": 1,
    "pdproxy.capacity": 1,
    "pdproxy.engines": 1,
    "pdproxy.fleet.instance": 1,
    "pdproxy.fleet.pool": 1,
    "pdproxy.fleet.routing": 1,
    "pdproxy.signals": 1,
    "pdproxy.fleet.base": 0,
    "pdproxy.fleet": 1,
    "pdproxy.telemetry": 1,
    "pdproxy.telemetry.log": 2,
    "pdproxy.telemetry.metrics": 2,
    "pdproxy.engines.client": 2,
    "pdproxy.engines.http1": 1,
    "pdproxy.engines.http1.connection": 2,
    "pdproxy.engines.http1.leg": 2,
    "pdproxy.engines.http1.origin": 2,
    "pdproxy.engines.http1.client": 2,
    "pdproxy.signals.zmq": 2,
    "pdproxy.fleet.probe": 2,
    "pdproxy.fleet.token_counts": 2,
    "pdproxy.fleet.tokenizer_check": 2,
    "pdproxy.fleet.ended": 2,
    "pdproxy.fleet.membership": 2,
    "pdproxy.fleet.discovery": 2,
    "pdproxy.telemetry.fleet": 2,
    "pdproxy.request.tokens": 2,
    "pdproxy.legs": 3,
    "pdproxy.trip": 3,
    "pdproxy.attempt": 3,
    "pdproxy.reply.relay": 3,
    "pdproxy.reply.pour": 3,
    "pdproxy.reply.refusal": 3,
    "pdproxy.canary": 3,
    "pdproxy.steps": 3,
    "pdproxy.pairing": 3,
    "pdproxy.orchestrator": 3,
    "pdproxy.reaper": 3,
    "pdproxy.assemble": 4,
    "pdproxy.app": 4,
    "pdproxy.admin": 4,
    "pdproxy.routes": 4,
    "pdproxy.dashboard": 4,
    "pdproxy.clients": 4,
    "pdproxy.server": 5,
    "pdproxy.cli": 5,
    "pdproxy.__main__": 5,
    "pdproxy.launch": 5,
    "pdproxy.soak": 5,
    "pdproxy.compiled": 5,
    "pdproxy.bench": 5,
    "pdproxy.simulate": 5,
    "pdproxy.loadtest": 5,
    "transfer": 5,
    "transfer.geometry": 0,
    "transfer.wire": 0,
    "transfer.errors": 0,
    "transfer.trust": 0,
    "transfer.plan": 1,
    "transfer.agents.base": 1,
    "transfer.memory": 1,
    "transfer.agents": 1,
    "transfer.memory.buffer": 2,
    "transfer.memory.page_tags": 2,
    "transfer.memory.shared": 2,
    "transfer.memory.views": 2,
    "transfer.agents.device": 2,
    "transfer.agents.lane": 2,
    "transfer.agents.nixl": 2,
    "transfer.agents.nixl_setup": 2,
    "transfer.roles": 3,
    "transfer.dataplane": 4,
    "transfer.engine": 4,
    "transfer.bench": 5,
    "transfer.soak": 5,
}
DOOR = {"transfer.geometry", "transfer.wire", "transfer.errors", "transfer.trust", "transfer"}
"""All of `transfer` that `pdproxy` may see; `transfer` itself only as `from transfer import wire`."""
HEAVY = {"torch", "nixl", "nixl_cu12", "nixl_cu13", "safetensors"}
NO_IO = {"httpx", "zmq", "uvicorn", "fastapi", "starlette", "socket", "subprocess", "requests", "aiohttp"}


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
    while module not in FLOORS:
        module, _, last = module.rpartition(".")
        assert last, module
    return FLOORS[module]


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
        return package(name) != "transfer" or name.startswith("transfer.geometry.") or name in DOOR

    assert not offenders(
        {module: [one for one in names if not is_let_in(one)] for module, names in of("pdproxy").items()}
    )


def test_the_proxy_is_free_of_torch() -> None:
    assert not offenders({module: heavy(names) for module, names in of("pdproxy").items()})


def test_the_lower_floors_of_transfer_are_free_of_torch() -> None:
    assert not offenders({module: heavy(names) for module, names in of("transfer").items() if floor(module) < 2})


def heavy(names: Iterable[str]) -> list[str]:
    return [name for name in names if package(name) in HEAVY]


def test_the_lower_floors_of_the_proxy_do_no_io() -> None:
    assert not offenders(
        {
            module: [one for one in names if package(one) in NO_IO]
            for module, names in of("pdproxy").items()
            if floor(module) < 2
        }
    )


def test_only_assemble_knows_the_concrete_classes() -> None:
    kinds = {f"pdproxy.engines.{kind}" for kind in ("builtin", "vllm_nixl", "lmcache", "sglang", "mooncake")}
    clients = {"pdproxy.engines.client", "pdproxy.engines.http1.client"}
    concrete = {"pdproxy.admission.budget", "pdproxy.signals.zmq", *clients, *kinds}
    outside = {"pdproxy.loadtest.target"}  # a client of whatever proxy or engine it is pointed at
    own = {"pdproxy.assemble", "pdproxy.engines.kinds", "pdproxy.engines.lmcache_config", *concrete, *outside}
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
