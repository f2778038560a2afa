"""The module is the simulation's command line: it takes a fleet and its traffic, and gives tables and one JSON
object."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from rich.console import Console

from pdproxy.config import options as take
from pdproxy.config.options import FLEET, argument, option
from pdproxy.config.settings import Settings, explained
from pdproxy.errors import ConfigError
from pdproxy.loadtest.choices import rows as read_rows
from pdproxy.loadtest.errors import LoadTestError
from pdproxy.loadtest.lengths import Independent, parse_lengths
from pdproxy.loadtest.slo import Slo, SloError
from pdproxy.simulate import tables
from pdproxy.simulate.errors import SimulationError
from pdproxy.simulate.faults import read_faults
from pdproxy.simulate.fit import fit, predict, read_runs
from pdproxy.simulate.plan import Plan, rate_for
from pdproxy.simulate.simulation import Result, simulate
from pdproxy.simulate.speed import Speed, changed, read_speed
from pdproxy.simulate.studies import compare, compare_roles, find_knee, find_size, read_pairs
from pdproxy.simulate.traffic import Traffic, sizes_of
from transfer.command_line.commands import Command, one_line_errors
from transfer.command_line.json_file import console_beside, write_json
from transfer.errors import TransferError

app = typer.Typer(add_completion=False, rich_markup_mode=None)

WARMUP_SHARE = 0.1
LINK_S = 0.0002
RETRANSMIT_S = 0.2
FOUND_NOTHING = 1
"""The exit status when no rate, or no size, meets the target, or no request was answered."""


What = Literal["run", "compare", "knee", "size", "roles", "fit", "check"]
SPEED = "The engines' speed"
QUESTION = (
    "Question to answer. run: one simulation (the default); compare: several policies; knee: the highest rate that "
    "meets --slo, or, without it, at which TTFT and TPOT (p95) are within twice those of the unloaded fleet; size: the "
    "fewest instances that meet --slo; roles: --role-controller against every fixed split of the instances; fit: the "
    "engines' speed, from load tests; check: these load tests, predicted again"
)
Plain = dict[str, Any]


def _policy(name: str) -> Any:
    """Returns an option of ``pdproxy serve`` by which instances are chosen."""
    return option("POLICY", f"{Settings.model_fields[name].description} [default: as pdproxy serve]")


@app.command(cls=Command)
def main(
    what: Annotated[What, argument("QUESTION", QUESTION, FLEET)] = "run",
    files: Annotated[list[Path] | None, argument("FILE", "JSON Lines of load tests, for fit and check", FLEET)] = None,
    prefillers: take.Prefillers = 1,
    decoders: take.Decoders = 1,
    prefill_policy: Annotated[str | None, _policy("prefill_policy")] = None,
    decode_policy: Annotated[str | None, _policy("decode_policy")] = None,
    policies: Annotated[str, option("NAMES", "Policies to compare: all, or NAME,… or PREFILL/DECODE,…")] = "all",
    options: Annotated[str, option("NAME=VALUE", "Options of pdproxy serve: max_queue=64,slot_timeout_s=5")] = "",
    rate: take.Rate = None,
    load: Annotated[float, option("SHARE", "Share of what the fleet can do, without a --rate", min=1e-6)] = 0.7,
    arrivals: take.Arrivals = "poisson",
    burstiness: take.Burstiness = 4.0,
    clients: take.Clients = None,
    think_s: take.Think = 0.0,
    trace: take.Trace = None,
    requests: Annotated[int, option("N", "Requests of each simulation", min=1)] = 10_000,
    warmup: Annotated[float, option("SHARE", "Share of requests that do not count", min=0, max=0.9)] = WARMUP_SHARE,
    seed: take.Seed = None,
    prompt_tokens: take.PromptLengths = "lognormal:1000,0.8,32768",
    answer_tokens: take.AnswerLengths = "lognormal:150,0.8,4096",
    then: Annotated[str, option("LENGTHS/LENGTHS", "Tokens of prompts and answers in the second half")] = "",
    groups: Annotated[int, option("N", "Number of prefixes with which prompts begin; 0 for none", min=0)] = 0,
    shared_share: Annotated[float, option("SHARE", "Share of a prompt that its prefix has", min=0, max=1)] = 0.5,
    speed_file: Annotated[Path | None, option("FILE", "Speed, as fit writes it", "--speed", group=SPEED)] = None,
    speed_changes: Annotated[str, option("NAME=VALUE", "Changes to the speed: max_batch=64,…", "--set")] = "",
    slo: take.SloText = "",
    faults: take.FaultsText = "",
    stragglers: Annotated[str, option("SHARExN", "Slow engines: 0.05x3 makes 5 % three times as slow")] = "",
    patience_s: Annotated[float | None, option("SECONDS", "Longest wait of a client for a token", min=1e-3)] = None,
    proxies: Annotated[int, option("N", "Proxies in front of the fleet; of several, a leader admits", min=1)] = 1,
    link_delay_s: Annotated[
        float, option("SECONDS", "One way between proxies and leader", "--link-delay", min=0, max=60)
    ] = LINK_S,
    link_jitter_s: Annotated[
        float, option("SECONDS", "Longest time that this may take beyond", "--link-jitter", min=0, max=60)
    ] = 0.0,
    link_loss: Annotated[float, option("SHARE", "Share of that which is lost and sent again", min=0, max=0.9)] = 0.0,
    link_retransmit_s: Annotated[
        float, option("SECONDS", "Time until what was lost is sent again", "--link-retransmit", min=0, max=60)
    ] = RETRANSMIT_S,
    message_cpu_s: Annotated[
        float, option("SECONDS", "CPU time that a message costs the leader, to tell its share of a core", min=0)
    ] = 0.0,
    json_file: take.Json = None,
    as_markdown: Annotated[bool, option(None, "Write the tables as Markdown", "--markdown")] = False,
) -> None:
    """Answer what a fleet would do, with the proxy's own code under simulated time and simulated engines.

    The same seed gives the same figures, whatever else this machine does.
    """
    seed = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    told = Console(stderr=True)
    with one_line_errors("pdproxy simulate", TransferError, ConfigError, LoadTestError, SloError, OSError):
        speed = changed(read_speed(speed_file) if speed_file else Speed(), speed_changes)
        rows = read_rows(trace, None) if trace else []
        sizes = sizes_of(rows) if rows else Independent(parse_lengths(prompt_tokens), parse_lengths(answer_tokens))
        traffic = Traffic(
            sizes=sizes,
            process=arrivals,
            burstiness=burstiness,
            clients=clients or 0,
            think_s=think_s,
            num_groups=groups,
            shared_share=shared_share,
            rows=rows,
            then=_sizes(then) if then else None,
        )
        if then and (rate is None or clients or rows):
            raise SimulationError("then: it needs a --rate, and goes with neither --clients nor --trace")
        traffic = replace(traffic, rate=rate or rate_for(load, prefillers, decoders, speed, traffic))
        plan = Plan(
            prefillers=prefillers,
            decoders=decoders,
            num_requests=requests,
            seed=seed,
            traffic=traffic,
            speed=speed,
            settings=_settings(options, prefill_policy, decode_policy),
            slo=_slo(slo),
            num_warmup=int(requests * warmup),
            faults=tuple(read_faults(faults)),
            stragglers=stragglers,
            patience_s=patience_s,
            proxies=proxies,
            link_delay_s=link_delay_s,
            link_jitter_s=link_jitter_s,
            link_loss=link_loss,
            link_retransmit_s=link_retransmit_s,
            message_cpu_s=message_cpu_s,
        )
        told.print(f"seed {seed}", highlight=False)
        study = _STUDIES[what]
        found, shown, status = study(plan, tuple(files or ()), policies, told)
        write_json(json_file, found)
    figures = console_beside(json_file)
    for title, table in shown:
        if as_markdown:
            figures.file.write(f"{title}\n\n{tables.markdown(table)}\n")
        else:
            tables.make_table(title, table).print_to(figures)
    if status:
        raise typer.Exit(status)


Shown = list[tuple[str, tables.Rows]]
Found = tuple[Plain, Shown, int]
"""A study's result: plain values for JSON, tables for people, and the exit status."""
Study = Callable[[Plan, tuple[Path, ...], str, Console], Found]


