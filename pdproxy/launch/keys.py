"""The module makes fresh keys for one launch: they cost its user nothing, and they are gone with its processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pdproxy.launch.fleet_plan import FleetPlan
from pdproxy.launch.kinds.base import EnginePlan
from pdproxy.launch.process import Program
from transfer.trust import new_key

BUILTIN = "builtin"


def with_fresh_keys(plan: FleetPlan, environ: Mapping[str, str]) -> FleetPlan:
    """Returns `plan` with a fleet key and an attempt key for its built-in engines and the proxy, in their environment.

    If the user says anything about a key, in `environ`, in an engine's environment or on a command line, this function
    leaves that key to the user. Other kinds of engines have no such keys.
    """
    if not all(map(_is_builtin, plan.engines)):
        return plan
    shared, signed = {}, {}
    if not _is_said("fleet", plan, environ):
        shared["FLEET_KEY"] = new_key()
    if not _is_said("attempt", plan, environ):
        signed["ATTEMPT_KEY"] = new_key()

    def with_keys(engine: EnginePlan) -> EnginePlan:
        keys = shared | (signed if engine.seat.role == "decode" else {})
        return replace(engine, program=_with(engine.program, "PDENGINE", keys))

    return replace(plan, engines=tuple(map(with_keys, plan.engines)), proxy=_with(plan.proxy, "PDPROXY", signed))


def _is_builtin(engine: EnginePlan) -> bool:
    return any(table.get("engine") == BUILTIN for table in engine.tables)


def _is_said(key: str, plan: FleetPlan, environ: Mapping[str, str]) -> bool:
    programs = (plan.proxy, *(engine.program for engine in plan.engines))
    names = [name for where in (environ, *(program.env for program in programs)) for name in where]
    flags = [word for program in programs for word in program.command]
    variable = f"_{key.upper()}_KEY"
    return any(word.startswith(f"--{key}-key") for word in flags) or any(
        name.startswith(("PDENGINE", "PDPROXY")) and variable in name for name in names
    )


def _with(program: Program, prefix: str, keys: Mapping[str, str]) -> Program:
    return replace(program, env={**program.env, **{f"{prefix}_{name}": key for name, key in keys.items()}})