def _run(plan: Plan, files: tuple[Path, ...], policies: str, told: Console) -> Found:
    result = simulate(plan)
    is_answered = result.figures.outcomes["done"] > 0
    title = _headline(result) + ("" if is_answered else "; no request was answered")
    if result.num_without_room:
        title += f"; decoders had no room for {result.num_without_room} transfers that were granted"
    shown = [(title, tables.latency_rows(result)), ("The fleet", tables.fleet_rows(result))]
    return result.as_plain(), shown, 0 if is_answered and not result.num_without_room else FOUND_NOTHING


def _compare(plan: Plan, files: tuple[Path, ...], policies: str, told: Console) -> Found:
    pairs = read_pairs(policies)
    found = compare(plan, pairs, partial(_tell, told))
    plain = {str(pair): result.as_plain() for pair, result in found}
    title = f"Policies, {plan.name} at {plan.traffic.rate:.4g} requests/s, seed {plan.seed}"
    return _summed(plan, [result for _, result in found]) | {"policies": plain}, [(title, tables.policy_rows(found))], 0


def _knee(plan: Plan, files: tuple[Path, ...], policies: str, told: Console) -> Found:
    knee = find_knee(plan, partial(_tell, told))
    plain = _summed(plan, knee.results) | {
        "knee_per_s": knee.rate,
        "is_bound": knee.is_bound,
        "slo": str(knee.slo),
        "target": knee.target,
        "rates": [result.as_plain() for result in knee.results],
    }
    at = "no rate meets it" if knee.rate is None else f"the knee is at {knee.rate:.4g} requests/s"
    if knee.is_bound and knee.rate is not None:
        at = f"every rate meets it, up to {knee.rate:.4g} requests/s; the knee lies above"
    title = f"{plan.name}, {knee.target}: {at}"
    return plain, [(title, tables.rate_rows(knee.results))], FOUND_NOTHING if knee.rate is None else 0


def _size(plan: Plan, files: tuple[Path, ...], policies: str, told: Console) -> Found:
    size = find_size(plan, partial(_tell, told))
    best = size.result
    plain = _summed(plan, size.tried) | {
        "prefillers": best.plan.prefillers if best else None,
        "decoders": best.plan.decoders if best else None,
        "best": best.as_plain() if best else None,
        "tried": [result.as_plain() for result in size.tried],
    }
    enough = f"{best.plan.name} is enough" if best else "none of these is enough"
    title = f"{plan.traffic.rate:.4g} requests/s, {plan.slo}: {enough}"
    return plain, [(title, tables.size_rows(size.tried))], 0 if best else FOUND_NOTHING


def _roles(plan: Plan, files: tuple[Path, ...], policies: str, told: Console) -> Found:
    found = compare_roles(plan, partial(_tell, told))
    plain = _summed(plan, [result for _, result in found]) | {"splits": {name: one.as_plain() for name, one in found}}
    moves = found[-1][1].moves
    title = f"Roles, {plan.traffic.rate:.4g} requests/s, seed {plan.seed}"
    shown = [(title, tables.role_rows(found))]
    if moves:
        rows = [[f"{at_s:.4g} s", what] for at_s, what in moves]
        shown.append(("What the controller did", (["at", "instance and new role"], rows)))
    return plain, shown, 0


def _sizes(text: str) -> Independent:
    """Returns the sizes of a text like ``200/1000``. Raises `SimulationError`, `WorkloadError`."""
    prompt, is_both, answer = text.partition("/")
    if not is_both:
        raise SimulationError(f"then: {text!r} is not PROMPT/ANSWER, as 200/1000")
    return Independent(parse_lengths(prompt), parse_lengths(answer))


def _fit(plan: Plan, files: tuple[Path, ...], policies: str, told: Console) -> Found:
    speed = fit(read_runs(_some(files)), plan.speed)
    plain = msgspec.to_builtins(speed)
    return {"speed": plain}, [("Fitted", (["", "value"], [[name, f"{value:g}"] for name, value in plain.items()]))], 0


def _check(plan: Plan, files: tuple[Path, ...], policies: str, told: Console) -> Found:
    plain: dict[str, Any] = {}
    shown: Shown = []
    results = []
    for path, run in zip(files, read_runs(_some(files)), strict=True):
        result, compared = predict(run, plan)
        results.append(result)
        errors = {
            one.what: {"measured": one.measured, "predicted": one.predicted, "error": one.error} for one in compared
        }
        plain[path.name] = {"compared": errors, "predicted": result.as_plain()}
        shown.append((f"{path.name}, {plan.name}", tables.compared_rows(compared)))
    return _summed(plan, results) | {"runs": plain}, shown, 0


_STUDIES: dict[What, Study] = {
    "run": _run,
    "compare": _compare,
    "knee": _knee,
    "size": _size,
    "roles": _roles,
    "fit": _fit,
    "check": _check,
}


def _summed(plan: Plan, results: list[Result]) -> Plain:
    """Returns the sums over all simulations of a study."""
    return {
        "requests": sum(result.plan.num_requests for result in results),
        "wall_s": round(sum(result.wall_s for result in results), 3),
        "seed": plan.seed,
    }


def _tell(told: Console, name: str, result: Result) -> None:
    told.print(f"{name}: {_headline(result)}", highlight=False, soft_wrap=True)


def _headline(result: Result) -> str:
    figures = result.figures
    ttft = tables.seconds(figures.latencies["ttft"].percentile(50.0))
    failed = f", {figures.num_failed} failed" if figures.num_failed else ""
    answers = f"{tables.number(result.done_per_s)} answers/s, TTFT p50 {ttft}{failed}"
    times = f"{result.simulated_s:.4g} s simulated in {result.wall_s:.3g} s"
    return f"{result.plan.name}, {result.plan.num_requests} requests: {answers}; {times}"


def _some(files: tuple[Path, ...]) -> tuple[Path, ...]:
    if not files:
        raise SimulationError("which load test? Give its JSON Lines")
    return files


def _settings(options: str, prefill_policy: str | None, decode_policy: str | None) -> Settings:
    """Returns the settings as pdproxy serve would have them. Raises `SimulationError`, `ConfigError`."""
    given: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in options.split(","))):
        name, is_assigned, value = part.partition("=")
        if not is_assigned:
            raise SimulationError(f"options: {part!r} is not NAME=VALUE")
        given[name.strip().replace("-", "_")] = value.strip()
    policies = {"prefill_policy": prefill_policy, "decode_policy": decode_policy}
    given |= {name: value for name, value in policies.items() if value is not None}
    return explained(lambda: Settings(**given))


def _slo(text: str) -> Slo:
    slo = Slo.parse(text)
    if any(one.metric == "itl" for one in slo.objectives):
        raise SimulationError("slo: the pieces of a simulated answer are not told apart; use tpot instead of itl")
    return slo
